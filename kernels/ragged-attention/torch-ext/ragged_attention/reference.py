"""
The plain PyTorch twin of the ragged window kernel: what every other implementation is measured against.

Row `r` of a batch holds `lengths[r]` tokens in its cache, and behind them a window of `w_r = offsets[r + 1] -
offsets[r]` new ones, `w_r >= 0`, whose keys and values are already written. The windows' queries are packed one after
another, without padding. Query `i` of row `r`'s window stands at position `lengths[r] + i` and attends to

    entries j with 0 <= j <= lengths[r] + i where the window is causal,
    entries j with 0 <= j < lengths[r] + w_r where it is not,

and, with a sliding window of `s` tokens, only to positions above its own minus `s`. With scores
s_ij = scaling * q_i k_j, capped as c * tanh(s_ij / c) where a softcap c is given, and a learned sink b_h of each head,

    out_i = sum_j exp(s_ij) v_j / (exp(b_h) + sum_j exp(s_ij)),          the term exp(b_h) only with sinks.

Scores, weights and sums are float32 whatever the inputs are. Cache entries that no query of the window may see, those
behind the window and those a sliding window has left behind, are never read: they may hold anything, NaN included.

What this file deliberately does not know: how positions are encoded (keys arrive rotated), who owns the cache, and how
it is written.
"""

from typing import List, Optional

import torch


def ragged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    scaling: float,
    causal: bool = True,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""
    Attention of packed windows over slotted caches.

    Args:
        query (`torch.Tensor` of shape `(total, heads, head_dim)`): Queries of all windows, packed; any float dtype.
        key_cache (`torch.Tensor` of shape `(slots, kv_heads, capacity, head_dim)`): Keys, each row's from the start of
            its slot: those before the window, then those of the window. There are at least as many slots as rows.
        value_cache (`torch.Tensor` of shape `(slots, kv_heads, capacity, value_dim)`): Their values.
        lengths (`torch.Tensor` of shape `(rows,)`): Entries before each row's window, integers.
        offsets (`torch.Tensor` of shape `(rows + 1,)`): Where each window begins in the packed tensors, integers, not
            decreasing; the first is 0. Tokens from `offsets[-1]` on are padding: they get zeros.
        scaling (`float`): Factor of the scores.
        causal (`bool`, *optional*, defaults to `True`): Whether a query sees only those window keys that are not after
            it; otherwise the whole window.
        sliding_window (`int`, *optional*): A query at position `p` sees keys at positions above `p - sliding_window`,
            as in Transformers' masks. In a window that is not causal, later keys stay in sight.
        softcap (`float`, *optional*): Positive bound of the scores.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): A score for each head that takes part in the
            normalisation and carries no value.

    Returns:
        `torch.Tensor` of shape `(total, heads, value_dim)`, with the query's dtype.

    Raises:
        `ValueError`: Shapes, lengths or offsets that do not belong together.

    Source: `eager_attention_forward` of Transformers' Llama (plain), Gemma2 (softcap) and GPT-OSS (sinks).
    """
    row_lengths = [int(n) for n in lengths.tolist()]
    starts = [int(n) for n in offsets.tolist()]
    _check(query, key_cache, value_cache, row_lengths, starts, sinks)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}: it must be at least 1, or None for no window.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: it must be above 0, or None for no cap.")

    heads, kv_heads = query.shape[1], key_cache.shape[1]
    out = query.new_zeros(query.shape[0], heads, value_cache.shape[-1])
    for row, length in enumerate(row_lengths):
        begin, end = starts[row], starts[row + 1]
        width = end - begin
        if width == 0:
            continue
        # the oldest entry that the first query sees; the later ones see none older
        oldest = 0 if sliding_window is None else max(0, length - sliding_window + 1)
        keys = key_cache[row, :, oldest : length + width].float().repeat_interleave(heads // kv_heads, dim=0)
        values = value_cache[row, :, oldest : length + width].float().repeat_interleave(heads // kv_heads, dim=0)
        scores = query[begin:end].transpose(0, 1).float() @ keys.transpose(1, 2) * scaling  # [heads, width, n]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(width, length - oldest, causal, sliding_window, query.device)  # [width, n]
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(heads, 1, 1).expand(heads, width, 1)
            weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        out[begin:end] = (weights @ values).transpose(0, 1).to(out.dtype)
    return out


def _visible(
    width: int, length: int, causal: bool, sliding_window: Optional[int], device: torch.device
) -> torch.Tensor:
    queries = torch.arange(length, length + width, device=device)[:, None]  # counted from the oldest entry
    keys = torch.arange(length + width, device=device)[None, :]
    # Each query sees at least itself, so no row of the mask is empty.
    visible = torch.ones(width, length + width, dtype=torch.bool, device=device)
    if causal:
        visible &= keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: List[int],
    starts: List[int],
    sinks: Optional[torch.Tensor],
) -> None:
    total, heads, head_dim = query.shape
    slots, kv_heads, capacity, _ = key_cache.shape
    rows = min(slots, len(lengths))
    expected = {
        "key_cache": (key_cache, (slots, kv_heads, capacity, head_dim)),
        "value_cache": (value_cache, (slots, kv_heads, capacity, value_cache.shape[-1])),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (heads,))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; beside the other inputs it must be {shape}.")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly: pass a multiple.")
    rising = all(first <= second for first, second in zip(starts, starts[1:]))  # noqa: RUF007 (pairwise is newer than Python 3.9)
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] > total or not rising:
        raise ValueError(
            f"offsets is {starts}: it must hold {rows + 1} numbers rising from 0 to at most {total} packed tokens."
        )
    ends = [length + end - start for length, start, end in zip(lengths, starts, starts[1:])]
    if len(lengths) != rows or not all(n >= 0 and end <= capacity for n, end in zip(lengths, ends)):
        raise ValueError(
            f"lengths is {lengths}: it must hold {rows} numbers from 0, and each with its window must fit the "
            f"capacity {capacity}."
        )
