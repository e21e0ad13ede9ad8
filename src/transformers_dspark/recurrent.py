"""Recurrent and convolutional states of rows that advance at different speeds, without knowing how they are computed.

A state cannot be cut back to an earlier token, so none is kept that a rejected draft may have touched. Each row has a
*settled* state, and behind it the inputs of the layers that keep the state (the *mixers*) for the few committed tokens
that are not in it yet. In a verify step a mixer reads these inputs once more, and the window behind them, from a copy
of the settled state; all rows in one rectangle, padded on the right, where padding follows every token that counts.
The copy is thrown away. When `SETTLE` tokens of a row have been committed, one more reading of exactly these moves its
state on. Only mixers read anything twice: attention, experts and the head see the packed window and nothing else.

Mixers that have to be given one token at a time show their state behind each. Then all states of a window are kept
until it is known how far each row has come, and nothing is read twice.

In rounds of fixed shape nothing waits in front of a window: mixers that can read windows as `window_layers` says show
the states behind each token, and the right ones are taken when the round knows how many stay.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ._compat import mark_size
from .lending import Lender, lend_forward, lent_forwards
from .mixers import (
    STATES,
    Mixed,
    call_mixer,
    map_mixed,
    mixer_arguments,
    mixers,
    one_by_one,
    packed_arguments,
    read_one_by_one,
)
from .ragged_context import swap_items, swap_rows
from .window_layers import WindowLayer, windowed
from .windows import VerifyWindow


SETTLE = 16  # committed tokens of a row that move its state on at once


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
        one_by_one (`bool`): Columns are read one after the other.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    pending: int
    width: int
    one_by_one: bool

    def to(self, device: torch.device) -> _Reading:
        if self.rows.device == device:
            return self
        moved = self.rows.to(device), self.tokens.to(device), self.places.to(device)
        return _Reading(*moved, self.pending, self.width, self.one_by_one)


@dataclass(frozen=True)
class _Plan:
    """
    What every mixer does in a forward.

    Args:
        passed (`torch.LongTensor` of shape `(rows,)`, *optional*): Tokens by which each row's state moves on to one
            that was kept.
        settling (`list[torch.LongTensor]`): Rows whose states move on by `SETTLE` tokens that are read once more.
        readings (`list[_Reading]`): Of the window.
        certain (`bool`): These move the states on, too.
    """

    passed: torch.Tensor | None
    settling: list[torch.Tensor]
    readings: list[_Reading]
    certain: bool


class MixerRows:
    """
    The states of one mixer, and the inputs behind them.

    Args:
        mixer (`nn.Module`): The mixer.
        rows (`int`): Number of rows.
        number_of_states (`int`): States of the layer, as its cache counts them.
    """

    def __init__(self, mixer: nn.Module, rows: int, number_of_states: int) -> None:
        self._mixer, self._rows, self._number = mixer, rows, number_of_states
        # `(1 + n, rows, ...)` each: settled states, and those behind each token of a window that was read one by one;
        # made by the first call
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        self._inputs: torch.Tensor | None = None  # [rows, columns, hidden]
        self.packed = packed_arguments(mixer)
        self._windowed = windowed(mixer)
        self._window: WindowLayer | None = None  # of a round of fixed shape

    @property
    def nbytes(self) -> int:
        """Bytes of states and inputs, as far as they are allocated."""
        inputs = 0 if self._inputs is None else self._inputs.nbytes
        return inputs + sum(state.nbytes for state in self._states.values())

    def copy(self, rows: torch.Tensor, passed: int = 0) -> LinearAttentionLayer:
        """A layer of a cache with copies of the states of `(n,)` rows, `passed` tokens behind the settled ones."""
        layer = LinearAttentionLayer(self._number)
        for (name, index), state in self._states.items():
            # one gather a state: the room for it can be laid out beforehand where addresses must not change
            getattr(layer, name)[index] = copied = state[passed].index_select(0, rows.to(state.device))
            getattr(layer, f"is_{name}_initialized")[index] = True
            layer.has_previous_state[index] = True
            if name == "conv_states":
                layer.conv_kernel_size[index] = copied.shape[-1]
                layer.dtype, layer.device = copied.dtype, copied.device
        return layer

    def keep(self, rows: torch.Tensor, layer: LinearAttentionLayer, passed: int = 0) -> None:
        """Takes over the states of `(n,)` rows that a mixer left in a layer of a cache."""
        for name in STATES:
            for index, state in getattr(layer, name).items():
                if state is None:
                    continue
                if (name, index) not in self._states:
                    self._states[name, index] = state.new_zeros(1, self._rows, *state.shape[1:])
                self._states[name, index][passed].index_copy_(0, rows.to(state.device), state)

    def _depth(self, depth: int) -> None:
        """Makes room for states behind the settled ones."""
        for key, states in self._states.items():
            if len(states) < depth:
                more = states.new_zeros(depth - len(states), *states.shape[1:])
                self._states[key] = torch.cat((states, more))

    def mix(self, plan: _Plan, forward: Callable[..., Any], hidden: torch.Tensor, named: dict[str, Any]) -> Mixed:
        """
        Outputs of a packed forward.

        Args:
            plan (`_Plan`): What is read and settled.
            forward (`Callable`): The mixer's own.
            hidden (`torch.FloatTensor` of shape `(1, total, hidden)`): Inputs of the packed tokens.
            named (`dict`): Options of the call.
        """
        if plan.passed is not None:
            self._pass(plan.passed)
        for rows in plan.settling:
            rows = rows.to(hidden.device)
            assert self._inputs is not None  # for the type checker: there are tokens to settle
            layer = self.copy(rows)
            call_mixer(self._mixer, forward, self._inputs[rows, :SETTLE], layer, **named)
            self.keep(rows, layer)
            self._inputs[rows] = self._inputs[rows].roll(-SETTLE, dims=1)
        parts = []
        for reading in plan.readings:
            reading = reading.to(hidden.device)
            new, (lines, columns) = hidden[0, reading.tokens], reading.places
            rectangle = hidden.new_zeros(len(reading.rows), reading.width, hidden.shape[-1])
            if reading.pending and self._inputs is not None:
                rectangle[:, : reading.pending] = self._inputs[reading.rows, : reading.pending]
            rectangle[lines, columns] = new
            layer = self.copy(reading.rows)
            if reading.one_by_one:
                after = None
                if not plan.certain:
                    self._depth(1 + reading.width)
                    after = partial(self._keep_behind, reading.rows, layer)
                mixed = one_by_one(self._mixer, forward, rectangle, layer, after, **named)
            else:
                mixed = call_mixer(self._mixer, forward, rectangle, layer, **named)
            parts.append(map_mixed(lambda states, at=(lines, columns): states[at], mixed))
            if plan.certain:
                self.keep(reading.rows, layer)
            elif not reading.one_by_one:
                self._room(reading.width, hidden)[reading.rows[lines], columns] = new
        return map_mixed(partial(_joined, [reading.tokens for reading in plan.readings], hidden.shape[1]), *parts)

    def _keep_behind(self, rows: torch.Tensor, layer: LinearAttentionLayer, column: int) -> None:
        self.keep(rows, layer, passed=column + 1)

    def _pass(self, passed: torch.Tensor) -> None:
        for state in self._states.values():
            tokens = passed.to(state.device)
            state[0, : len(tokens)] = state[tokens, torch.arange(len(tokens), device=state.device)]

    def _room(self, columns: int, like: torch.Tensor) -> torch.Tensor:
        old = self._inputs
        if old is None or old.shape[1] < columns:
            self._inputs = like.new_zeros(self._rows, max(columns, 2 * SETTLE), like.shape[-1])
            if old is not None:
                self._inputs[:, : old.shape[1]] = old
        assert self._inputs is not None  # for the type checker
        return self._inputs

    def open_window(self, rows: int) -> None:
        """The states of the first rows stay as they are until [`~MixerRows.take`]."""
        self._window = WindowLayer({name: state[0, :rows] for (name, _), state in self._states.items()})
        self.mark_rows()

    def mark_rows(self) -> None:
        """Tells the compiler which tensors of the window have sizes that change."""
        assert self._window is not None  # for the type checker
        for tensor in self._window.tensors():
            mark_size(tensor, 0)

    def step(self, window: VerifyWindow, hidden: torch.Tensor, named: dict[str, Any]) -> Mixed:
        """
        Outputs of a packed forward of fixed shape.

        Args:
            window (`VerifyWindow`): Windows of the first rows, and tokens of a spare row.
            hidden (`torch.FloatTensor` of shape `(1, total, hidden)`): Inputs of the packed tokens.
            named (`dict`): Options of the call.
        """
        assert self._window is not None  # for the type checker
        starts, ends = window.spans[1, :-1, None], window.spans[1, 1:, None]
        places = starts + torch.arange(window.width, device=starts.device)  # [rows, width]
        rectangle = hidden[0, places.clamp(max=hidden.shape[1] - 1)]
        rectangle = rectangle.masked_fill((places >= ends)[..., None], 0.0)
        mixed = call_mixer(self._mixer, self._windowed, rectangle, self._window, **named)
        owners = window.rows.clamp(max=len(rectangle) - 1)
        return map_mixed(lambda states: states[owners, window.offsets][None], mixed)

    def take(self, counts: torch.Tensor) -> None:
        """Moves the states of the window's rows on by `(rows,)` tokens of the latest step."""
        assert self._window is not None  # for the type checker
        self._window.take(counts)
        self._window = None

    def behind(self, row: int, count: int) -> LinearAttentionLayer:
        """A layer of a cache with the states of a row, `count` committed tokens behind the settled ones."""
        index = torch.tensor([row])
        if self._inputs is None:
            return self.copy(index, passed=count)
        layer = self.copy(index)
        if count:
            call_mixer(self._mixer, self._mixer.forward, self._inputs[row : row + 1, :count], layer)
        return layer

    def clear(self, rows: int | slice = slice(None)) -> None:
        """States as before the first token, of one row or of all."""
        for state in self._states.values():
            state[:, rows] = 0

    @property
    def by_row(self) -> list[torch.Tensor]:
        """What it holds, `(rows, ...)` each."""
        held = [state.transpose(0, 1) for state in self._states.values()]
        return held if self._inputs is None else [*held, self._inputs]

    def rearrange(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` in place i."""
        self._rows = len(order)
        self._states = {key: state[:, order.to(state.device)] for key, state in self._states.items()}
        self._inputs = None if self._inputs is None else self._inputs[order.to(self._inputs.device)]


def _joined(tokens: list[torch.Tensor], total: int, *parts: torch.Tensor) -> torch.Tensor:
    """Outputs of several readings as those of the packed tokens, `(1, total, ...)`."""
    if len(parts) == 1:
        return parts[0][None]
    outputs = parts[0].new_empty(1, total, *parts[0].shape[1:])
    for index, part in zip(tokens, parts, strict=True):
        outputs[0, index.to(part.device)] = part
    return outputs


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
            index: MixerRows(
                module, rows, layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 1
            )
            for index, module, layer in ((index, module, layers[index]) for index, module in self._modules.items())
        }
        self.settled, self.reread = [0] * rows, 0
        self._one_by_one = read_one_by_one(target)
        self._plan: _Plan | None = None
        self._window: VerifyWindow | None = None
        self._forwards = {module: MethodType(_stepped, module) for module in self._modules.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states and inputs, as far as they are allocated."""
        return sum(layer.nbytes for layer in self._layers.values())

    @contextmanager
    def stepping(self, window: VerifyWindow) -> Iterator[None]:
        """
        While it lasts, a forward of fixed shape over this window reads the states of its rows, which are settled.
        Then [`~RecurrentRows.take`] moves them on.
        """
        for layer in self._layers.values():
            layer.open_window(window.spans.shape[1] - 1)
        self._window = window
        try:
            # where other threads' forwards read states, too, neither call undoes the other's change
            with _mixing(self._modules.values()), lent_forwards(self._forwards):
                yield
        finally:
            self._window = None
        for layer in self._layers.values():
            layer.mark_rows()

    def take(self, counts: torch.Tensor) -> None:
        """Moves the states of the window's rows on by `(rows,)` tokens of the latest step."""
        for layer in self._layers.values():
            layer.take(counts)

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
        pending = [length - done for length, done in zip(lengths, self.settled, strict=True)]
        passed, settling = None, []
        self.reread = 0
        if self._one_by_one:
            if any(pending):
                passed = torch.tensor(pending, device=device)
            self.settled[:], pending = lengths, [0] * len(pending)
        pending = pending[: window.num_rows]
        while not window.certain and max(pending) >= SETTLE:
            rows = [row for row, count in enumerate(pending) if count >= SETTLE]
            settling.append(torch.tensor(rows, device=device))
            for row in rows:
                pending[row] -= SETTLE
                self.settled[row] += SETTLE
            self.reread += SETTLE * len(rows)
        self.reread += sum(pending)
        before = torch.tensor(pending, device=device)[window.rows]
        if not window.certain:
            everything = torch.arange(window.num_rows, device=device), torch.arange(len(before), device=device)
            places = torch.stack((window.rows, before + window.offsets))
            width = max(pending) + window.width
            reading = _Reading(*everything, places, max(pending), width, self._one_by_one)
            return _Plan(passed, settling, [reading], certain=False)
        # a state is only right behind the last column, so the rows of a rectangle are equally long
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for row, count in enumerate(window.counts()):
            if count:
                groups[pending[row] + count, self._one_by_one and self.settled[row] > 0].append(row)
        readings = []
        for (width, single), rows in groups.items():
            line = torch.full((window.num_rows,), -1, device=device)
            line[rows] = torch.arange(len(rows), device=device)
            lines = line[window.rows]
            tokens = (lines >= 0).nonzero().flatten()
            places = torch.stack((lines[tokens], (before + window.offsets)[tokens]))
            most = max(pending[row] for row in rows)
            readings.append(_Reading(torch.tensor(rows, device=device), tokens, places, most, width, single))
        return _Plan(passed, settling, readings, certain=True)

    def mix(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mixed:
        """A mixer's own `forward` over the packed tokens of the current window."""
        layer = self._layers[int(module.layer_idx)]  # type: ignore[arg-type]
        hidden, named = mixer_arguments(module, layer.packed, args, kwargs)
        if self._window is not None:
            return layer.step(self._window, hidden, named)
        assert self._plan is not None  # for the type checker
        return layer.mix(self._plan, forward, hidden, named)

    @property
    def mixes(self) -> bool:
        """Whether a forward is reading these rows."""
        return self._plan is not None or self._window is not None

    def settle_as_usual(self, lengths: Sequence[int]) -> None:
        """Says that as many tokens wait to be read once more as a row has on average, for timing steps."""
        waiting = 0 if self._one_by_one else SETTLE // 2
        self.settled[:] = [max(0, length - waiting) for length in lengths]

    @torch.no_grad()
    def states(self, row: int, length: int) -> dict[int, LinearAttentionLayer]:
        """The states of a row of `length` committed tokens, by layer, as a cache of plain decoding holds them."""
        return {index: layer.behind(row, length - self.settled[row]) for index, layer in self._layers.items()}

    def cut(self, row: int, length: int) -> int:
        """Forgets what lies behind a row's first `length` tokens. Returns how many of these are still known."""
        if length >= self.settled[row]:
            return length
        for layer in self._layers.values():
            layer.clear(row)
        self.settled[row] = 0
        return 0

    def restart(self, rows: int) -> None:
        """Forgets all texts; the first rows, of those that there are, are those of new ones."""
        self.settled, self.reread = [0] * rows, 0
        for layer in self._layers.values():
            layer.clear()

    def swap_rows(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchanges rows `first[i]` and `second[i]`; no row is named twice."""
        swap_items(self.settled, first, second)
        swap_rows((held for layer in self._layers.values() for held in layer.by_row), first, second)

    def copied(self) -> RecurrentRows:
        """The same rows, which can be rearranged apart."""
        other = copy.copy(self)
        other.settled = list(self.settled)
        other._layers = {index: copy.copy(layer) for index, layer in self._layers.items()}
        return other

    def rearrange(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` in place i."""
        self.settled[:] = [self.settled[row] for row in order.tolist()]
        for layer in self._layers.values():
            layer.rearrange(order)


def _mixed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forwards with any other cache, as those of a logits processor, pass through."""
    for value in (*args, *kwargs.values()):
        rows = getattr(value, "recurrent", None) if isinstance(value, Cache) else None
        if isinstance(rows, RecurrentRows) and rows.mixes:
            return rows.mix(module, forward, args, kwargs)
    return forward(*args, **kwargs)


def _stepped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for a mixer whose forward is its class's; one function, so that what was compiled serves all rows."""
    return _mixed(module, partial(type(module).forward, module), *args, **kwargs)


def _mixed_forward(module: nn.Module) -> Callable[..., Any]:
    return partial(_mixed, module, module.forward)


_mixing: Lender[nn.Module] = Lender(lambda module: lend_forward(module, _mixed_forward(module)))


__all__ = ["SETTLE", "MixerRows", "RecurrentRows"]
