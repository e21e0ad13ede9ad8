"""How many tokens each captured round sends, by what the rounds before have shown and what rounds cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ..round_size import Outlook, SizeChoice, tiers
from ..step_costs import StepCostTable


class CapturedSchedule:
    """
    The schedule of rounds that a call plays in captured graphs. Without a table of step costs every round drafts and
    sends whole windows.

    Such a round drafts for all of its rows or for none, and its total is one of a few. A decision rests on rounds that
    have been read by then, of which the latest is two before the one in question.

    Args:
        table (`StepCostTable`, *optional*): Of the call.
        width (`int`): Most drafted tokens of a row.
        cuts (`bool`): Windows may be cut; else they are whole or there are none.
    """

    def __init__(self, table: StepCostTable | None, width: int, cuts: bool) -> None:
        self._table, self._width, self._cuts = table, width, cuts
        self._outlook, self._choice = Outlook(width), SizeChoice()
        self._totals = cache(self._totals_of)
        self._draft = cache(self._draft_of)
        self._retries: deque[bool] = deque()  # of the rounds that have not been recorded
        self.figures = dict.fromkeys(("rounds", "skipped_rounds", "row_rounds", "skipped_row_rounds", "retries"), 0)

    def total(self, live: int, size: int, context: float) -> int | None:
        """
        Tokens that the coming round sends, anchors included; `None` if nothing is to be drafted.

        Args:
            live (`int`): Rows whose texts go on.
            size (`int`): Rows of the round, ended ones included.
            context (`float`): Entries of a row in the target's cache, on average.
        """
        if self._table is None:
            return size * (self._width + 1)
        totals = self._totals(size)
        seconds = self._table.predict(size, totals, context)
        seconds[1:] += self._draft(size)
        drafts = np.clip((totals - live) / live, 0.0, self._width)
        drafts[0] = 0.0  # what ended rows leave is nobody's
        index, retry = self._choice(live, totals, seconds, live * self._outlook.accepted(drafts))
        self._retries.append(retry)
        done = {"rounds": 1, "row_rounds": live, "retries": live * retry}
        if not index:
            done |= {"skipped_rounds": 1, "skipped_row_rounds": live}
        for name, count in done.items():
            self.figures[name] += count
        return int(totals[index]) if index else None

    def record(
        self,
        size: int,
        total: int,
        context: float,
        seconds: float,
        sent: Sequence[int],
        accepted: Sequence[int],
        confidence: torch.Tensor | None,
    ) -> None:
        """
        Learns from a round that is over; they come in the order in which they were chosen.

        Args:
            size, total (`int`), context (`float`): Of the round: its rows, the tokens it sent, their context.
            seconds (`float`): That it took as a whole.
            sent, accepted (`Sequence[int]`): Of its live rows: drafts that the target checked, those that passed.
            confidence (`torch.FloatTensor` of shape `(live rows, width)`, *optional*): Of the drafts.
        """
        if self._table is None:
            return
        retry = self._retries.popleft()
        if not len(sent):
            return
        if total > size:
            known = None if confidence is None else confidence[:, : self._width].numpy()
            self._outlook.learn(np.asarray(sent), np.asarray(accepted), known, rare=retry)
            seconds = max(seconds - self._draft(size), 1e-9)
        self._table = self._table.refreshed(size, total, context, seconds)

    def _totals_of(self, size: int) -> np.ndarray:
        return np.array(tiers(size, self._width) if self._cuts else (size, size * (self._width + 1)))

    def _draft_of(self, size: int) -> float:
        assert self._table is not None  # for the type checker
        return float(self._table.draft_curve(size)[-1])


__all__ = ["CapturedSchedule"]
