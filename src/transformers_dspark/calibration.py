"""Confidences that mean what they say: temperatures of the confidence head, how they are found and judged.

Pure functions of logits and outcomes, and the file in which temperatures travel.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


BINS = 20
FEW = 100  # outcomes below which the share that passes is uncertain by up to 5 % and more
# Temperatures that a fit tries: 1/8 to 8 in steps of 4 %.
GRID = tuple(math.exp(i / 25) for i in range(-52, 53))


@dataclass(frozen=True)
class ConfidenceCalibration:
    """
    One temperature per drafted token, which divides the logit of its confidence. The order of confidences at a
    position stays; their level comes to match the share of tokens accepted.

    Args:
        temperatures (`Sequence[float]`): One for each drafted token of a block, finite and above 0.
        error_before, error_after (`Sequence[float]`): Expected calibration error of the survival at each position, as
            far as measured, without temperatures and with them.
        samples (`int`): Blocks they were fitted on; 0 if not known.
        reached (`Sequence[int]`): Of these, those that say something about each position: whose earlier tokens all
            passed. Empty if not known.

    Raises:
        ValueError: a temperature out of range, or none at all.

    Source: DSpark paper, sequential temperature scaling.
    """

    temperatures: Sequence[float]
    error_before: Sequence[float] = ()
    error_after: Sequence[float] = ()
    samples: int = 0
    reached: Sequence[int] = ()

    def __post_init__(self) -> None:
        given = self.temperatures
        if not isinstance(given, (list, tuple)) or not given or not all(map(_is_temperature, given)):
            raise ValueError(
                f"temperatures={given!r} must be finite numbers above 0, one for each drafted token of a block."
            )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Calibrated confidences.

        Args:
            logits (`torch.FloatTensor` of shape `(..., width)`): Of the confidence head at a block's first positions.

        Returns:
            `torch.FloatTensor` of shape `(..., width)`: In 0..1.

        Raises:
            ValueError: more positions than temperatures.
        """
        width = logits.shape[-1]
        if width > len(self.temperatures):
            raise ValueError(f"{width} confidence logits in a row, but {len(self.temperatures)} temperatures.")
        return torch.sigmoid(logits / logits.new_tensor(self.temperatures[:width]))

    @property
    def uncertain(self) -> list[int]:
        """Positions, from 1, whose temperature is known to stand on fewer than `FEW` outcomes."""
        return [k for k, count in enumerate(self.reached, 1) if count < FEW]

    def store_in(self, config: Any) -> None:
        """
        Makes a drafter use these temperatures from now on, and keep them when it is saved.

        Args:
            config ([`DSparkConfig`]): Configuration of the drafter.

        Raises:
            ValueError: the drafter has no confidence head, or drafts another number of tokens.
        """
        if not config.enable_confidence_head:
            raise ValueError("Temperatures are of no use to a drafter without a confidence head: leave them out.")
        if len(self.temperatures) != config.num_draft_tokens:
            raise ValueError(
                f"{len(self.temperatures)} temperatures do not fit a drafter of {config.num_draft_tokens} tokens a "
                "block: use those that were fitted for it."
            )
        config.confidence_temperatures = [float(t) for t in self.temperatures]

    @classmethod
    def of(cls, config: Any) -> ConfidenceCalibration:
        """The temperatures that a drafter's configuration holds, all 1 if it holds none."""
        return cls(config.confidence_temperatures or [1.0] * config.num_draft_tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, made or replaced."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ConfidenceCalibration:
        """
        Reads temperatures from a file of [`~ConfidenceCalibration.save`], of SGLang or from a drafter's `config.json`.

        Raises:
            ValueError: it holds no temperatures, or wrong ones.
            OSError: it cannot be read.

        Source: SGLang, `DSparkStsCalibration`.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, Mapping):
                raise ValueError("it holds no object")
            given = values.get("temperatures", values.get("confidence_temperatures"))
            return cls(
                temperatures=given,
                error_before=values.get("error_before", values.get("ece_before", ())),
                error_after=values.get("error_after", values.get("ece_after", ())),
                samples=values.get("samples", values.get("num_samples", 0)),
                reached=values.get("reached", ()),
            )
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: no usable temperatures of confidences: {error}") from error

    @classmethod
    def fit(
        cls,
        confidence_logits: torch.Tensor,
        accepted: torch.Tensor,
        grid: Sequence[float] = GRID,
        bins: int = BINS,
    ) -> ConfidenceCalibration:
        """
        Finds temperatures position by position from the left: with the earlier ones fixed, each is the one of `grid`
        under which the survival up to its position has the least calibration error; of equals the one nearest to 1.

        Args:
            confidence_logits (`torch.FloatTensor` of shape `(n, gamma)`): Of held-out blocks.
            accepted (`torch.Tensor` of shape `(n, gamma)`): 1 where a token passed, 0 where it failed. What stands
                behind a block's first failure does not matter.
            grid (`Sequence[float]`): Temperatures to try.
            bins (`int`): Bins of the calibration error.

        Raises:
            ValueError: shapes that differ, no blocks, or logits that are not finite.

        Source: DSpark paper, sequential temperature scaling.
        """
        if confidence_logits.shape != accepted.shape or confidence_logits.dim() != 2 or not accepted.numel():
            raise ValueError(
                f"confidence_logits of shape {tuple(confidence_logits.shape)} and accepted of shape "
                f"{tuple(accepted.shape)} must have the same shape, (blocks, drafted tokens), with one block or more."
            )
        logits = confidence_logits.double()
        if not bool(logits.isfinite().all()):
            raise ValueError("confidence_logits must be finite: leave blocks with NaN or inf out.")
        survived = (accepted > 0).long().cumprod(dim=1)  # [n, gamma]
        candidates = sorted(grid, key=lambda t: abs(math.log(t)))  # `min` takes the first of equals
        before, after, chosen = [], [], []
        raw = calibrated = torch.ones_like(logits[:, 0])
        for k in range(logits.shape[1]):
            raw = raw * torch.sigmoid(logits[:, k])
            before.append(expected_calibration_error(raw, survived[:, k], bins))
            errors = {
                t: expected_calibration_error(calibrated * torch.sigmoid(logits[:, k] / t), survived[:, k], bins)
                for t in candidates
            }
            best = min(candidates, key=errors.__getitem__)
            calibrated = calibrated * torch.sigmoid(logits[:, k] / best)
            chosen.append(best)
            after.append(errors[best])
        reached = [len(logits), *survived[:, :-1].sum(dim=0).tolist()]
        return cls(tuple(chosen), tuple(before), tuple(after), len(logits), tuple(reached))


def expected_calibration_error(probabilities: torch.Tensor, outcomes: torch.Tensor, bins: int = BINS) -> float:
    """
    Mean distance of probability and outcome over bins of equal width, weighted by what they hold.

    Args:
        probabilities (`torch.Tensor` of shape `(n,)`): In 0..1.
        outcomes (`torch.Tensor` of shape `(n,)`): 0 or 1.
        bins (`int`): Number of bins.

    Source: Naeini et al. 2015.
    """
    probabilities = probabilities.double()
    place = (probabilities * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=probabilities.device)
    gaps.scatter_add_(0, place, probabilities - outcomes.double())
    return float(gaps.abs().sum()) / max(1, len(probabilities))


def brier(probabilities: torch.Tensor, outcomes: torch.Tensor) -> float:
    """Mean squared distance of probabilities in 0..1 and outcomes 0 or 1, both of shape `(n,)`."""
    return float((probabilities.double() - outcomes.double()).square().mean())


def roc_auc(scores: torch.Tensor, outcomes: torch.Tensor) -> float:
    """
    Probability that a positive outcome has a greater score than a negative one, ties counting half.

    Args:
        scores (`torch.Tensor` of shape `(n,)`): Any numbers.
        outcomes (`torch.Tensor` of shape `(n,)`): 0 or 1.

    Returns:
        `float`: In 0..1; NaN if all outcomes are equal.
    """
    positive = outcomes > 0
    count = int(positive.sum())
    if count in (0, len(outcomes)):
        return math.nan
    ordered, counts = scores.double().unique(return_counts=True)
    ranks = counts.cumsum(dim=0) - (counts - 1) / 2  # from 1; the mean one where scores are equal
    held = ranks[torch.searchsorted(ordered, scores.double().contiguous())]
    return (float(held[positive].sum()) - count * (count + 1) / 2) / (count * (len(outcomes) - count))


class RunningCalibration:
    """
    The same three measures over a stream of probabilities and outcomes, in constant room. Error and Brier score are
    exact; the area takes probabilities within one of `FINE` bins as equal.
    """

    FINE = 1000

    def __init__(self) -> None:
        self.count = 0
        self._squares = 0.0
        self._gaps = [0.0] * BINS
        self._failed, self._passed = [0] * self.FINE, [0] * self.FINE

    def add(self, probability: float, outcome: bool) -> None:
        """Takes a probability in 0..1 and what came of it."""
        gap = probability - outcome
        self.count += 1
        self._squares += gap * gap
        self._gaps[min(int(probability * BINS), BINS - 1)] += gap
        (self._passed if outcome else self._failed)[min(int(probability * self.FINE), self.FINE - 1)] += 1

    @property
    def error(self) -> float:
        """Expected calibration error; NaN before the first outcome."""
        return sum(map(abs, self._gaps)) / self.count if self.count else math.nan

    @property
    def brier(self) -> float:
        """Mean squared distance; NaN before the first outcome."""
        return self._squares / self.count if self.count else math.nan

    @property
    def auc(self) -> float:
        """Area under the ROC curve; NaN if all outcomes are equal."""
        below, area = 0, 0.0
        for failed, passed in zip(self._failed, self._passed, strict=True):
            area += passed * (below + failed / 2)
            below += failed
        pairs = below * (self.count - below)
        return area / pairs if pairs else math.nan

    def to_dict(self) -> dict[str, float | None]:
        """Count and measures, `None` where one is not defined."""
        values = {"error": self.error, "brier": self.brier, "auc": self.auc}
        known = {name: None if math.isnan(value) else value for name, value in values.items()}
        return {"count": self.count, **known}


def _is_temperature(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


__all__ = ["ConfidenceCalibration", "RunningCalibration", "brier", "expected_calibration_error", "roc_auc"]
