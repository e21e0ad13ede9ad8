"""Random windows over slotted caches that hold NaN wherever nothing may be read."""

import torch


def make(lengths, widths, heads=6, kv_heads=2, head_dim=20, value_dim=20, capacity=111, padding=0, oldest=None):
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + sum(widths))

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows, total = len(lengths), sum(widths) + padding
    caches = []
    for dim in (head_dim, value_dim):
        cache = torch.full((rows, kv_heads, capacity, dim), float("nan"))
        for row, length in enumerate(lengths):
            first = 0 if oldest is None else max(0, oldest[row])
            cache[row, :, first : length + widths[row]] = normal(kv_heads, length + widths[row] - first, dim)
        caches.append(cache)
    return {
        "query": normal(total, heads, head_dim),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "lengths": torch.tensor(lengths),
        "offsets": torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()]),
        "scaling": head_dim**-0.5,
    }
