"""The plain PyTorch twin of the kernel for few tokens: what every other implementation is measured against."""

from typing import Optional, Sequence

import torch


MAX_WEIGHTS = 16  # that share a launch


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
    check_all(states, [weight], None if bias is None else [bias])
    wide = torch.promote_types(states.dtype, torch.float32)
    product = states.to(wide) @ weight.to(wide).t()
    return (product if bias is None else product + bias.to(wide)).to(states.dtype)


def check_all(states: torch.Tensor, weights: Sequence[torch.Tensor], biases: Optional[Sequence[torch.Tensor]]) -> None:
    """Raises a `ValueError` where shapes or dtypes do not belong together."""
    if not weights or (biases is not None and len(biases) != len(weights)):
        raise ValueError(
            f"{len(weights)} weights and {len(biases or ())} biases: pass one of each, or no bias at all."
        )
    for weight in weights:
        if weight.ndim != 2 or states.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                f"states of shape {tuple(states.shape)} and a weight of shape {tuple(weight.shape)} do not fit: pass "
                "(..., size) and (features, size)."
            )
    for weight, bias in zip(weights, biases or ()):
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; beside this weight it must be ({weight.shape[0]},)."
            )
    dtypes = [tensor.dtype for tensor in (states, *weights, *(biases or ()))]
    if len(set(dtypes)) > 1 or not states.is_floating_point():
        raise ValueError(f"dtypes are {dtypes}: states, weight and bias must share one float dtype.")
