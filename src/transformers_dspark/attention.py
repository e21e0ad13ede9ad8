"""The attention function that reads a ragged cache, registered with Transformers under `ATTENTION_NAME`.

Everything it needs about rows arrives in the forward keyword `ragged_window`; without that keyword it raises, so that
a model switched to this implementation can never run with a silently missing mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ._compat import attention_implementation
from .cache import WINDOW_KEYWORD, RaggedWindow


ATTENTION_NAME = "dspark_ragged"


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention over a ragged cache.

    Args:
        module (`torch.nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(n, heads, tokens, head_dim)`): Queries; one token a row in a step.
        key (`torch.Tensor` of shape `(n, key_value_heads, entries, head_dim)`): What the cache returned.
        value (`torch.Tensor` of shape `(n, key_value_heads, entries, head_dim)`): What the cache returned.
        attention_mask (`None`): Rows carry their lengths in the window, so no mask may be given.
        scaling (`float`, *optional*, defaults to `head_dim ** -0.5`): Factor on the logits.

    Returns:
        `tuple[torch.Tensor, None]`: The output, `(n, tokens, heads, head_dim)`, and no weights.

    Raises:
        RuntimeError: No `ragged_window` was passed.
        NotImplementedError: Sliding windows, attention sinks or soft caps.

    Source: grouped queries share one read of their key/value head, as in Transformers' `pack_gqa`.
    """
    window: RaggedWindow | None = kwargs.get(WINDOW_KEYWORD)
    if window is None:
        raise RuntimeError(
            f"Attention `{ATTENTION_NAME}` needs the forward keyword `{WINDOW_KEYWORD}`; none was passed."
        )
    for option in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(option) is not None:
            raise NotImplementedError(
                f"Attention `{ATTENTION_NAME}` does not support `{option}`; this layer asks for it."
            )

    if window.rows is not None:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None

    rows, heads, _, head_dim = query.shape
    # One token a row: the queries of a group become the query axis, and no key is repeated.
    grouped_query = query.reshape(
        rows, key.shape[1], heads // key.shape[1], head_dim
    )  # [rows, kv_heads, group, head_dim]
    out = F.scaled_dot_product_attention(grouped_query, key, value, attn_mask=window.mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def ragged_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """
    Mask function for `ATTENTION_NAME`: there is none to make, since the window carries it.

    Raises:
        ValueError: A padding mask was given; ragged rows have no padding.
    """
    if attention_mask is not None:
        raise ValueError(
            f"Attention `{ATTENTION_NAME}` takes no `attention_mask`: row lengths are in `{WINDOW_KEYWORD}`."
        )


@contextmanager
def use_ragged_attention(target: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """
    Switches a model to `ATTENTION_NAME` and back.

    Raises:
        NotImplementedError: The model does not dispatch its attention through `AttentionInterface`.
    """
    before = attention_implementation(target.config)
    AttentionInterface.register(ATTENTION_NAME, ragged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, ragged_mask)
    target.set_attn_implementation(ATTENTION_NAME)
    if attention_implementation(target.config) != ATTENTION_NAME:
        raise NotImplementedError(f"{type(target).__name__} does not let its attention implementation be replaced.")
    try:
        yield target
    finally:
        target.set_attn_implementation(before)
