"""How much of the time a device waits, from the spans of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


LONG_GAP = 10e-6  # seconds; between the kernels of one graph there is less
STAMP = "round_stamp"  # the kernel of the clock, which runs in every round


def idle_shares(spans: Iterable[tuple[float, float]], begin: float, end: float) -> tuple[float, float]:
    """
    Share of a time in which nothing ran, and the part of it in gaps of `LONG_GAP` and more, which hosts cause.

    Args:
        spans (`Iterable[tuple[float, float]]`): Begins and ends of kernels in seconds, some of them at the same time.
        begin, end (`float`): The time in question.
    """
    idle, long, reached = 0.0, 0.0, begin
    for first, last in sorted(spans):
        gap = min(first, end) - reached
        if gap > 0:
            idle += gap
            long += gap if gap >= LONG_GAP else 0.0
        reached = max(reached, min(last, end))
    rest = max(0.0, end - reached)
    return (idle + rest) / (end - begin), (long + (rest if rest >= LONG_GAP else 0.0)) / (end - begin)


def idle_of(run: Callable[[], object]) -> dict[str, float]:
    """
    Idle shares of the rounds in the second half of a call, under PyTorch's profiler of CUDA.

    Raises:
        RuntimeError: the profiler saw too few rounds.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    spans, stamps = [], []
    for event in profile.events():
        # regions that programs name lie around kernels and the gaps between them
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            span = event.time_range.start / 1e6, event.time_range.end / 1e6
            spans.append(span)
            if STAMP in event.name:
                stamps.append(span[0])
    stamps.sort()
    if len(stamps) < 20:
        raise RuntimeError(f"the profiler saw the clock's kernel {len(stamps)} times: too few for a share")
    share, long = idle_shares(spans, stamps[len(stamps) // 2], stamps[-6])
    return {"idle_share": share, "long_gap_share": long, "kernels": len(spans)}
