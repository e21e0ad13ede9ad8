"""Numbers of 8 or 4 bits with a scale for each block of them, as floating point tensors that any module can use."""

from __future__ import annotations

import torch


FP8_BLOCK, FP4_BLOCK = (128, 128), (1, 32)
# e2m1: a sign, two bits of exponent, one of mantissa
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_BITS = (torch.int8, torch.uint8)


def unpacked_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a matrix once it is unpacked: a byte of four-bit numbers holds two neighbours of a row."""
    return (*shape[:-1], 2 * shape[-1]) if dtype in _FP4_BITS else shape


def dequantized(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    Args:
        packed (`torch.Tensor` of shape `(rows, columns)`): float8 (e4m3); or bytes of two e2m1 numbers each, the
            first one in the lower bits, and half as many columns.
        scales (`torch.Tensor`): One factor for each block of 128 x 128 (float8) or 1 x 32 (four bits); blocks at the
            end may be cut. Powers of two (ue8m0), or floating point.
        dtype (`torch.dtype`): Of the result.

    Returns:
        `torch.FloatTensor` of shape `(rows, columns)`: the product is rounded once, from float32.

    Raises:
        ValueError: the scales do not cover the matrix in such blocks.
    """
    four_bits = packed.dtype in _FP4_BITS
    block = FP4_BLOCK if four_bits else FP8_BLOCK
    values = _unpacked(packed) if four_bits else packed.float()
    wanted = tuple(-(-size // length) for size, length in zip(values.shape, block, strict=True))
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} do not fit {tuple(values.shape)} numbers in blocks of "
            f"{block[0]} x {block[1]}, which need {wanted}"
        )
    if scales.dtype == torch.uint8:  # exponents that the file does not call so
        scales = scales.view(torch.float8_e8m0fnu)
    factors = scales.float()
    for axis, length in enumerate(block):
        factors = factors.repeat_interleave(length, dim=axis).narrow(axis, 0, values.shape[axis])
    return values.mul_(factors).to(dtype)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    bits = packed.view(torch.uint8)
    return table[torch.stack((bits & 15, bits >> 4), dim=-1).long()].flatten(-2)


__all__ = ["dequantized", "unpacked_shape"]
