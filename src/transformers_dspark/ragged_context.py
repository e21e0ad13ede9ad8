"""A drafter's context with rows of different lengths, for the batched loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import ragged_ops
from .backbone_dspark import DSparkContext, KeysValues
from .modeling_dspark import DSparkDrafter
from .windows import VerifyWindow


SWAPPED_BYTES = 2**28  # of a buffer that are copied at once


class RaggedContext(DSparkContext):
    """
    Keys and values of the committed tokens of several texts, each written once, behind its row's own.

    The entries of a block lie behind those of the longest row, where nothing of any row is alive.

    Args:
        drafter (`DSparkDrafter`): Whose context it is.
        rows (`int`): Number of rows.
        capacity (`int`): Most committed tokens of a row.
    """

    def __init__(self, drafter: DSparkDrafter, rows: int, capacity: int) -> None:
        super().__init__(len(drafter.layers))
        self.rows, self.capacity = rows, capacity
        self.lengths = [0] * rows
        self.live = rows  # rows before this one are drafted for
        self._block_size = drafter.config.block_size
        self._places = torch.full((rows, capacity), -1, device=drafter.device)  # position of each entry

    @property
    def length(self) -> int:
        """Entries of the longest live row."""
        return max(self.lengths[: self.live], default=0)

    @length.setter
    def length(self, value: int) -> None:
        """Rows have lengths of their own."""

    @property
    def has_gaps(self) -> bool:
        """Whether some live row is shorter than another."""
        return len(set(self.lengths[: self.live])) > 1

    @has_gaps.setter
    def has_gaps(self, value: bool) -> None:
        """See [`~RaggedContext.has_gaps`]."""

    @property
    def positions(self) -> torch.Tensor:
        """`(live, length)` absolute positions of the committed tokens; -1 behind a row's last."""
        return self._places[: self.live, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' keys and values, as far as they are allocated."""
        return sum(keys.nbytes + values.nbytes for keys, values in filter(None, self._buffers))

    def extend(
        self, drafter: DSparkDrafter, taps: torch.Tensor, position_ids: torch.Tensor, window: VerifyWindow
    ) -> None:
        """
        Commits the tokens of a window.

        Args:
            drafter (`DSparkDrafter`): The drafter of this context.
            taps (`torch.FloatTensor` of shape `(1, total, num_taps * target_hidden_size)`): Of the packed tokens.
            position_ids (`torch.LongTensor` of shape `(1, total)`): Their absolute positions.
            window (`VerifyWindow`): Where they belong; all of them are committed.
        """
        window = window.to(drafter.device)
        position_ids = position_ids.to(drafter.device)
        for layer, pair in enumerate(drafter.context_keys_values(taps, position_ids)):
            keys, values = (new[0].transpose(0, 1) for new in pair)
            ragged_ops.write(keys, values, *self._buffer(layer, *pair), window.places)
        self._places[window.rows, window.columns] = position_ids[0]

    def stage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Writes a block's entries behind those of the longest live row; returns views of all live rows."""
        start, end = self.length, self.length + keys.shape[2]
        found = []
        for buffer, new in zip(self._buffer(layer, keys, values), (keys, values), strict=True):
            buffer[: self.live, :, start:end] = new
            found.append(buffer[: self.live, :, :end])
        return found[0], found[1]

    def restart(self, rows: int) -> None:
        """Forgets all texts; the first rows are those of new ones."""
        self.lengths, self.live = [0] * rows, rows
        self._places.fill_(-1)

    def picked(self, rows: list[int]) -> DSparkContext:
        """A copy of some rows, to draft for these alone."""
        some = DSparkContext(len(self._buffers))
        index = torch.tensor(rows, device=self._places.device)
        some.length = max(self.lengths[row] for row in rows)
        some.has_gaps = len({self.lengths[row] for row in rows}) > 1
        some._positions = self._places[index, : some.length]
        some._buffers = [
            None if pair is None else (pair[0][index, :, : some.length], pair[1][index, :, : some.length])
            for pair in self._buffers
        ]
        return some

    def swap_rows(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchanges rows `first[i]` and `second[i]`; no row is named twice."""
        swap_rows([self._places, *(buffer for pair in self._buffers if pair for buffer in pair)], first, second)
        swap_items(self.lengths, first, second)

    def cut(self, row: int, length: int) -> None:
        """Forgets a row's entries from `length` on."""
        self.lengths[row] = length
        self._places[row, length:] = -1

    def rearrange(self, order: torch.Tensor, capacity: int) -> None:
        """Puts row `order[i]` in place i, and changes the capacity of all."""
        index, kept = order.to(self._places.device), min(capacity, self.capacity)
        self.lengths[:] = [self.lengths[row] for row in order.tolist()]
        self.rows = self.live = len(order)
        self.capacity = capacity
        positions, buffers = self._places, self._buffers
        self._places = positions.new_full((self.rows, capacity), -1)
        self._places[:, :kept] = positions[index, :kept]
        self._buffers = [None] * len(buffers)
        for layer, pair in enumerate(buffers):
            if pair is not None:
                for new, old in zip(self._buffer(layer, *pair), pair, strict=True):
                    new[:, :, :kept] = old[index, :, :kept]

    def _buffer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """The entries of a layer, made on first use in the likeness of `keys` and `values`."""
        found = self._buffers[layer]
        if found is None:
            size = self.capacity + self._block_size
            made = [t.new_zeros(self.rows, t.shape[1], size, t.shape[-1]) for t in (keys, values)]
            found = self._buffers[layer] = made[0], made[1]
        return found


def swap_rows(buffers: Iterable[torch.Tensor], first: Sequence[int], second: Sequence[int]) -> None:
    """
    Exchanges rows `first[i]` and `second[i]` of `(rows, ...)` buffers in place; no row is named twice. The numbers are
    sent to a device once for all buffers.
    """
    sent: dict[torch.device, torch.Tensor] = {}
    for buffer in buffers if first else ():
        if buffer.device not in sent:
            sent[buffer.device] = torch.tensor([first, second, first], device=buffer.device)
        at_once = max(1, SWAPPED_BYTES // max(1, 2 * buffer[0].nbytes))
        for some in sent[buffer.device].split(at_once, dim=1):
            buffer[some[:2].flatten()] = buffer[some[1:].flatten()]


def swap_items(items: list[Any], first: Sequence[int], second: Sequence[int]) -> None:
    """The same in a list of one item a row."""
    for one, other in zip(first, second, strict=True):
        items[one], items[other] = items[other], items[one]


def to_the_front(done: Sequence[bool]) -> tuple[list[int], list[int]]:
    """The rows to exchange, as few as can be, so that those that are not done come first."""
    live = len(done) - sum(done)
    free = [place for place in range(live) if done[place]]
    return free, [place for place in range(live, len(done)) if not done[place]]


__all__ = ["RaggedContext", "swap_items", "swap_rows", "to_the_front"]
