"""A key/value cache in which every row has a length of its own.

Transformers' caches hold one scalar length for the whole batch. Here a row is a slot of fixed capacity, and where the
tokens of a forward call belong is said by a window that travels with the call, see `windows`. Nothing is copied or
cropped: entries at and beyond a row's length are dead and will be overwritten. The cache knows nothing about finished
rows, sampling or prompts.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from . import ragged_ops
from ._compat import mark_size
from .compressed import CompressedRows, compressing
from .mixers import RECURRENT_KINDS, missing_mixers, mixers
from .modeling_dspark import DSparkDrafter
from .ragged_context import RaggedContext, swap_rows
from .recurrent import RecurrentRows
from .windows import WINDOW_KEYWORD, VerifyWindow


_NO_WINDOW = (
    f"A ragged cache needs the forward keyword `{WINDOW_KEYWORD}`: either none was passed, as in plain generation, or "
    "this model does not hand its keywords on; then generate for one prompt at a time with dspark_loop='transformers'."
)


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
        Writes the new entries and returns what attention should read: the rows of a packed forward up to the longest,
        the whole slots of a step, only the new entries of a fill.

        Args:
            key_states (`torch.Tensor` of shape `(n, key_value_heads, tokens, head_dim)`): New keys; n is 1 in a packed
                forward.
            value_states (`torch.Tensor` of shape `(n, key_value_heads, tokens, head_dim)`): New values.

        Raises:
            NotImplementedError: The forward call carried no `ragged_window`.
            ValueError: More tokens than the capacity, or a step of more than one token.
        """
        window = (kwargs.get("kwargs") or {}).get(WINDOW_KEYWORD)
        if window is None:
            raise NotImplementedError(_NO_WINDOW)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None  # for the type checker
        assert self.values is not None
        if isinstance(window, VerifyWindow):
            return self._write_packed(key_states, value_states, window.to(key_states.device))
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

    def _write_packed(
        self, key_states: torch.Tensor, value_states: torch.Tensor, window: VerifyWindow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None  # for the type checker
        assert self.values is not None
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if ragged_ops.served(keys):
            ragged_ops.write(keys, values, self.keys, self.values, window.places)
            return self.keys, self.values  # attention knows which rows and entries are alive
        if window.length > self.capacity or window.num_rows > self.rows:
            raise ValueError(
                f"A window over {window.num_rows} rows of {window.length} entries does not fit a ragged cache of "
                f"{self.rows} rows and capacity {self.capacity}."
            )
        self.keys[window.rows, :, window.columns] = keys
        self.values[window.rows, :, window.columns] = values
        rows, length = window.num_rows, window.length
        return self.keys[:rows, :, :length], self.values[:rows, :, :length]

    def rearrange(self, order: torch.Tensor, capacity: int) -> None:
        """Puts row `order[i]` in place i, and changes the capacity of all."""
        self.rows, old = len(order), (self.keys, self.values)
        kept, self.capacity = min(capacity, self.capacity), capacity
        if not self.is_initialized or old[0] is None or old[1] is None:
            return
        order = order.to(old[0].device)
        self.lazy_initialization(old[0][:1], old[1][:1])
        for new, before in zip((self.keys, self.values), old, strict=True):
            new[:, :, :kept] = before[order, :, :kept]

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


class RaggedCache(Cache):
    """
    A target's cache with rows of different lengths, for packed forwards, and the drafter's context of the same rows.

    A later call of the batched loop that is given it goes on from these texts, as from any cache. Plain generation
    cannot use it.

    Args:
        target (`PreTrainedModel`), drafter (`DSparkDrafter`): The pair.
        rows (`int`): Number of rows.
        capacity (`int`): Entries of a row.

    Raises:
        NotImplementedError: The target has layers whose rows cannot be rolled back.
    """

    def __init__(self, target: PreTrainedModel, drafter: DSparkDrafter, rows: int, capacity: int) -> None:
        check_layers(target)
        count = target.config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[RaggedLayer(rows, capacity) for _ in range(count)])
        self.context = RaggedContext(drafter, rows, capacity)
        self.recurrent = rows_of_states(target, rows)
        self._target, self._drafter_config = weakref.ref(target), copy.deepcopy(drafter.config)
        self.ids: list[torch.Tensor] = []  # tokens of each row, while no call is at work on them

    def is_of(self, target: PreTrainedModel, drafter: DSparkDrafter) -> bool:
        """Whether it holds states of this target, and of a drafter configured like this one."""
        return self._target() is target and self._drafter_config == drafter.config

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Not kept here: in a packed forward, layers with a recurrent state are given caches of their own."""
        raise NotImplementedError(_NO_WINDOW)

    @property
    def lengths(self) -> list[int]:
        """Entries of each row."""
        return self.context.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and recurrent states, as far as they are allocated."""
        layers = ((layer.keys, layer.values) for layer in self.layers if layer.is_initialized)
        states = self.recurrent.nbytes if isinstance(self.recurrent, RecurrentRows) else 0
        return sum(keys.nbytes + values.nbytes for keys, values in layers) + self.context.nbytes + states

    def restart(self, rows: int) -> None:
        """Forgets all texts; the first rows, of those that were allocated, are those of new ones."""
        self.context.restart(rows)
        if isinstance(self.recurrent, RecurrentRows):
            self.recurrent.restart(rows)
        self.ids = []

    def copied(self, order: Sequence[int], capacity: int) -> RaggedCache:
        """Another cache, whose row i has what row `order[i]` has here."""
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        other.context = copy.copy(self.context)
        other.context.lengths = list(self.lengths)
        if isinstance(self.recurrent, RecurrentRows):
            other.recurrent = self.recurrent.copied()
        other.rearrange(order, capacity)
        return other

    def fill(self, cache: Cache, row: int) -> None:
        """Puts a row's keys and values into an empty cache of Transformers."""
        length = self.lengths[row]
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:  # others read the entries of an earlier layer
                cache.update(layer.keys[row, None, :, :length], layer.values[row, None, :, :length], index)
                filled = cache.layers[index]
                if filled.is_sliding:  # what it keeps is a view of the whole text
                    filled.keys, filled.values = filled.keys.clone(), filled.values.clone()

    def reading(self, window: VerifyWindow) -> AbstractContextManager[None]:
        """While it lasts, a forward of the target over this window keeps recurrent states as well, if it has any."""
        return nullcontext() if self.recurrent is None else self.recurrent.reading(window, self.lengths)

    def stepping(self, window: VerifyWindow) -> AbstractContextManager[None]:
        """As [`~RaggedCache.reading`] for a forward of fixed shape, behind which [`~RaggedCache.take`] is called."""
        return self.recurrent.stepping(window) if isinstance(self.recurrent, RecurrentRows) else nullcontext()

    def take(self, counts: torch.Tensor) -> None:
        """On the device, moves recurrent states on by the first `(rows,)` tokens of the latest step."""
        if isinstance(self.recurrent, RecurrentRows):
            mark_size(counts, 0)
            self.recurrent.take(counts)

    def advance(self, row: int, count: int) -> None:
        """On the host, counts `count` more entries of a row, which its recurrent states hold already."""
        self.lengths[row] += count
        if isinstance(self.recurrent, RecurrentRows):
            self.recurrent.settled[row] += count

    def cut(self, row: int, length: int) -> None:
        """Forgets a row's entries from `length` on; all of them where a recurrent state has gone further."""
        self.context.cut(row, length if self.recurrent is None else self.recurrent.cut(row, length))

    def swap_rows(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchanges rows `first[i]` and `second[i]`; no row is named twice."""
        longest = max((self.lengths[row] for row in (*first, *second)), default=0)
        made = (layer for layer in self.layers if layer.is_initialized)
        held = (buffer[:, :, :longest] for layer in made for buffer in (layer.keys, layer.values))
        swap_rows(held, first, second)
        self.context.swap_rows(first, second)
        if self.recurrent is not None:
            self.recurrent.swap_rows(first, second)

    def rearrange(self, order: Sequence[int], capacity: int) -> None:
        """Puts row `order[i]` in place i, and changes the capacity of all."""
        self.context.live = len(order)
        if list(order) == list(range(self.context.rows)) and capacity == self.context.capacity:
            return
        index = torch.tensor(order)
        for layer in self.layers:
            layer.rearrange(index, capacity)
        self.context.rearrange(index, capacity)
        if self.recurrent is not None:
            self.recurrent.rearrange(index)


def rows_of_states(target: PreTrainedModel, rows: int) -> RecurrentRows | CompressedRows | None:
    """What is kept beside a target's ragged layers, since it cannot be overwritten; `None` if there is nothing."""
    if compressing(target):
        return CompressedRows(target, rows)
    return RecurrentRows(target, rows) if mixers(target) else None


def check_layers(target: PreTrainedModel) -> None:
    """
    Raises:
        NotImplementedError: the target has layers whose rows cannot be rolled back, see [`RaggedCache`].
    """
    if compressing(target):
        return
    text_config = target.config.get_text_config(decoder=True)
    if reason := missing_mixers(target):
        raise NotImplementedError(
            f"This {text_config.model_type} target {reason}, so its rows cannot be rolled back after a rejected "
            "draft: generate without the drafter."
        )
    kinds = set(getattr(text_config, "layer_types", None) or [])
    if unsupported := kinds - {"full_attention", "sliding_attention", "moe", "mlp", *RECURRENT_KINDS}:
        raise NotImplementedError(
            f"This {text_config.model_type} target has layers of the kinds {sorted(unsupported)}, which the batched "
            "loop cannot roll back: generate for one prompt at a time, or without the drafter."
        )
