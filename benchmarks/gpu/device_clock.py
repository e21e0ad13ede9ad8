"""The timer of a CUDA device, read between its kernels."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


def stamp(stamps: torch.Tensor, number: torch.Tensor, point: int) -> None:
    """
    Writes the device's nanoseconds to `stamps[number % len(stamps), point]`, in the order of the stream.

    Args:
        stamps (`torch.LongTensor` of shape `(rounds, points)`): On the device.
        number (`torch.LongTensor` of shape `(1,)`): On the device, too: its value at the time the kernel runs counts.
        point (`int`): Column.
    """
    round_stamp[(1,)](stamps, number, len(stamps), point, stamps.shape[1], num_warps=1)


@triton.jit(do_not_specialize=["point"])  # one kernel for all of them, so that none is compiled while a graph is made
def round_stamp(stamps, number, rounds, point, points: tl.constexpr):
    tl.store(stamps + (tl.load(number) % rounds) * points + point, globaltimer())
