"""Where the tokens of a forward call belong in a ragged cache. Records only; they travel as a forward keyword."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch


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


@dataclass(frozen=True)
class VerifyWindow:
    """
    A packed forward: the windows of all rows, one behind the other, as one row of tokens.

    A window is what a row sends to the target at once: its anchor and the admitted drafts, or its whole prompt. Its
    tokens see the row's cached entries and, causally, each other.

    Args:
        places (`torch.LongTensor` of shape `(3, total)`): For each token its cache row, its entry there, which is the
            number of tokens before it, and its place in its row's window.
        spans (`torch.IntTensor` of shape `(2, rows + 1)`): For each row the entries before its window, and where the
            window begins among the packed tokens; the last column has 0 and where the last window ends. Tokens from
            there on belong to no row.
        num_rows (`int`): Attention reads the cache rows `0 .. num_rows - 1`.
        reach (`torch.Tensor` of shape `(width, length, 2 + before, 0)`): Tokens of the longest window; entries that
            attention reads of each row, which is the largest column plus 1; entries before any window. As sizes from 2
            on, a compiler can take them for any numbers.
        certain (`bool`): All tokens stay, as those of a prompt do.
        alone (`bool`): Attention is computed for one token at a time, so that its bits depend on no other.
    """

    places: torch.Tensor
    spans: torch.Tensor
    num_rows: int
    reach: torch.Tensor
    certain: bool = False
    alone: bool = False
    _elsewhere: dict[torch.device, VerifyWindow] = field(default_factory=dict, repr=False, compare=False)
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def width(self) -> int:
        """Tokens of the longest window."""
        return self.reach.shape[0]

    @property
    def length(self) -> int:
        """Entries that attention reads of each row."""
        return self.reach.shape[1]

    @property
    def before(self) -> int:
        """At least the entries before any window."""
        return self.reach.shape[2] - 2

    @property
    def rows(self) -> torch.Tensor:
        """`(total,)` cache row of each token."""
        return self.places[0]

    @property
    def columns(self) -> torch.Tensor:
        """`(total,)` entry of each token in its row."""
        return self.places[1]

    @property
    def offsets(self) -> torch.Tensor:
        """`(total,)` place of each token in its row's window."""
        return self.places[2]

    @classmethod
    def pack(
        cls, lengths: Sequence[int], widths: Sequence[int], device: torch.device, certain: bool = False
    ) -> VerifyWindow:
        """Windows of `widths` tokens behind `lengths` cached ones, one of each for a row."""
        spans = torch.tensor([[*lengths, 0], list(accumulate(widths, initial=0))], dtype=torch.int32)
        rows = torch.repeat_interleave(torch.tensor(widths, dtype=torch.long))
        offsets = torch.arange(len(rows)) - spans[1, rows]
        places = torch.stack((rows, spans[0, rows] + offsets, offsets)).to(device)
        spans = spans.to(device)
        ends = [length + width for length, width in zip(lengths, widths, strict=True)]
        return cls.over(places, spans, len(ends), (max(widths), max(ends), max(lengths)), certain)

    @classmethod
    def over(
        cls,
        places: torch.Tensor,
        spans: torch.Tensor,
        num_rows: int,
        reach: tuple[int, int, int],
        certain: bool = False,
    ) -> VerifyWindow:
        """A window whose reach is given in numbers: width, length, entries before it."""
        width, length, before = reach
        return cls(places, spans, num_rows, places.new_empty(width, length, 2 + before, 0), certain)

    def to(self, device: torch.device) -> VerifyWindow:
        """The same on another device: the layers of a target may lie on several."""
        if self.places.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self, places=self.places.to(device), spans=self.spans.to(device), _elsewhere={}, _masks={}
            )
        return self._elsewhere[device]

    def only(self, keep: torch.Tensor) -> VerifyWindow:
        """Without the tokens `(total,)` that are not kept; good for writing, not for attention."""
        return replace(self, places=self.places[:, keep], _elsewhere={}, _masks={})

    def filled(self, total: int) -> VerifyWindow:
        """As a step of `total` tokens, the last one repeated, each of which attends alone."""
        index = torch.arange(total, device=self.places.device).clamp(max=self.places.shape[1] - 1)
        return replace(self, places=self.places[:, index], alone=True, _elsewhere={}, _masks={})

    @cached_property
    def entries(self) -> list[tuple[int, int]]:
        """Row and entry of each token, on the host."""
        return list(zip(*self.places[:2].tolist(), strict=True))

    def counts(self) -> list[int]:
        """Tokens of each row."""
        return torch.bincount(self.rows, minlength=self.num_rows).tolist()

    @cached_property
    def query_columns(self) -> torch.Tensor:
        """`(num_rows, width)` entry of each query; 0 where a window is shorter."""
        return self.padded(self.columns)

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """`(total, ...)` values of tokens as `(num_rows, width, ...)`, with zeros where a window is shorter."""
        rectangle = packed.new_zeros(self.num_rows, self.width, *packed.shape[1:])
        rectangle[self.rows, self.offsets] = packed
        return rectangle

    def packed(self, rectangle: torch.Tensor) -> torch.Tensor:
        """Undoes [`~VerifyWindow.padded`]."""
        return rectangle[self.rows, self.offsets]

    def visible(self, sliding_window: int | None) -> torch.Tensor:
        """`(num_rows, width, length)`: True where a query may look. Made once for all layers of a kind."""
        if sliding_window not in self._masks:
            entries, queries = torch.arange(self.length, device=self.rows.device), self.query_columns[..., None]
            seen = entries <= queries  # a query of the padding sees the first entry, so that its softmax is no 0 / 0
            if sliding_window is not None:
                seen &= entries > queries - sliding_window
            self._masks[sliding_window] = seen
        return self._masks[sliding_window]


@dataclass(frozen=True)
class MaskedRow:
    """A forward of one row whose attention modules bring a mask that says all: they attend as in plain decoding."""


__all__ = ["WINDOW_KEYWORD", "MaskedRow", "RaggedWindow", "VerifyWindow"]
