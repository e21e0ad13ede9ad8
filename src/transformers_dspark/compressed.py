"""Targets with compressed attention, for rows of different lengths.

A row has a cache of Transformers' own, just as plain decoding would leave it, and in a packed forward the attention
modules of the target read one row after the other with its cache. All the rest of the target, the experts among it,
sees the packed window. Rejected tokens are taken back when the row is read next, see `rewinding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .lending import Lender, lend_forward
from .ragged_context import swap_items
from .rewinding import rewinding_cache
from .windows import WINDOW_KEYWORD, MaskedRow, VerifyWindow


def compressing(target: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention modules of a target that compresses what they read, by the number of their layer."""
    found = [module for module in target.modules() if hasattr(module, "layer_idx") and hasattr(module, "compressor")]
    return {int(module.layer_idx): module for module in found}


class _Row:
    """
    One text.

    Attributes:
        cache (`Cache`): Transformers' own.
        read (`int`): Tokens in it.
        certain (`int`): How many of them can no longer be taken back.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        self.cache, self.read, self.certain = rewinding_cache(target.config), 0, 0

    def rewind(self, length: int) -> None:
        """Takes back the tokens behind the first `length`, and makes these certain."""
        if self.read:
            self.cache.crop(length - self.read)
        self.read = self.certain = length


@dataclass(frozen=True)
class _Reading:
    """The tokens of a row among the packed ones, and what they see of the keys that a cache layer returns."""

    row: _Row
    tokens: slice
    mask: torch.Tensor


class CompressedRows:
    """
    The caches of a target with compressed attention, one for each row. They stand in a ragged cache in the place of
    recurrent states, which cannot be overwritten either.

    Args:
        target (`PreTrainedModel`): The target.
        rows (`int`): Number of rows.

    Attributes:
        reread (`int`): Tokens that a forward reads once more: none.
    """

    def __init__(self, target: PreTrainedModel, rows: int) -> None:
        self._modules, self._fresh = compressing(target), partial(_Row, target)
        self._window = int(target.config.get_text_config(decoder=True).sliding_window)
        self._dtype = target.get_input_embeddings().weight.dtype
        self._rows = [self._fresh() for _ in range(rows)]
        self._plan: list[_Reading] | None = None
        self.reread = 0

    @contextmanager
    def reading(self, window: VerifyWindow, lengths: Sequence[int]) -> Iterator[None]:
        """
        While it lasts, a forward of the target over this window reads and fills the caches of its rows.

        Args:
            window (`VerifyWindow`): The window of the forward; the tokens of a row follow each other.
            lengths (`Sequence[int]`): Committed tokens of each row.
        """
        plan, start = [], 0
        for row, count, length in zip(self._rows, window.counts(), lengths, strict=False):
            if count:
                row.rewind(length)
                row.read += count
                mask = self._mask(length, count, window.places.device)
                plan.append(_Reading(row, slice(start, start + count), mask))
                start += count
        self._plan = plan
        try:
            with _attending(self._modules.values()):
                yield
        finally:
            self._plan = None
        if window.certain:
            for reading in plan:
                reading.row.rewind(reading.row.read)

    def _mask(self, length: int, count: int, device: torch.device) -> torch.Tensor:
        """`(1, 1, count, entries)`, additive: a token sees itself and those before it in the sliding window."""
        queries = torch.arange(length, length + count, device=device)[:, None]
        entries = torch.arange(max(0, length - self._window + 1), length + count, device=device)
        hidden = (entries > queries) | (entries <= queries - self._window)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))[None, None]

    def attend(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
        """An attention module's own `forward` over the packed tokens of the current window, row by row."""
        assert self._plan is not None  # for the type checker
        named = dict(kwargs)
        hidden = named.pop("hidden_states") if "hidden_states" in named else args[0]
        angles, positions = named.pop("position_embeddings"), named.pop("position_ids")
        outputs = []
        for reading in self._plan:
            tokens = reading.tokens
            named |= {"cache": reading.row.cache, "attention_mask": reading.mask.to(hidden.device)}
            output, _ = forward(
                hidden[:, tokens],
                position_embeddings={kind: (cos[:, tokens], sin[:, tokens]) for kind, (cos, sin) in angles.items()},
                position_ids=positions[:, tokens],
                **named | {WINDOW_KEYWORD: MaskedRow()},
            )
            outputs.append(output)
        return torch.cat(outputs, dim=1), None

    def cache(self, row: int, length: int) -> Cache:
        """The cache of a row of `length` committed tokens, as plain decoding leaves it."""
        self._rows[row].rewind(length)
        return self._rows[row].cache

    def cut(self, row: int, length: int) -> int:
        """Forgets what lies behind a row's first `length` tokens. Returns how many of these are still known."""
        if length >= self._rows[row].certain:
            return length
        self._rows[row] = self._fresh()
        return 0

    def swap_rows(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchanges rows `first[i]` and `second[i]`; no row is named twice."""
        swap_items(self._rows, first, second)

    def rearrange(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` in place i."""
        self._rows = [self._rows[row] for row in order.tolist()]


_attending: Lender[nn.Module] = Lender(lambda module: lend_forward(module, partial(_attend, module.forward)))


def _attend(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forwards with any other cache, as those of a logits processor, pass through."""
    rows = getattr(kwargs.get("cache"), "recurrent", None)
    if isinstance(rows, CompressedRows) and rows._plan is not None:
        return rows.attend(forward, args, kwargs)
    return forward(*args, **kwargs)


__all__ = ["CompressedRows", "compressing"]
