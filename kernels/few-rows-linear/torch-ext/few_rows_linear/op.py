"""
The kernel as operators of PyTorch, for compiled models. The number of tokens is looked at inside of them, so a
compiled model has no guard on it: few tokens go to the kernel, others to `torch.nn.functional.linear`.
"""

from typing import List, Optional

import torch
import torch.nn.functional as F
from torch import library


QUICKER = 16  # tokens up to which the kernel was quicker than cuBLAS on an H200


@library.custom_op("transformers_dspark::few_rows_linear", mutates_args=(), device_types="cuda")
def few_rows_linear_op(
    states: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    r"""
    `states @ weight.T + bias` for any number of tokens, also `torch.ops.transformers_dspark.few_rows_linear`. For
    inference: it has no backward.

    Args:
        states (`torch.Tensor` of shape `(..., size)`): bfloat16, float16 or float32.
        weight (`torch.Tensor` of shape `(features, size)`): Of the same dtype.
        bias (`torch.Tensor` of shape `(features,)`, *optional*): Of the same dtype.

    Returns:
        `torch.Tensor` of shape `(..., features)`, with the states' dtype, contiguous.

    Raises:
        `ValueError`: Shapes or dtypes that do not belong together.
    """
    from .kernel import few_rows_linear

    tokens = states.numel() // max(1, states.shape[-1])
    if 1 <= tokens <= QUICKER:
        return few_rows_linear(states, weight, bias)
    return F.linear(states, weight, bias).contiguous()


@few_rows_linear_op.register_kernel("cpu")
def _(states: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    return F.linear(states, weight, bias).contiguous()


@few_rows_linear_op.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


@library.custom_op("transformers_dspark::few_rows_linears", mutates_args=(), device_types="cuda")
def few_rows_linears_op(
    states: torch.Tensor, weights: List[torch.Tensor], biases: List[torch.Tensor]
) -> List[torch.Tensor]:
    r"""
    Several [`few_rows_linear_op`] of the same states.

    Args:
        states (`torch.Tensor` of shape `(..., size)`): bfloat16, float16 or float32.
        weights (list of 1 to 16 `torch.Tensor` of shape `(features of each, size)`): Of the same dtype and strides.
        biases (list of `torch.Tensor` of shape `(features of each,)`): For all of the weights, or none.

    Returns:
        list of `torch.Tensor` of shape `(..., features of each)`, contiguous.

    Raises:
        `ValueError`: Shapes, dtypes or strides that do not belong together.
    """
    from .kernel import few_rows_linears

    tokens = states.numel() // max(1, states.shape[-1])
    if 1 <= tokens <= QUICKER:
        return few_rows_linears(states, weights, biases or None)
    return _one_by_one(states, weights, biases)


@few_rows_linears_op.register_kernel("cpu")
def _one_by_one(states: torch.Tensor, weights: List[torch.Tensor], biases: List[torch.Tensor]) -> List[torch.Tensor]:
    return [F.linear(states, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights))]


@few_rows_linears_op.register_fake
def _(states: torch.Tensor, weights: List[torch.Tensor], biases: List[torch.Tensor]) -> List[torch.Tensor]:
    return [states.new_empty(*states.shape[:-1], weight.shape[0]) for weight in weights]


__all__ = ["few_rows_linear_op", "few_rows_linears_op"]
