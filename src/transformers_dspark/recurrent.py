"""Recurrent and convolutional states of rows that advance at different speeds, without knowing how they are computed.

A state cannot be cut back to an earlier token, so none is kept that a rejected draft may have touched. Each row has a
*settled* state, and behind it the inputs of the layers that keep the state (the *mixers*) for the few committed tokens
that are not in it yet. In a verify step a mixer reads these inputs once more, and the window behind them, from a copy
of the settled state; all rows in one rectangle, padded on the right, where padding follows every token that counts.
The copy is thrown away. When `SETTLE` tokens of a row have been committed, one more reading of exactly these moves its
state on. Only mixers read anything twice: attention, experts and the head see the packed window and nothing else.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ._compat import keeps_recurrent_state
from .lending import Lender, lend_forward
from .windows import WINDOW_KEYWORD, VerifyWindow


SETTLE = 16  # committed tokens of a row that move its state on at once
RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# arguments of a mixer that speak of the packed forward, and not of what it reads
_PACKED = {"attention_mask", "position_ids", WINDOW_KEYWORD}
_UPDATES = {"update_conv_state", "update_recurrent_state"}


def mixers(target: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules of a target that keep a state in its cache, by the number of their layer."""
    found = {}
    for module in target.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None and _uses(type(module)) & _UPDATES:
            found[int(layer)] = module
    return found


def _uses(kind: type) -> set[str]:
    """Names that the methods of a class use."""
    functions = [inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value)]
    return {name for function in functions for name in function.__code__.co_names}


def missing_mixers(target: PreTrainedModel) -> str | None:
    """Why the states of a target cannot be kept row by row, or `None` if they can, or if it has none."""
    config = target.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    found = mixers(target)
    if config.model_type == "zamba2":
        return "gave other tokens than plain generation in trials, for a reason that is not known yet"
    if keeps_recurrent_state(target) and not found:
        return "keeps a state outside the cache that a forward call is given"
    if absent := [layer for layer, kind in enumerate(kinds) if kind in RECURRENT_KINDS and layer not in found]:
        return f"keeps the state of layer {absent[0]} in no module that could be found"
    size = config.hidden_size
    for index, mixer in {type(module): (index, module) for index, module in found.items()}.values():
        if reason := _cannot_continue(mixer, index, size, target.dtype):
            return f"has a {type(mixer).__name__}, which {reason}"
    return None


# what a probe of each mixer has found
_probed: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@torch.no_grad()
def _cannot_continue(mixer: nn.Module, index: int, size: int, dtype: torch.dtype) -> str:
    """
    Why a mixer cannot read several tokens behind a state, by trying; empty if it can. Some begin a new text whenever
    they are given more than one token.
    """
    if mixer not in _probed:
        device, noise = next(mixer.parameters()).device, torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 6, size, generator=noise).to(device, dtype)  # weights may be quantised
        layer, fresh = LinearAttentionLayer(1), LinearAttentionLayer(1)
        try:
            whole = mixer(hidden)[:, 3:].float()
            _call(mixer.forward, index, hidden[:, :3], layer)
            behind = _call(mixer.forward, index, hidden[:, 3:], layer).float()
            alone = _call(mixer.forward, index, hidden[:, 3:], fresh).float()
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            _probed[mixer] = f"reads more than the states before it ({type(error).__name__}: {error})"
        else:
            goes_on = torch.dist(behind, whole) <= 0.1 * torch.dist(alone, whole)
            _probed[mixer] = "" if goes_on else "cannot read several tokens behind a state"
    return _probed[mixer]


def _call(
    forward: Callable[..., Any], index: int, hidden: torch.Tensor, layer: LinearAttentionLayer, **named: Any
) -> torch.Tensor:
    """A mixer's forward over `(n, width, hidden)` states, with a cache that holds nothing but its own layer."""
    return forward(hidden, cache=Cache(layers=[layer] * (index + 1)), attention_mask=None, **named)


