"""A table of step costs that makes captured rounds of every size, and notes what they take."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from transformers_dspark import StepCostTable
from transformers_dspark.round_size import tiers
from transformers_dspark.step_costs import StepCost


TIMES = 8  # each size is played


class Survey(StepCostTable):
    """
    Gives out that one total is nearly free and any other beyond price, in each round another one, up and down again so
    that each meets texts of the same length. It learns nothing and is never copied.

    Args:
        rows, width (`int`): Of the rounds.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__((StepCost(rows, rows, 0, 1.0),))
        down = tiers(rows, width)[::-1]
        vars(self).update(wanted=[*down, *down[::-1]] * (TIMES // 2), noted=[], chosen=0)

    @property
    def rounds(self) -> int:
        """That a call has to play."""
        return len(self.wanted) + 2

    def predict(self, rows: int, tokens: Any, context: float) -> Any:
        if np.ndim(tokens) == 0:
            return 1.0
        wanted = self.wanted[self.chosen % len(self.wanted)]
        vars(self)["chosen"] += 1
        return np.where(tokens == wanted, 1e-6, 1e6)

    def refreshed(self, rows: int, tokens: int, context: float, seconds: float) -> StepCostTable:
        self.noted.append((tokens, context, seconds))
        return self

    def costs(self) -> Iterable[tuple[int, float, float]]:
        """Total, mean context and median seconds of whole rounds."""
        for total in sorted({tokens for tokens, _, _ in self.noted}):
            found = [(context, seconds) for tokens, context, seconds in self.noted if tokens == total]
            contexts, seconds = zip(*found, strict=True)
            yield total, statistics.mean(contexts), statistics.median(seconds)

    def __deepcopy__(self, memo: dict[int, Any]) -> Survey:
        return self


__all__ = ["Survey"]
