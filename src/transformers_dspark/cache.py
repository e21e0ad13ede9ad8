"""A key/value cache in which every row has a length of its own.

Transformers' caches hold one scalar length for the whole batch. Here a row is a slot of fixed capacity and its length
lives outside the cache, in a [`RaggedWindow`] that travels with the forward call as the keyword `ragged_window`.
Nothing is copied or cropped: entries at and beyond a row's length are dead and will be overwritten. The cache knows
nothing about finished rows, sampling or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin


WINDOW_KEYWORD = "ragged_window"


@dataclass(frozen=True)
class RaggedWindow:
    """
    Where the tokens of one forward call belong.

    Two forms exist. A *step* (`lengths` given) feeds one token to every row of the cache; it attends to the row's own
    past. A *fill* (`rows` given) feeds right-padded beginnings of sequences to some rows, which start empty; padding
    needs no mask, because a causal token never sees what comes after it.

    Args:
        lengths (`torch.LongTensor` of shape `(rows,)`, *optional*):
            Entries each row holds before this step; the new token is written at that index. Below the capacity.
        mask (`torch.Tensor` of shape `(rows, 1, 1, capacity)`, *optional*):
            Additive mask of a step, 0 up to and including the new token and -inf beyond, in the model's dtype. Made
            once a step and shared by all layers.
        rows (`torch.LongTensor` of shape `(n,)`, *optional*):
            Cache rows that a fill writes to.
    """

    lengths: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.rows is None):
            raise ValueError(
                "A RaggedWindow takes either `lengths` (a step) or `rows` (a fill), not both and not neither."
            )

    @classmethod
    def step(cls, lengths: torch.Tensor, capacity: int, dtype: torch.dtype) -> RaggedWindow:
        """A step for rows of these `lengths`, with its mask; runs without a device sync."""
        visible = torch.arange(capacity, device=lengths.device)[None, :] <= lengths[:, None]  # [rows, capacity]
        mask = torch.zeros(visible.shape, dtype=dtype, device=lengths.device).masked_fill_(~visible, float("-inf"))
        return cls(lengths=lengths, mask=mask[:, None, None, :])


class RaggedLayer(CacheLayerMixin):
    """
    Keys and values of one layer, `(rows, key_value_heads, capacity, head_dim)`, allocated at the first update.

    Args:
        rows (`int`): Number of slots.
        capacity (`int`): Entries a slot can hold.
    """

    is_compileable = True
    is_croppable = False
    is_sliding = False

    def __init__(self, rows: int, capacity: int):
        super().__init__()
        self.rows = rows
        self.capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.rows, key_states.shape[1], self.capacity)
        # Zeros, not empty: a masked entry still enters a product, and 0 * NaN would spread.
        self.keys = torch.zeros(*shape, key_states.shape[-1], dtype=key_states.dtype, device=key_states.device)
        self.values = torch.zeros(*shape, value_states.shape[-1], dtype=value_states.dtype, device=value_states.device)
        self.row_index = torch.arange(self.rows, device=key_states.device)  # [rows]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes the new entries and returns what attention should read: the whole slots of a step, only the new entries
        of a fill.

        Args:
            key_states (`torch.Tensor` of shape `(n, key_value_heads, tokens, head_dim)`): New keys.
            value_states (`torch.Tensor` of shape `(n, key_value_heads, tokens, head_dim)`): New values.

        Raises:
            RuntimeError: The forward call carried no `ragged_window`.
            ValueError: More tokens than the capacity, or a step of more than one token.
        """
        window = (kwargs.get("kwargs") or {}).get(WINDOW_KEYWORD)
        if window is None:
            raise RuntimeError(
                f"A ragged cache needs the forward keyword `{WINDOW_KEYWORD}`; none was passed, or this model does"
                " not hand its keywords on to the cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None  # for the type checker
        assert self.values is not None
        tokens = key_states.shape[2]
        if window.rows is not None:
            if tokens > self.capacity:
                raise ValueError(f"{tokens} tokens do not fit a ragged cache of capacity {self.capacity}.")
            self.keys[window.rows, :, :tokens] = key_states
            self.values[window.rows, :, :tokens] = value_states
            return key_states, value_states
        if tokens != 1 or key_states.shape[0] != self.rows:
            raise ValueError(f"A step feeds one token to each of {self.rows} rows; got {tuple(key_states.shape)}.")
        self.keys[self.row_index, :, window.lengths] = key_states[:, :, 0]
        self.values[self.row_index, :, window.lengths] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return 0  # no scalar describes ragged rows; positions are always passed explicitly

    def get_max_length(self) -> int:
        return self.capacity


def ragged_cache(config: PreTrainedConfig, rows: int, capacity: int) -> Cache:
    """
    Builds a cache of `rows` slots for a target.

    Args:
        config ([`PreTrainedConfig`]): Configuration of the target.
        rows (`int`): Number of slots.
        capacity (`int`): Entries a slot can hold.

    Raises:
        NotImplementedError: The target has layers other than full attention; their rows cannot be overwritten this
        way.
    """
    text_config = config.get_text_config(decoder=True)
    unsupported = {kind for kind in getattr(text_config, "layer_types", None) or [] if kind != "full_attention"}
    if unsupported:
        raise NotImplementedError(
            f"A ragged cache holds full-attention layers only; this {text_config.model_type} target also has"
            f" {sorted(unsupported)}."
        )
    return Cache(layers=[RaggedLayer(rows, capacity) for _ in range(text_config.num_hidden_layers)])