@dataclass(frozen=True)
class _Reading:
    """
    One call of a mixer.

    Args:
        rows (`torch.LongTensor` of shape `(n,)`): Rows that are read.
        tokens (`torch.LongTensor` of shape `(m,)`): Their tokens among the packed ones.
        places (`torch.LongTensor` of shape `(2, m)`): Of each token its line of the rectangle, and its column there.
        pending (`int`): Most inputs that one of the rows has to read once more.
        width (`int`): Columns of the rectangle.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    pending: int
    width: int

    def to(self, device: torch.device) -> _Reading:
        moved = self.rows.to(device), self.tokens.to(device), self.places.to(device)
        return _Reading(*moved, self.pending, self.width)


@dataclass(frozen=True)
class _Plan:
    """What every mixer does in a forward: move some states on, then read the window. Certain windows move them too."""

    settling: list[torch.Tensor]
    readings: list[_Reading]
    certain: bool


class MixerRows:
    """
    The settled states of one mixer, and the inputs behind them.

    Args:
        rows (`int`): Number of rows.
        number_of_states (`int`): States of the layer, as its cache counts them.
    """

    def __init__(self, rows: int, number_of_states: int) -> None:
        self._rows, self._number = rows, number_of_states
        self._states: dict[tuple[str, int], torch.Tensor] = {}  # `(rows, ...)` each, made by the first call
        self._inputs: torch.Tensor | None = None  # [rows, columns, hidden]

    def copy(self, rows: torch.Tensor) -> LinearAttentionLayer:
        """A layer of a cache that holds copies of the states of some rows."""
        layer = LinearAttentionLayer(self._number)
        for (name, index), state in self._states.items():
            # one gather a state: the room for it can be laid out beforehand where addresses must not change
            getattr(layer, name)[index] = copied = state.index_select(0, rows.to(state.device))
            getattr(layer, f"is_{name}_initialized")[index] = True
            layer.has_previous_state[index] = True
            if name == "conv_states":
                layer.conv_kernel_size[index] = copied.shape[-1]
                layer.dtype, layer.device = copied.dtype, copied.device
        return layer

    def keep(self, rows: torch.Tensor, layer: LinearAttentionLayer) -> None:
        """Takes over the states that a mixer left in a layer of a cache."""
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(layer, name).items():
                if state is None:
                    continue
                if (name, index) not in self._states:
                    self._states[name, index] = state.new_zeros(self._rows, *state.shape[1:])
                self._states[name, index].index_copy_(0, rows.to(state.device), state)

    def mix(
        self, plan: _Plan, run: Callable[[torch.Tensor, LinearAttentionLayer], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        """
        Outputs of a packed forward.

        Args:
            run (`Callable`): The mixer, on a rectangle `(n, width, hidden)` and a layer of a cache.
            hidden (`torch.FloatTensor` of shape `(1, total, hidden)`): Inputs of the packed tokens.
        """
        for rows in plan.settling:
            rows = rows.to(hidden.device)
            assert self._inputs is not None  # for the type checker: there are tokens to settle
            layer = self.copy(rows)
            run(self._inputs[rows, :SETTLE], layer)
            self.keep(rows, layer)
            self._inputs[rows] = self._inputs[rows].roll(-SETTLE, dims=1)
        outputs = hidden.new_empty(hidden.shape)
        for reading in plan.readings:
            reading = reading.to(hidden.device)
            new, (lines, columns) = hidden[0, reading.tokens], reading.places
            rectangle = hidden.new_zeros(len(reading.rows), reading.width, hidden.shape[-1])
            if reading.pending and self._inputs is not None:
                rectangle[:, : reading.pending] = self._inputs[reading.rows, : reading.pending]
            rectangle[lines, columns] = new
            layer = self.copy(reading.rows)
            mixed = run(rectangle, layer)[lines, columns]
            outputs[0, reading.tokens] = mixed
            if plan.certain:
                self.keep(reading.rows, layer)
            else:
                self._room(reading.width, hidden)[reading.rows[lines], columns] = new
        return outputs

    def _room(self, columns: int, like: torch.Tensor) -> torch.Tensor:
        old = self._inputs
        if old is None or old.shape[1] < columns:
            self._inputs = like.new_zeros(self._rows, max(columns, 2 * SETTLE), like.shape[-1])
            if old is not None:
                self._inputs[:, : old.shape[1]] = old
        assert self._inputs is not None  # for the type checker
        return self._inputs

    def pending(self, row: int, count: int) -> torch.Tensor | None:
        """`(1, count, hidden)` inputs of a row that are not in its state yet."""
        return None if self._inputs is None else self._inputs[row : row + 1, :count]

    def clear(self, row: int) -> None:
        """A row's state as before its first token."""
        for state in self._states.values():
            state[row] = 0

    def rearrange(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` in place i."""
        self._rows = len(order)
        self._states = {key: state[order.to(state.device)] for key, state in self._states.items()}
        self._inputs = None if self._inputs is None else self._inputs[order.to(self._inputs.device)]


class RecurrentRows:
    """
    The states of a target's mixers for rows of different lengths.

    Args:
        target (`PreTrainedModel`): The target.
        rows (`int`): Number of rows.

    Attributes:
        settled (`list[int]`): Tokens of each row that are in its state.
        reread (`int`): Inputs that each mixer read once more in the latest forward.
    """

    def __init__(self, target: PreTrainedModel, rows: int) -> None:
        self._modules = mixers(target)
        layers = DynamicCache(config=target.config).layers
        self._layers = {
            index: MixerRows(rows, layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 1)
            for index, layer in ((index, layers[index]) for index in self._modules)
        }
        self.settled, self.reread = [0] * rows, 0
        self._plan: _Plan | None = None

    @contextmanager
    def reading(self, window: VerifyWindow, lengths: Sequence[int]) -> Iterator[None]:
        """
        While it lasts, a forward of the target over this window reads and moves the states of its rows.

        Args:
            window (`VerifyWindow`): The window of the forward.
            lengths (`Sequence[int]`): Committed tokens of each row.
        """
        self._plan = self._planned(window, lengths)
        try:
            with _mixing(self._modules.values()):
                yield
        finally:
            self._plan = None
        if window.certain:
            for row, count in enumerate(window.counts()):
                if count:
                    self.settled[row] = lengths[row] + count

    def _planned(self, window: VerifyWindow, lengths: Sequence[int]) -> _Plan:
        device = window.places.device
        pending = [length - done for length, done in zip(lengths, self.settled, strict=True)][: window.num_rows]
        self.reread, settling = 0, []
        counts = window.counts() if window.certain else []
        while not window.certain and max(pending) >= SETTLE:
            rows = [row for row, count in enumerate(pending) if count >= SETTLE]
            settling.append(torch.tensor(rows, device=device))
            for row in rows:
                pending[row] -= SETTLE
                self.settled[row] += SETTLE
            self.reread += SETTLE * len(rows)
        before = torch.tensor(pending, device=device)[window.rows]
        groups: dict[int, list[int]] = defaultdict(list)
        if window.certain:  # a state is only right behind the last column, so the rows of a rectangle are equally long
            for row, count in enumerate(counts):
                if count:
                    groups[pending[row] + count].append(row)
        else:
            groups[max(pending) + window.width] = list(range(window.num_rows))
        readings = []
        for width, rows in groups.items():
            self.reread += sum(pending[row] for row in rows)
            line = torch.full((window.num_rows,), -1, device=device)
            line[rows] = torch.arange(len(rows), device=device)
            lines = line[window.rows]
            all_of_them = len(rows) == window.num_rows
            tokens = torch.arange(len(lines), device=device) if all_of_them else (lines >= 0).nonzero().flatten()
            places = torch.stack((lines[tokens], (before + window.offsets)[tokens]))
            most = max(pending[row] for row in rows)
            readings.append(_Reading(torch.tensor(rows, device=device), tokens, places, most, width))
        return _Plan(settling, readings, window.certain)

    def mix(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A mixer's own `forward` over the packed tokens of the current window."""
        assert self._plan is not None  # for the type checker
        index = int(module.layer_idx)  # type: ignore[arg-type]
        named = {name: value for name, value in kwargs.items() if name not in _PACKED}
        hidden = named.pop("hidden_states") if "hidden_states" in named else args[0]
        named = {name: value for name, value in named.items() if not isinstance(value, Cache)}
        others = [*args[1:], *named.values()]
        if any(isinstance(value, (torch.Tensor, tuple)) for value in others):
            raise NotImplementedError(
                f"{type(module).__name__} reads more than the layer before it, which the batched loop cannot feed "
                "again: generate without the drafter."
            )
        return self._layers[index].mix(self._plan, partial(_call, forward, index, **named), hidden)

    @torch.no_grad()
    def states(self, row: int, length: int) -> dict[int, LinearAttentionLayer]:
        """The states of a row of `length` committed tokens, by layer, as a cache of plain decoding holds them."""
        found = {}
        for index, module in self._modules.items():
            rows = self._layers[index]
            found[index] = layer = rows.copy(torch.tensor([row]))
            inputs = rows.pending(row, length - self.settled[row])
            if inputs is not None and inputs.shape[1]:
                _call(module.forward, index, inputs, layer)
        return found

    def cut(self, row: int, length: int) -> int:
        """Forgets what lies behind a row's first `length` tokens. Returns how many of these are still known."""
        if length >= self.settled[row]:
            return length
        for layer in self._layers.values():
            layer.clear(row)
        self.settled[row] = 0
        return 0

    def rearrange(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` in place i."""
        self.settled[:] = [self.settled[row] for row in order.tolist()]
        for layer in self._layers.values():
            layer.rearrange(order)


def _mixed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forwards with any other cache, as those of a logits processor, pass through."""
    for value in (*args, *kwargs.values()):
        rows = getattr(value, "recurrent", None)
        if isinstance(rows, RecurrentRows) and rows._plan is not None:
            return rows.mix(module, forward, args, kwargs)
    return forward(*args, **kwargs)


_mixing: Lender[nn.Module] = Lender(lambda module: lend_forward(module, partial(_mixed, module, module.forward)))


__all__ = ["RECURRENT_KINDS", "SETTLE", "MixerRows", "RecurrentRows", "missing_mixers", "mixers"]
