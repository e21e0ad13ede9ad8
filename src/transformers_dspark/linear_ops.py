"""
Linear layers for few tokens as operators of PyTorch, which it can compile around and capture.

The number of tokens is looked at inside of them, so a compiled model has no guard on it: few tokens go to the kernel,
others to `torch.nn.functional.linear`. Where a compiler sees several layers of the same states, they share a launch.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import library
from torch.fx import Graph, Node

from ._compat import graph_pass
from .kernels.few_rows_linear import MAX_WEIGHTS


# Tokens up to which the kernel was quicker than cuBLAS on an H200: for one weight, and for several in one launch
QUICKER, QUICKER_TOGETHER = 16, 64


@library.custom_op("transformers_dspark::few_rows_linear", mutates_args=(), device_types="cuda")
def few_rows_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `states @ weight.T + bias` for any number of tokens, also `torch.ops.transformers_dspark.few_rows_linear`. For
    inference: it has no backward.

    Args:
        states (`torch.Tensor` of shape `(..., size)`): bfloat16, float16 or float32.
        weight (`torch.Tensor` of shape `(features, size)`): Of the same dtype.
        bias (`torch.Tensor` of shape `(features,)`, *optional*): Of the same dtype.

    Returns:
        `torch.Tensor` of shape `(..., features)`, with the states' dtype, contiguous.

    Raises:
        ValueError: Shapes or dtypes that do not belong together.
    """
    from .kernels import few_rows_linear as kernel

    tokens = states.numel() // max(1, states.shape[-1])
    if 1 <= tokens <= QUICKER:
        return kernel.few_rows_linear(states, weight, bias)
    return F.linear(states, weight, bias).contiguous()


@few_rows_linear.register_kernel("cpu")
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(states, weight, bias).contiguous()


@few_rows_linear.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


@library.custom_op("transformers_dspark::few_rows_linears", mutates_args=(), device_types="cuda")
def few_rows_linears(
    states: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> list[torch.Tensor]:
    """
    Several [`few_rows_linear`] of the same states.

    Args:
        states (`torch.Tensor` of shape `(..., size)`): bfloat16, float16 or float32.
        weights (list of 1 to 16 `torch.Tensor` of shape `(features of each, size)`): Of the same dtype and strides.
        biases (list of `torch.Tensor` of shape `(features of each,)`): For all of the weights, or none.

    Returns:
        list of `torch.Tensor` of shape `(..., features of each)`, contiguous.

    Raises:
        ValueError: Shapes, dtypes or strides that do not belong together.
    """
    from .kernels import few_rows_linear as kernel

    tokens = states.numel() // max(1, states.shape[-1])
    if 1 <= tokens <= QUICKER_TOGETHER:
        return kernel.few_rows_linears(states, weights, biases or None)
    return _one_by_one(states, weights, biases)


@few_rows_linears.register_kernel("cpu")
def _one_by_one(states: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    if not biases:
        return [F.linear(states, weight) for weight in weights]
    return [F.linear(states, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@few_rows_linears.register_fake
def _(states: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    return [states.new_empty(*states.shape[:-1], weight.shape[0]) for weight in weights]


def share_launches(graph: Graph) -> None:
    """
    Rewrites the linear layers of a compiled graph: those that multiply the same states, whose weights are inputs of
    the graph with the same dtype and strides, all with a bias or all without, become one operator.

    Args:
        graph (`torch.fx.Graph`): Of PyTorch's own operators, with example values.
    """
    alone: dict[object, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.transformers_dspark.few_rows_linear.default):
        weight, bias = _parameters(node)
        if all(one is None or one.op in ("placeholder", "get_attr") for one in (weight, bias)):
            known = weight.meta["val"]
            # strides may be symbols, which cannot be hashed
            alike = node.args[0], str(known.stride()), known.dtype, bias is None
            alone.setdefault(alike, []).append(node)
    for nodes in alone.values():
        for begin in range(0, len(nodes), MAX_WEIGHTS):
            some = nodes[begin : begin + MAX_WEIGHTS]
            if len(some) > 1:
                _join(graph, some)


def _join(graph: Graph, nodes: list[Node]) -> None:
    weights, biases = zip(*map(_parameters, nodes), strict=True)
    with graph.inserting_before(nodes[0]):
        operands = nodes[0].args[0], list(weights), [bias for bias in biases if bias is not None]
        joined = graph.call_function(torch.ops.transformers_dspark.few_rows_linears.default, operands)
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        parts = [graph.call_function(operator.getitem, (joined, index)) for index in range(len(nodes))]
    for part, node in zip(parts, nodes, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _parameters(node: Node) -> tuple[Any, Any]:
    """Weight and bias of a layer, the second maybe `None`."""
    return node.args[1], node.args[2] if len(node.args) > 2 else None


SHARED_LAUNCHES = graph_pass(share_launches, Path(__file__))


__all__ = ["SHARED_LAUNCHES", "few_rows_linear", "few_rows_linears", "share_launches"]
