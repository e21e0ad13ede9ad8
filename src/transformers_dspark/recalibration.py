"""Calibration that goes with the traffic: whether confidences still mean what they say, and temperatures that do."""

from __future__ import annotations

import logging
import math
from collections import deque

import torch

from .calibration import GRID, ConfidenceCalibration, expected_calibration_error
from .telemetry import RoundRecord, tests


logger = logging.getLogger(__name__)

SURE = 4.0  # standard errors beyond which a distance is no accident


class OnlineCalibration:
    """
    Watches confidences against what became of their tokens, over the latest blocks; give it to `generate` as
    `round_callback`. When traffic has drifted away from what the temperatures were fitted on it warns, once until the
    next refit.

    ```python
    >>> watch = OnlineCalibration(ConfidenceCalibration.of(drafter.config))
    >>> config = DSparkGenerationConfig(round_callback=watch)
    >>> target.generate(**inputs, assistant_model=drafter, generation_config=config)
    >>> if watch.drifted:
    ...     watch.refit().store_in(drafter.config)
    ```

    Each position is judged by itself, on the tokens whose prefix passed. These have an outcome however a schedule cut
    the blocks behind them, since a cut never depends on the token that it leaves out.

    Args:
        applied (`ConfidenceCalibration`): The temperatures that the confidences come with.
        blocks (`int`): Latest outcomes of each position that count.
        tolerance (`float`): Distance of mean confidence and accepted share, in 0..1, that is no drift.
        least (`int`): Outcomes of a position below which it is not judged, and keeps its temperature.

    Raises:
        ValueError: a tolerance out of range, or counts below 1.
    """

    def __init__(
        self, applied: ConfidenceCalibration, blocks: int = 4096, tolerance: float = 0.05, least: int = 256
    ) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance={tolerance} must be in 0..1 (below 1).")
        if not 1 <= least <= blocks:
            raise ValueError(f"least={least} must be at least 1 and blocks={blocks} no less than that.")
        self.blocks, self.tolerance, self.least = blocks, tolerance, least
        self._begin(applied)

    def _begin(self, applied: ConfidenceCalibration) -> None:
        self.applied, self.drifted = applied, False
        # of each position its latest outcomes: confidence, and whether the token passed
        self.seen: list[deque[tuple[float, bool]]] = [deque(maxlen=self.blocks) for _ in applied.temperatures]
        self._sums = [[0.0, 0.0] for _ in applied.temperatures]  # of confidence minus outcome, and of its variance

    def __call__(self, record: RoundRecord) -> None:
        columns = record.admitted, record.accepted, record.committed, record.confidences
        for admitted, accepted, committed, confidences in zip(*columns, strict=True):
            for k in range(min(tests(admitted, accepted, committed), len(confidences), len(self.seen))):
                self._add(k, confidences[k], k < accepted)
        if not self.drifted and (far := self._far()):
            self.drifted = True
            logger.warning(
                "Confidences no longer match what is accepted (%s): traffic has changed; refit() gives temperatures "
                "that do.",
                ", ".join(f"position {k + 1}: {gap:+.1%}" for k, gap in far),
            )

    def _add(self, position: int, confidence: float, passed: bool) -> None:
        seen, sums = self.seen[position], self._sums[position]
        if len(seen) == self.blocks:
            old, was = seen[0]
            sums[0] -= old - was
            sums[1] -= old * (1 - old)
        seen.append((confidence, passed))
        sums[0] += confidence - passed
        sums[1] += confidence * (1 - confidence)

    @property
    def gaps(self) -> list[float | None]:
        """Mean confidence minus accepted share, by position; `None` where fewer than `least` outcomes are known."""
        pairs = zip(self.seen, self._sums, strict=True)
        return [sums[0] / len(seen) if len(seen) >= self.least else None for seen, sums in pairs]

    def _far(self) -> list[tuple[int, float]]:
        """Positions whose gap is beyond the tolerance and beyond chance."""
        found = []
        for k, gap in enumerate(self.gaps):
            if gap is not None and abs(gap) > self.tolerance:
                error = math.sqrt(max(self._sums[k][1], 0.0)) / len(self.seen[k])
                if abs(gap) > SURE * error:
                    found.append((k, gap))
        return found

    def refit(self) -> ConfidenceCalibration:
        """
        Temperatures for the latest outcomes: at each position the one with the least calibration error there. What is
        known so far is forgotten, since it came with the old ones.

        Raises:
            ValueError: no position has `least` outcomes.
        """
        if max(map(len, self.seen)) < self.least:
            raise ValueError(
                f"{max(map(len, self.seen))} outcomes are known of a position, a refit takes {self.least}: watch more "
                "rounds."
            )
        chosen, before, after = [], [], []
        candidates = sorted(GRID, key=lambda t: abs(math.log(t)))
        for seen, old in zip(self.seen, self.applied.temperatures, strict=True):
            if len(seen) < self.least:
                chosen.append(old)
                continue
            values = torch.tensor(list(seen), dtype=torch.float64)
            confidences, passed = values.unbind(1)
            logits = torch.logit(confidences, eps=1e-9) * old
            errors = {t: expected_calibration_error(torch.sigmoid(logits / t), passed) for t in candidates}
            best = min(candidates, key=errors.__getitem__)
            chosen.append(best)
            before.append(expected_calibration_error(confidences, passed))
            after.append(errors[best])
        found = ConfidenceCalibration(tuple(chosen), tuple(before), tuple(after), max(map(len, self.seen)))
        self._begin(found)
        return found


__all__ = ["OnlineCalibration"]
