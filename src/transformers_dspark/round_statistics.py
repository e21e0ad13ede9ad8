"""Running figures of many rounds, and their form for OpenMetrics. Plain numbers only."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

from .calibration import RunningCalibration
from .ceiling import CeilingWindow
from .telemetry import RoundRecord, tests


class RoundStatistics:
    """
    Figures of all rounds it is called with; give it to `generate` as `round_callback`, for as many calls as wanted.

    ```python
    >>> figures = RoundStatistics()
    >>> config = DSparkGenerationConfig(round_callback=figures)
    >>> print(figures.openmetrics())
    ```

    Its size does not grow with the rounds.

    Args:
        blocks (`int`): Latest blocks of the mean ceiling, and latest rounds of the table's error.
    """

    def __init__(self, blocks: int = 256) -> None:
        self.rounds = self.tokens = self.drafted = self.admitted = self.accepted = self.skipped = 0
        self.draft_seconds = self.verify_seconds = 0.0
        self.tested_by_position: list[int] = []
        self.passed_by_position: list[int] = []
        self.calibration: list[RunningCalibration] = []
        self.ceiling = CeilingWindow(blocks)
        self._delivered: deque[int] = deque(maxlen=blocks)  # tokens of the latest blocks
        self._errors: deque[float] = deque(maxlen=blocks)

    def __call__(self, record: RoundRecord) -> None:
        self.rounds += 1
        self.tokens += sum(record.committed)
        self.drafted += sum(record.drafted)
        self.admitted += record.budget
        self.accepted += sum(record.accepted)
        self.skipped += record.drafted.count(0)
        self.draft_seconds += record.draft_seconds
        self.verify_seconds += record.verify_seconds
        self.ceiling.add(record)
        if record.predicted_verify_seconds is not None:
            self._errors.append(abs(record.predicted_verify_seconds / record.verify_seconds - 1))
        columns = record.drafted, record.admitted, record.accepted, record.committed, record.confidences
        for drafted, admitted, accepted, committed, confidences in zip(*columns, strict=True):
            if drafted:
                self._delivered.append(committed)
                self._add_block(tests(admitted, accepted, committed), admitted, accepted, committed, confidences)

    def _add_block(self, tested: int, admitted: int, accepted: int, committed: int, confidences: list[float]) -> None:
        for _ in range(admitted - len(self.tested_by_position)):
            self.tested_by_position.append(0)
            self.passed_by_position.append(0)
            self.calibration.append(RunningCalibration())
        for k in range(tested):
            self.tested_by_position[k] += 1
            self.passed_by_position[k] += k < accepted
        survival = 1.0
        # a text that ended with an accepted token says nothing of those behind it
        known = admitted if accepted < committed else accepted
        for k, confidence in enumerate(confidences[:known]):
            survival *= confidence
            self.calibration[k].add(survival, k < accepted)

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Conditional acceptance of each position; `None` where nothing came to a test."""
        pairs = zip(self.passed_by_position, self.tested_by_position, strict=True)
        return [passed / tested if tested else None for passed, tested in pairs]

    @property
    def utilisation(self) -> tuple[float, float] | None:
        """Delivered tokens over the ceiling, both of the latest blocks: bounds by those of the ceiling."""
        bounds = self.ceiling.bounds
        if bounds is None:
            return None
        delivered = statistics.fmean(self._delivered)
        return delivered / bounds[1], delivered / bounds[0]

    @property
    def draft_share(self) -> float | None:
        """Of the time of all rounds, the share spent drafting."""
        total = self.draft_seconds + self.verify_seconds
        return self.draft_seconds / total if total else None

    @property
    def step_cost_error(self) -> float | None:
        """Median relative error of predicted verification times over the latest rounds."""
        return statistics.median(self._errors) if self._errors else None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain numbers, ready for JSON."""
        names = ("rounds", "tokens", "drafted", "admitted", "accepted", "skipped", "draft_seconds", "verify_seconds")
        derived = ("acceptance_by_position", "utilisation", "draft_share", "step_cost_error")
        return {
            **{name: getattr(self, name) for name in (*names, *derived)},
            "ceiling": self.ceiling.bounds,
            "calibration": [position.to_dict() for position in self.calibration],
        }

    def openmetrics(self) -> str:
        """The figures as OpenMetrics text."""
        return "".join(self._lines()) + "# EOF\n"

    def _lines(self) -> Iterator[str]:
        for name, value, text in (
            ("rounds", self.rounds, "Rounds of the loop"),
            ("tokens", self.tokens, "Tokens committed in rounds"),
            ("drafted_tokens", self.drafted, "Tokens drafted"),
            ("admitted_tokens", self.admitted, "Drafted tokens admitted by the schedule"),
            ("accepted_tokens", self.accepted, "Drafted tokens accepted"),
            ("skipped_drafts", self.skipped, "Times that a row went without a draft"),
            ("draft_seconds", self.draft_seconds, "Time spent drafting"),
            ("verify_seconds", self.verify_seconds, "Time spent in verification"),
        ):
            yield from _family(name, "counter", text, [("", value)])
        ceiling = self.ceiling.bounds or (None, None)
        used = self.utilisation or (None, None)
        bounds = ('{bound="lower"}', '{bound="upper"}')
        yield from _family("ceiling", "gauge", "Mean acceptance ceiling in tokens", zip(bounds, ceiling, strict=True))
        yield from _family("utilisation", "gauge", "Delivered tokens by ceiling", zip(bounds, used, strict=True))
        yield from _family("step_cost_error", "gauge", "Median relative error", [("", self.step_cost_error)])
        shares = self.acceptance_by_position
        yield from _family("acceptance", "gauge", "Conditional acceptance", _by_position(shares))
        for name in ("error", "brier", "auc"):
            values = [getattr(position, name) for position in self.calibration]
            yield from _family(f"confidence_{name}", "gauge", f"Survival's {name}", _by_position(values))


def _by_position(values: list[Any]) -> list[tuple[str, Any]]:
    return [(f'{{position="{k}"}}', value) for k, value in enumerate(values, 1)]


def _family(name: str, kind: str, text: str, samples: Any) -> Iterator[str]:
    known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
    if not known:
        return
    yield f"# TYPE dspark_{name} {kind}\n"
    if name.endswith("_seconds"):
        yield f"# UNIT dspark_{name} seconds\n"
    yield f"# HELP dspark_{name} {text}.\n"
    for labels, value in known:
        yield f"dspark_{name}{'_total' if kind == 'counter' else ''}{labels} {value!r}\n"


__all__ = ["RoundStatistics"]
