"""
The kernels that read and write ragged caches, as operators that PyTorch can compile around and capture.

On a CUDA device they are Triton kernels; elsewhere their references, which wait for the device and are for tests.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import library

from .kernels.ragged_attention import ragged_attention_reference


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def served(tensor: torch.Tensor) -> bool:
    """Whether kernels serve a tensor's device."""
    return tensor.is_cuda and _HAS_TRITON


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    spans: torch.Tensor,
    scaling: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    max_width: int,
    max_length: int,
) -> torch.Tensor:
    """
    Attention of packed windows, `(total, heads, value_dim)`; see the kernel's reference for what is computed.

    Args:
        query (`torch.Tensor` of shape `(total, heads, head_dim)`): Queries of the packed tokens.
        key_cache, value_cache (`torch.Tensor` of shape `(slots, key_value_heads, capacity, dim)`): Of all rows.
        spans (`torch.IntTensor` of shape `(2, rows + 1)`): As in [`VerifyWindow`].
        scaling, causal, sliding_window, softcap, sinks: As in the reference.
        max_width (`int`): At least the tokens of the longest window.
        max_length (`int`): At least the entries before any window.
    """
    options = {"causal": causal, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    lengths, offsets = spans[0, :-1], spans[1]
    if not query.is_cuda:
        return ragged_attention_reference(query, key_cache, value_cache, lengths, offsets, scaling, **options)
    from .kernels.ragged_attention import ragged_attention

    return ragged_attention(
        query,
        key_cache,
        value_cache,
        lengths,
        offsets,
        scaling,
        max_width=max_width,
        max_length=max_length,
        **options,
    )


def _write(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """
    Writes keys and values of packed tokens to their entries.

    Args:
        keys, values (`torch.Tensor` of shape `(total, key_value_heads, dim)`): Of the packed tokens.
        key_cache, value_cache (`torch.Tensor` of shape `(slots, key_value_heads, capacity, dim)`): Written in place.
        places (`torch.LongTensor` of shape `(2 or more, total)`): Row and entry of each token.
    """
    if not (keys.is_cuda and _HAS_TRITON):
        key_cache[places[0], :, places[1]] = keys
        value_cache[places[0], :, places[1]] = values
        return
    from .kernels.ragged_attention import write_entries

    write_entries(keys, values, key_cache, value_cache, places[0], places[1])


def _operator(
    name: str, function: Callable[..., Any], written: tuple[str, ...] = ()
) -> tuple[Callable[..., Any], Any]:
    """The function for calls, and as an operator for compilers: around a kernel, an operator takes longer than it."""
    operator = library.custom_op(f"transformers_dspark::{name}", function, mutates_args=written)

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        directly = served(first) and not torch.compiler.is_compiling()
        return (function if directly else operator)(first, *others)

    return call, operator


attend, _attend_operator = _operator("ragged_attention", _attend)
write, _ = _operator("write_entries", _write, ("key_cache", "value_cache"))


@_attend_operator.register_fake
def _attended(query, key_cache, value_cache, *args):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])


__all__ = ["attend", "served", "write"]
