"""The attention function that reads a ragged cache, registered with Transformers under `ATTENTION_NAME`.

Everything it needs about rows arrives in the forward keyword `ragged_window`; without that keyword it raises, so that
a model switched to this implementation can never run with a silently missing mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from . import ragged_ops
from ._compat import attention_implementations, own_attention
from .lending import Lender
from .windows import WINDOW_KEYWORD, MaskedRow, RaggedWindow, VerifyWindow


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
        query (`torch.Tensor` of shape `(n, heads, tokens, head_dim)`): Queries; one token a row in a step, n = 1 in a
            packed forward.
        key (`torch.Tensor` of shape `(n, key_value_heads, entries, head_dim)`): What the cache returned.
        value (`torch.Tensor` of shape `(n, key_value_heads, entries, head_dim)`): What the cache returned.
        attention_mask (`torch.Tensor` of shape `(sliding window, 0)`, *optional*): What [`ragged_mask`] made, for a
            layer that has such a window. Rows carry their lengths in `ragged_window`, so no other mask may be given.
        scaling (`float`, *optional*, defaults to `head_dim ** -0.5`): Factor on the logits.

    Returns:
        `tuple[torch.Tensor, None]`: The output, `(n, tokens, heads, head_dim)`, and no weights.

    Raises:
        RuntimeError: No `ragged_window` was passed.
        NotImplementedError: A mask of the model's own, or a bias on positions; sliding windows, sinks or soft caps
            outside packed forwards.

    Source: grouped queries share one read of their key/value head, as in Transformers' `pack_gqa`.
    """
    window: RaggedWindow | VerifyWindow | MaskedRow | None = kwargs.get(WINDOW_KEYWORD)
    if window is None:
        raise RuntimeError(
            f"Attention `{ATTENTION_NAME}` needs the forward keyword `{WINDOW_KEYWORD}`; none was passed."
        )
    if isinstance(window, MaskedRow):
        return own_attention(module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if attention_mask is not None and attention_mask.numel():
        raise NotImplementedError(
            f"{type(module).__name__} brings a mask of its own, which attention over a ragged cache cannot heed."
        )
    options: dict[str, Any] = {name: kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux")}
    if attention_mask is not None:  # some layers know of their window by the mask alone
        options["sliding_window"] = attention_mask.shape[0]
    packed = isinstance(window, VerifyWindow)
    for option, asked in {"position_bias": kwargs.get("position_bias"), **({} if packed else options)}.items():
        if asked is not None:
            raise NotImplementedError(
                f"Attention `{ATTENTION_NAME}` does not support `{option}`; this layer asks for it."
            )

    if isinstance(window, VerifyWindow):
        window = window.to(query.device)
        if window.alone:
            return lone_attention(query, key, value, window, scaling, **options), None
        if not ragged_ops.served(query):
            return packed_attention(query, key, value, window, scaling, **options), None
        mixed = ragged_ops.attend(
            query[0].transpose(0, 1),
            key,
            value,
            window.spans,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            True,
            options["sliding_window"],
            options["softcap"],
            options["s_aux"],
            window.width,
            window.before,
        )
        return mixed[None], None
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


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: VerifyWindow,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Reference attention of packed windows: the queries are spread over a rectangle of rows, which reads each row's
    entries once.

    Args:
        query (`torch.Tensor` of shape `(1, heads, total, head_dim)`): Queries of the packed tokens.
        key, value (`torch.Tensor` of shape `(rows, key_value_heads, entries, head_dim)`): Of all rows.
        window (`VerifyWindow`): Where the tokens belong.
        scaling (`float`, *optional*): Factor on the logits. Defaults to `head_dim ** -0.5`.
        sliding_window (`int`, *optional*): Entries that a token sees, itself included.
        softcap (`float`, *optional*): Bound that a tanh puts on the logits.
        s_aux (`torch.Tensor` of shape `(heads,)`, *optional*): Logits of sinks, which take weight and give nothing.

    Returns:
        `torch.Tensor` of shape `(1, total, heads, head_dim)`.
    """
    queries = window.padded(query[0].transpose(0, 1)).transpose(1, 2)  # [rows, heads, width, head_dim]
    rows, heads, width, head_dim = queries.shape
    groups = heads // key.shape[1]
    mask = window.visible(sliding_window)[:, None]  # [rows, 1, width, entries]
    scaling = head_dim**-0.5 if scaling is None else scaling
    if groups > 1 and (width <= 32 or softcap is not None or s_aux is not None):
        # the heads of a group become more queries: the mask is copied, and not the keys
        queries = queries.reshape(rows, key.shape[1], groups * width, head_dim)
        mask = mask.repeat(1, 1, groups, 1)
        groups = 1
    sinks = None
    if s_aux is not None:
        sinks = s_aux.float().view(1, heads, 1, 1).expand(rows, heads, width, 1).reshape(*queries.shape[:3], 1)
    mixed = _mix(queries, key, value, mask, scaling, softcap, sinks)
    mixed = mixed.reshape(rows, heads, width, value.shape[-1])
    return window.packed(mixed.transpose(1, 2))[None]


def lone_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: VerifyWindow,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    As [`packed_attention`], one token after another and over the entries that each sees: the shapes, and so the order
    of the sums, are the same whatever else is in the step. A token that is there twice is computed once.
    """
    (_, heads, _, head_dim), kv_heads = query.shape, key.shape[1]
    scaling = head_dim**-0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float().view(1, kv_heads, -1, 1)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for k, (row, column) in enumerate(window.entries):
        if (row, column) not in found:
            first = 0 if sliding_window is None else max(0, column + 1 - sliding_window)
            seen = slice(row, row + 1), slice(None), slice(first, column + 1)
            lone = query[:, :, k].reshape(1, kv_heads, -1, head_dim)  # the heads of a group are queries of one key
            mixed = _mix(lone, key[seen], value[seen], None, scaling, softcap, sinks)
            found[row, column] = mixed.reshape(1, 1, heads, -1)
    return torch.cat([found[entry] for entry in window.entries], dim=1)


def _mix(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `(rows, heads, n, head_dim)` queries; with a cap or sinks, there must be as many heads of keys."""
    if softcap is None and sinks is None:
        grouped = queries.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    logits = (queries @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks), dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def ragged_mask(
    *args: Any, attention_mask: torch.Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """
    Mask function for `ATTENTION_NAME`: the window carries the mask, so all that is left to hand on is the sliding
    window of a kind of layers, as the length of a tensor, which can be read while a model is compiled.

    Returns:
        `torch.Tensor` of shape `(sliding window, 0)`, or `None` for full attention.

    Raises:
        ValueError: A padding mask was given; ragged rows have no padding.
    """
    if attention_mask is not None:
        raise ValueError(
            f"Attention `{ATTENTION_NAME}` takes no `attention_mask`: row lengths are in `{WINDOW_KEYWORD}`."
        )
    return None if local_size is None else torch.empty(local_size, 0)


@contextmanager
def use_ragged_attention(target: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """
    Switches a model to `ATTENTION_NAME` and back. Nothing else can run the model in the meantime.

    Raises:
        NotImplementedError: The model does not dispatch its attention through `AttentionInterface`.
    """
    with _attention_lender([target]):
        yield target


def _with_ragged_attention(target: PreTrainedModel) -> Callable[[], object]:
    before = attention_implementations(target.config)
    AttentionInterface.register(ATTENTION_NAME, ragged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, ragged_mask)
    target.set_attn_implementation(ATTENTION_NAME)
    if attention_implementations(target.config)[""] != ATTENTION_NAME:
        target.set_attn_implementation(before)  # parts of it may have changed
        raise NotImplementedError(
            f"{type(target).__name__} does not let its attention implementation be replaced, which a ragged cache "
            "needs: generate for one prompt at a time with dspark_loop='transformers', or without the drafter."
        )
    return partial(target.set_attn_implementation, before)


_attention_lender = Lender(_with_ragged_attention)
