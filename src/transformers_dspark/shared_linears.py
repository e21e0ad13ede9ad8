"""Linear layers that multiply the same states share a launch of their kernel, where a compiler sees them together."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from ._compat import graph_pass
from .kernels.few_rows_linear import MAX_WEIGHTS, few_rows_linear_op, few_rows_linears_op


def share_launches(graph: Graph) -> None:
    """
    Rewrites the linear layers of a compiled graph: those that multiply the same states, whose weights are inputs of
    the graph with the same dtype and strides, all with a bias or all without, become one operator.

    Args:
        graph (`torch.fx.Graph`): Of PyTorch's own operators, with example values.
    """
    alone: dict[object, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=few_rows_linear_op._opoverload):
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
        joined = graph.call_function(few_rows_linears_op._opoverload, operands)
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


__all__ = ["SHARED_LAUNCHES", "share_launches"]
