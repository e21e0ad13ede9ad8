"""The plain PyTorch twin of the kernel for few tokens: what every other implementation is measured against."""

from typing import Optional

import torch


def few_rows_linear_reference(
    states: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    r"""
    `states @ weight.T + bias`, with products and sums in float32 (float64 where the inputs are), rounded once.

    Args:
        states (`torch.Tensor` of shape `(..., size)`): Any float dtype.
        weight (`torch.Tensor` of shape `(features, size)`): Of the same dtype.
        bias (`torch.Tensor` of shape `(features,)`, *optional*): Of the same dtype.

    Returns:
        `torch.Tensor` of shape `(..., features)`, with the states' dtype.

    Raises:
        `ValueError`: Shapes or dtypes that do not belong together.

    Source: `torch.nn.functional.linear`.
    """
    check(states, weight, bias)
    wide = torch.promote_types(states.dtype, torch.float32)
    product = states.to(wide) @ weight.to(wide).t()
    return (product if bias is None else product + bias.to(wide)).to(states.dtype)


def check(states: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> None:
    """Raises a `ValueError` where shapes or dtypes do not belong together."""
    if weight.ndim != 2 or states.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"states of shape {tuple(states.shape)} and a weight of shape {tuple(weight.shape)} do not fit: pass "
            "(..., size) and (features, size)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; beside this weight it must be ({weight.shape[0]},).")
    dtypes = [tensor.dtype for tensor in (states, weight, bias) if tensor is not None]
    if len(set(dtypes)) > 1 or not states.is_floating_point():
        raise ValueError(f"dtypes are {dtypes}: states, weight and bias must share one float dtype.")
