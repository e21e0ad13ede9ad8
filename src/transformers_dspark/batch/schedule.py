"""What is drafted and what is verified in each round of the batched loop, by confidence and measured cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..generation_config import DraftingOptions
from ..modeling_dspark import DSparkDrafter
from ..scheduling import DraftGate, budget, causal_lengths, survival, threshold_caps, top_k_lengths
from ..step_costs import StepCostTable
from .captured_schedule import CapturedSchedule


LAG = 2  # rounds between the confidences that choose a budget and the round that spends it


class RoundSchedule:
    """
    The schedule of one call; that of its captured rounds is `captured`. Without a table of step costs every row drafts
    in every round, and what is drafted is verified.

    Args:
        options (`DraftingOptions`): Of the call.
        target (`PreTrainedModel`), drafter (`DSparkDrafter`): The pair.
        rows (`int`): Rows of the call.

    Raises:
        ValueError: the table is another target's.
    """

    def __init__(self, options: DraftingOptions, target: PreTrainedModel, drafter: DSparkDrafter, rows: int) -> None:
        self._options, self._gamma = options, drafter.config.num_draft_tokens
        self.table = _table(options.step_cost_table)
        self._gate = None
        if self.table is not None:
            self.table.check_target(target)
            self._gate = DraftGate(rows, max(1, options.width))
        # confidences of the rounds before, the oldest first; NaN where a row has none
        self._history = [torch.full((rows, self._gamma), float("nan")) for _ in range(LAG)]
        self._rows = rows
        self.captured = CapturedSchedule(self.table, options.width, options.verify_mode != "static")
        self._budget = 0  # tokens admitted over all rows in this round, by the lagged scheduler

    def widths(self, rows: list[int], caps: list[int], context: float) -> list[int]:
        """
        Tokens to draft for each of the live rows in the coming round; 0 for a row that does not draft.

        Args:
            rows (`list[int]`): The live rows.
            caps (`list[int]`): Drafts that each has room for.
            context (`float`): Entries of a row in the target's cache, on average.
        """
        if self._gate is None or self.table is None:
            return caps
        live = np.zeros(self._rows, dtype=bool)
        live[rows] = True
        cost = self.table.curve(len(rows), len(rows) * self._gamma, context)
        drafts = self.table.draft_curve(len(rows))
        chosen = self._gate.decide(live, cost, drafts)
        widths = [cap if chosen[row] else 0 for row, cap in zip(rows, caps, strict=True)]
        if any(widths) and self._options.scheduler == "lagged" and self._options.verify_mode != "static":
            cost = cost + drafts[sum(map(bool, widths))]
            before = survival(self._history[0][rows])
            self._budget = max(1, int(budget(before, cost, torch.tensor(widths))))
            widths = [min(width, self._budget) for width in widths]  # no row can get more
        return widths

    def lengths(
        self, rows: list[int], confidence: torch.Tensor | None, usable: list[int], context: float
    ) -> list[int]:
        """
        Drafts of each live row that are admitted in this round, after [`~RoundSchedule.widths`].

        Args:
            rows (`list[int]`): The live rows.
            confidence (`torch.FloatTensor` of shape `(live, width)`, *optional*): Of their drafts; NaN in rows that
                did not draft.
            usable (`list[int]`): Drafts of each that may be verified at all.
            context (`float`): As for [`~RoundSchedule.widths`].
        """
        self.remember(rows, confidence)
        if confidence is None or not any(usable):
            return usable
        caps = torch.tensor(usable)
        if self._options.confidence_threshold > 0:
            caps = torch.minimum(caps, threshold_caps(confidence, self._options.confidence_threshold))
        if self._options.verify_mode == "static" or self.table is None:
            return caps.tolist()
        now = survival(confidence)
        if self._options.scheduler == "causal":
            cost = self.table.curve(len(rows), len(rows) * self._gamma, context)
            cost = cost + self.table.draft_curve(len(rows))[sum(map(bool, usable))]
            return causal_lengths(now, cost, caps).tolist()
        return top_k_lengths(now, self._budget, caps).tolist()

    def remember(self, rows: list[int], confidence: torch.Tensor | None) -> None:
        """Keeps `(live, width)` confidences of a round for those to come."""
        latest = torch.full_like(self._history[0], float("nan"))
        if confidence is not None and confidence.shape[1]:
            # what was not drafted is taken to be as sure as the last that was
            behind = confidence[:, -1:].expand(-1, self._gamma - confidence.shape[1])
            latest[rows] = torch.cat((confidence, behind), dim=1)
        self._history = [*self._history[1:], latest]

    def record(
        self,
        rows: list[int],
        drafted: list[bool],
        admitted: list[int],
        accepted: list[int],
        tokens: int,
        context: float,
        seconds: tuple[float, float],
    ) -> None:
        """
        Learns from a round that is over.

        Args:
            rows, drafted, admitted, accepted (`list`): Live rows; which drafted, what was admitted, what passed.
            tokens (`int`): Sent to the target; in cap-accept more than what was admitted, which must not move the
                gate: it would decide otherwise than in compact.
            context (`float`): As for [`~RoundSchedule.widths`].
            seconds (`tuple[float, float]`): Of drafting, and of the target's step with all that belongs to it.
        """
        if self._gate is None or self.table is None:
            return
        full = np.zeros((3, self._rows), dtype=int)
        full[:, rows] = drafted, admitted, accepted
        self._gate.record(full[0].astype(bool), full[1], full[2])
        draft, step = seconds
        if any(drafted):
            self.table = self.table.refreshed_draft(sum(drafted), draft)
        self.table = self.table.refreshed(len(rows), tokens, context, step)

    def figures(self) -> dict[str, int] | None:
        """How often rows and rounds went without drafts, if a table decided about it."""
        if self._gate is None:
            return None
        return {name: count + self.captured.figures[name] for name, count in self._gate.to_dict().items()}


def _table(given: str | os.PathLike[str] | Mapping[str, Any] | StepCostTable | None) -> StepCostTable | None:
    if given is None or isinstance(given, StepCostTable):
        return given
    try:
        return StepCostTable.load(given)
    except OSError as error:
        raise ValueError(
            f"step_cost_table={str(given)!r} cannot be read ({error}): make one with `dspark profile`."
        ) from error


__all__ = ["RoundSchedule"]
