"""Confidences of a drafter beside what became of its tokens, from real decoding in static mode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from ..calibration import ConfidenceCalibration, brier, expected_calibration_error, roc_auc
from ..telemetry import GenerationStats


def labelled_confidences(stats: GenerationStats, temperatures: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Raw confidence logits and outcomes of whole blocks.

    The last round of a text is left out, where its end and not the drafter may have cut the block.

    Args:
        stats (`GenerationStats`): Of calls in static mode.
        temperatures (`Sequence[float]`): Those that were applied to the confidences, one for each drafted token.

    Returns:
        Logits `(n, gamma)` in float64, and 1 where a token passed, `(n, gamma)`.
    """
    gamma = len(temperatures)
    confidences, passed = [], []
    for values, sent, committed in zip(stats.confidences, stats.verify_lengths, stats.accepted_lengths, strict=True):
        start = 0
        for width, count in zip(sent[:-1], committed[:-1], strict=True):
            if width == gamma:
                confidences.append(values[start : start + width].tolist())
                passed.append([int(k < count - 1) for k in range(gamma)])
            start += width
    logits = torch.logit(torch.tensor(confidences, dtype=torch.float64).view(-1, gamma), eps=1e-9)
    return logits * torch.tensor(temperatures, dtype=torch.float64), torch.tensor(passed).view(-1, gamma)


def calibration_figures(
    logits: torch.Tensor, passed: torch.Tensor, before: Sequence[float], after: Sequence[float]
) -> list[dict[str, float]]:
    """
    For each position, how well the survival predicts that a token and all before it pass, under two sets of
    temperatures: calibration error, Brier score and area under the ROC curve.

    Args:
        logits, passed (shape `(n, gamma)`): See [`labelled_confidences`].
        before, after (`Sequence[float]`): Temperatures.
    """
    figures: list[dict[str, float]] = []
    survived = (passed > 0).long().cumprod(dim=1)
    survivals = {
        name: ConfidenceCalibration(list(temperatures)).apply(logits).cumprod(dim=1)
        for name, temperatures in (("before", before), ("after", after))
    }
    for k in range(logits.shape[1]):
        line = {"position": k + 1, "survived": float(survived[:, k].double().mean())}
        for name, survival in survivals.items():
            line[f"survival_{name}"] = float(survival[:, k].mean())
            line[f"error_{name}"] = expected_calibration_error(survival[:, k], survived[:, k])
            line[f"brier_{name}"] = brier(survival[:, k], survived[:, k])
            line[f"auc_{name}"] = roc_auc(survival[:, k], survived[:, k])
        figures.append(line)
    return figures


def means(figures: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Each of [`calibration_figures`] over all positions; `None` where a position has none."""
    names = [name for name in figures[0] if name != "position"]
    found = {name: statistics.fmean(line[name] for line in figures) for name in names}
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def reliability(
    logits: torch.Tensor, passed: torch.Tensor, before: Sequence[float], after: Sequence[float], bins: int = 10
) -> list[dict[str, list[tuple[int, float, float]]]]:
    """
    For each position and both sets of temperatures, the points of a reliability diagram: for each of `bins` equal
    steps of predicted survival the number of tokens, their mean prediction and the share that survived.

    Args:
        logits, passed (shape `(n, gamma)`): See [`labelled_confidences`].
        before, after (`Sequence[float]`): Temperatures.
    """
    survived = (passed > 0).long().cumprod(dim=1).double()
    found: list[dict[str, list[tuple[int, float, float]]]] = [{} for _ in range(logits.shape[1])]
    for name, temperatures in (("before", before), ("after", after)):
        survival = ConfidenceCalibration(list(temperatures)).apply(logits).cumprod(dim=1)
        places = (survival * bins).long().clamp(max=bins - 1)
        for k, line in enumerate(found):
            points = []
            for step in range(bins):
                here = places[:, k] == step
                means = [float(x[here, k].mean()) if here.any() else 0.0 for x in (survival, survived)]
                points.append((int(here.sum()), means[0], means[1]))
            line[f"reliability_{name}"] = points
    return found


__all__ = ["calibration_figures", "labelled_confidences", "means", "reliability"]
