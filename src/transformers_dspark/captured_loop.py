"""
Rounds in captured graphs, one after the other without a wait: while the device plays a round, the host reads what the
round before has done, and chooses the size of the one to come.

So everything that the host knows is one round old. A text that has ended is dead on the device at once; the host finds
out a round later, and nothing else happens to it in the meantime.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .batch.captured_schedule import CapturedSchedule
from .batch.processors import RowProcessors
from .captured import CapturedRounds, CaptureError
from .ragged_context import swap_items, swap_rows, to_the_front
from .sampling import RowNoise


AHEAD = 64  # rounds whose noise is drawn at once


class CapturedRound(NamedTuple):
    """
    What a round has done, for each of its live rows.

    Args:
        rows (`list[int]`): The rows.
        tokens (`list[list[int]]`): Committed.
        accepted, sent (`list[int]`): Drafts among them; drafts that the target checked.
        failed (`list[bool]`): The target's scores left no token to choose.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): Of the drafts.
        size, total (`int`): Rows of the round, ended ones included; tokens of the step.
        context (`float`): Entries of a row in the cache before it, on average, as far as the host knew.
        seconds (`float`): From the end of the round before, or from its own begin after a pause.
    """

    rows: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    sent: list[int]
    failed: list[bool]
    confidence: torch.Tensor | None
    size: int
    total: int
    context: float
    seconds: float


class CapturedLoop:
    """
    The rounds of one call.

    Args:
        rounds (`CapturedRounds`): Lent to this call; its cache holds the prompts, in the places of `rows`.
        rows (`Sequence[int]`): The live rows, by their places in the cache.
        text (`torch.LongTensor` of shape `(all rows, length)`): Their texts, by row.
        ends, shifts (`Sequence[int]`): By row: tokens of each text; what a position is ahead of the entries before it.
        processors (`RowProcessors`), eos_ids (`Collection[int]`): Of the call.
        schedule (`CapturedSchedule`): Of the call.
        noise (`RowNoise`, *optional*): When sampling.
        width (`int`): Most drafted tokens of a block.
        vocabulary (`int`): Of the target's logits.
        limit (`int`): Tokens with which a text ends.
    """

    def __init__(
        self,
        rounds: CapturedRounds,
        rows: Sequence[int],
        text: torch.Tensor,
        ends: Sequence[int],
        shifts: Sequence[int],
        processors: RowProcessors,
        eos_ids: Collection[int],
        schedule: CapturedSchedule,
        noise: RowNoise | None,
        *,
        width: int,
        vocabulary: int,
        limit: int,
    ) -> None:
        self._rounds, self._state, self._device = rounds, rounds.state, text.device
        self._vocabulary = vocabulary
        self._processors, self._eos_ids, self._schedule, self._noise = processors, eos_ids, schedule, noise
        self._width, self._limit = width, limit
        self._places = list(rows)  # row in each place
        self._size = len(rows)  # rows of a round: the live ones, and ended ones until they are worth taking out
        self._ends = {row: ends[row] for row in rows}
        self._gone: set[int] = set()  # rows that have ended, as far as the host knows
        state, count = self._state, len(rows)
        state.text[:count, : text.shape[1]] = text[self._places]
        starts = [0] * len(text) if processors.starts is None else processors.starts.tolist()
        for tensor, values in ((state.ends, ends), (state.shifts, shifts), (state.starts, starts)):
            tensor[:count] = torch.tensor([values[row] for row in rows], device=self._device)
        lengths = rounds.cache.lengths[:count]
        state.entries[:count] = torch.tensor(lengths, device=self._device)
        state.limit.fill_(limit)
        state.live.fill_(False)
        state.live[:count] = True
        state.most.fill_(width)
        self._bank: torch.Tensor | None = None  # [rounds, places, numbers]
        self._played = 0
        self._under_way: _UnderWay | None = None
        self._clock = _Clock(self._device)

    def step(self) -> CapturedRound | None:
        """
        Sends the next round off and returns the one before, if there was one.

        Raises:
            CaptureError: the next one cannot be captured. The loop is as it was.
        """
        before, self._under_way = self._under_way, None
        live = self._size - sum(row in self._gone for row in self._places[: self._size])
        if live <= self._size // 2 and before is None and live:
            self._compact(live)
        if live > self._size // 2:
            try:
                self._under_way = self._play(live)
            except CaptureError:
                self._under_way = before
                raise
        else:
            self._clock.pause()
        return None if before is None else self._read(before)

    def leave(self) -> CapturedRound | None:
        """Reads the round that is under way, if there is one, and brings live rows to the front of the cache."""
        before, self._under_way = self._under_way, None
        done = None if before is None else self._read(before)
        live = sum(row not in self._gone for row in self._places)
        if live:
            self._compact(live)
        for place, length in enumerate(self._rounds.cache.lengths):
            self._rounds.cache.cut(place, length)  # rejected tokens left their positions there
        return done

    def end(self, row: int) -> None:
        """Ends a row's text, unless the device has ended it already."""
        if row in self._gone:
            return  # the device ended it by itself, at the right token
        self._gone.add(row)
        place = self._places.index(row)
        self._state.live[place] = False
        if self._rounds.cache.recurrent is not None:
            self._rounds.cache.cut(place, 0)  # the round under way may have moved its states on

    def write_back(self, text: torch.Tensor) -> None:
        """Copies the texts to where they came from."""
        text[torch.tensor(self._places, device=self._device)] = self._state.text[: len(self._places), : text.shape[1]]

    @property
    def order(self) -> list[int]:
        """Row in each place of the cache."""
        return self._places

    def _play(self, live: int) -> _UnderWay:
        size = self._size
        rows = self._places[:size]
        lengths = self._rounds.cache.lengths
        context = sum(lengths[place] for place, row in enumerate(rows) if row not in self._gone) / live
        # how much room is left in a text the device knows itself, and earlier
        chosen = self._schedule.total(live, size, context)
        drafting, total = chosen is not None, chosen or size
        self._draw(size)
        known = self._rounds.count
        graph = self._rounds.graph(
            size,
            total,
            drafting,
            self._processors,
            self._eos_ids,
            vocabulary=self._vocabulary,
            sampling=self._noise is not None,
        )
        if self._rounds.count > known:
            self._clock.pause()  # the time of a capture is no round's
        self._clock.start()
        report = graph.replay()
        numbers, confidence = _on_the_way(report.numbers), report.confidence
        if confidence is not None:
            confidence = _on_the_way(confidence)
        return _UnderWay(rows, numbers, confidence, total, context, self._clock.stop())

    def _compact(self, live: int) -> None:
        """Brings live rows to the front, so that smaller rounds will do. Nothing may be under way."""
        state = self._state
        pairs = to_the_front([row in self._gone for row in self._places])
        swap_items(self._places, *pairs)
        self._rounds.cache.swap_rows(*pairs)
        held = [state.text, state.ends, state.entries, state.shifts, state.starts, state.live]
        swap_rows(held if self._bank is None else [*held, self._bank.transpose(0, 1)], *pairs)
        self._size = 1 << (live - 1).bit_length()

    def _draw(self, size: int) -> None:
        if self._noise is None:
            return
        count, at = self._state.uniforms.shape[1], self._played % AHEAD
        if at == 0:
            drawn = self._noise(self._places[:size], AHEAD * count, self._device)
            self._bank = drawn.view(size, AHEAD, count).transpose(0, 1)
        assert self._bank is not None  # for the type checker
        self._state.uniforms[:size] = self._bank[at, :size]
        self._played += 1

    def _read(self, before: _UnderWay) -> CapturedRound:
        seconds = self._clock.seconds(before.span)  # waits until the round has been played
        *tokens, kept, accepted, sent, failed = before.numbers.T.tolist()
        texts = list(zip(*tokens, strict=True))
        size = len(before.rows)
        found = CapturedRound([], [], [], [], [], None, size, before.total, before.context, seconds)
        places = []
        for place, row in enumerate(before.rows):
            if row in self._gone or not (kept[place] or failed[place]):
                self._gone.add(row)  # it had ended before this round
                continue
            new = list(texts[place][: kept[place]])
            found.rows.append(row)
            found.tokens.append(new)
            found.accepted.append(accepted[place])
            found.sent.append(sent[place])
            found.failed.append(bool(failed[place]))
            places.append(place)
            self._ends[row] += len(new)
            self._rounds.cache.advance(place, len(new))  # no row moves while a round is under way
            if self._ends[row] >= self._limit or (new and new[-1] in self._eos_ids):
                self._gone.add(row)
        return found if before.confidence is None else found._replace(confidence=before.confidence[places])


@dataclass(frozen=True)
class _UnderWay:
    """A round that has been sent off: its rows, where its report arrives, its size, and marks around it."""

    rows: list[int]
    numbers: torch.Tensor
    confidence: torch.Tensor | None
    total: int
    context: float
    span: tuple[Any, Any]


class _Clock:
    """Marks on the device's own time, each round's end the next one's begin."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._mark: Any = None

    def pause(self) -> None:
        """The next round begins when it is started, not when the last one ended."""
        self._mark = None

    def start(self) -> None:
        self._mark = self._mark or self._now()

    def stop(self) -> tuple[Any, Any]:
        begin, self._mark = self._mark, self._now()
        return begin, self._mark

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def seconds(self, span: tuple[Any, Any]) -> float:
        """Waits for the second mark."""
        begin, end = span
        if not self._cuda:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _on_the_way(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, whole once the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


__all__ = ["CapturedLoop", "CapturedRound"]
