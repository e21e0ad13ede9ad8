"""Measured seconds of a target step: what verification costs on one machine, and how that is read and kept."""

from __future__ import annotations

import copy
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from .drift import SHARE, Drift
from .environment import environment
from .modeling_dspark import DSparkDrafter
from .profiling import time_drafts, time_steps


FORMAT = "dspark-step-costs"
UNSTABLE = 0.2  # relative spread of a cell's samples from which a table says that it is not to be trusted

LEAST, MOST = 1e-9, 1e9  # seconds; between them no sum, ratio or slope leaves the range of float64


@dataclass(frozen=True)
class StepCost:
    """
    A measured target step.

    Args:
        rows (`int`): Rows in the step.
        tokens (`int`): Packed tokens: anchors and drafts of all rows.
        context (`int`): Cache entries of a row before the step, on average.
        seconds (`float`): Median of the samples.
        spread (`float`): Difference of the samples' quartiles over the median.
    """

    rows: int
    tokens: int
    context: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class DraftCost:
    """
    A measured draft of one block.

    Args:
        rows (`int`): Rows that draft.
        seconds (`float`): Median of the samples.
        spread (`float`): As for [`StepCost`].
    """

    rows: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class StepCostTable:
    """
    Seconds of a target step by rows, packed tokens and context, measured on one machine.

    Between measured points it interpolates linearly, beyond the last one it continues the last slope. Where one row
    count was measured over fewer tokens than the next, its curve follows the shape of its neighbour's.

    Args:
        steps (`Sequence[StepCost]`): Measured steps, at least one.
        drafts (`Sequence[DraftCost]`): Measured drafts; none if they are not known.
        staircase (`bool`): Totals round up to a measured one, as captured graphs make them do.
        target (`Mapping[str, Any]`): Whose steps these are: `id`, `model_type`, sizes, `dtype` and `device`. Empty if
            not known.
        measured (`Mapping[str, Any]`): When, on which machine and with which versions.

    Attributes:
        drift (`Drift`): What [`~StepCostTable.refreshed`] has learned since. It is part of no file.

    Raises:
        ValueError: no steps, two measurements of the same, counts below 1, or seconds of no step that there can be.
    """

    steps: Sequence[StepCost]
    drafts: Sequence[DraftCost] = ()
    staircase: bool = False
    target: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    drift: Drift = field(default=Drift(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("A table of step costs needs at least one measured step.")
        for cost in self._costs:
            counts = cost.rows, getattr(cost, "tokens", 1), getattr(cost, "context", 0) + 1
            if not all(isinstance(n, numbers.Integral) and 1 <= int(n) < 2**31 for n in counts):
                raise ValueError(f"{cost}: rows and tokens must be whole numbers from 1 on, context one from 0 on.")
            if not (LEAST <= cost.seconds <= MOST and 0 <= cost.spread < math.inf):
                raise ValueError(
                    f"{cost}: seconds must be in {LEAST:g}..{MOST:g}, the spread finite and not negative."
                )
        if len({(cost.rows, cost.tokens, cost.context) for cost in self.steps}) < len(self.steps):
            raise ValueError("A table of step costs takes one step for each number of rows, tokens and context.")
        if len({cost.rows for cost in self.drafts}) < len(self.drafts):
            raise ValueError("A table of step costs takes one draft for each number of rows.")

    def predict(self, rows: int, tokens: Any, context: float) -> Any:
        """
        Seconds of a target step.

        Args:
            rows (`int`): Rows in the step.
            tokens (`int` or `np.ndarray`): Packed tokens, one number or many.
            context (`float`): Cache entries of a row before the step, on average.

        Returns:
            `float`, or a float64 `np.ndarray` of the shape of `tokens`.
        """
        total = self._computed(tokens)
        low, high, weight = _bracket(self._contexts, context, beyond=True)
        seconds = self._sheets[low].read(rows, total)
        if high != low:  # a longer context is never cheaper; noise may say otherwise
            longer = self._sheets[high].read(rows, total)
            seconds = seconds + weight * np.maximum(longer - seconds, 0.0)
        seconds = seconds * np.exp(self.drift.at(self._nearest(rows), total))
        seconds = np.minimum(np.maximum(seconds, LEAST), MOST)
        return float(seconds) if np.ndim(tokens) == 0 else seconds

    def curve(self, rows: int, drafts: int, context: float) -> np.ndarray:
        """
        Seconds of a step with 0, 1, ... drafted tokens beside the rows' anchors, as the schedulers take them.

        Args:
            rows (`int`): Rows in the step.
            drafts (`int`): Most drafted tokens over all rows.
            context (`float`): Cache entries of a row before the step, on average.

        Returns:
            `np.ndarray` of shape `(drafts + 1,)`, float64.
        """
        return self.predict(rows, rows + np.arange(drafts + 1), context)

    def draft_curve(self, rows: int) -> np.ndarray:
        """
        Seconds of a draft for 0, 1, ..., `rows` rows; zeros if drafts were not measured.

        Returns:
            `np.ndarray` of shape `(rows + 1,)`, float64.
        """
        seconds = np.zeros(rows + 1)
        if self.drafts:
            measured = sorted((cost.rows, cost.seconds) for cost in self.drafts)
            xs, ys = np.array(measured, dtype=np.float64).T
            seconds[1:] = _read(xs, ys, np.arange(1.0, rows + 1))
        return seconds

    @classmethod
    def profile(
        cls,
        target: PreTrainedModel,
        drafter: DSparkDrafter | None = None,
        *,
        rows: Sequence[int] = (1, 4, 16),
        tokens_per_row: Sequence[int] = (1, 2, 4, 8),
        context: Sequence[int] = (64, 512),
        samples: int = 7,
        block: int = 0,
        command: Sequence[str] = (),
        progress: Callable[[], None] = lambda: None,
    ) -> StepCostTable:
        """
        Measures a target, and a drafter's blocks, on this machine.

        Args:
            target (`PreTrainedModel`): On the device and in the dtype that will be used.
            drafter (`DSparkDrafter`, *optional*): Its drafter; it is bound to the target.
            rows, tokens_per_row, context (`Sequence[int]`): Every combination is measured. One token a row is the
                plain step, against which drafting is judged.
            samples (`int`): Timed forwards of each combination; their median counts.
            block (`int`): Drafted tokens of a block: measures every total that captured rounds of such blocks have,
                too. Between them the cost of a step is no straight line.
            command (`Sequence[str]`): The words that asked for it, for the record.
            progress (`Callable`): Called after each combination.

        Raises:
            ValueError: a number below 1, more positions than the target knows, or a drafter of another target.
        """

        def summary(seconds: list[float]) -> tuple[float, float]:
            low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
            progress()
            return float(median), float((high - low) / median)

        rows, tokens_per_row, context = (sorted(set(counts)) for counts in (rows, tokens_per_row, context))
        drafts, steps = [], []
        if drafter is not None:
            middle = sorted(context)[len(context) // 2]
            for count, seconds in time_drafts(target, drafter, rows, middle, samples):
                drafts.append(DraftCost(count, *summary(seconds)))
        for count, tokens, length, seconds in time_steps(target, rows, tokens_per_row, context, samples, block):
            steps.append(StepCost(count, tokens, length, *summary(seconds)))
        return cls(
            steps=tuple(steps),
            drafts=tuple(drafts),
            target=target_facts(target),
            measured=environment(target.device, command),
        )

    @property
    def unstable(self) -> list[StepCost | DraftCost]:
        """Measurements whose samples differ so much that the machine was busy with something else."""
        return [cost for cost in self._costs if cost.spread > UNSTABLE]

    def refreshed(self, rows: int, tokens: int, context: float, seconds: float) -> StepCostTable:
        """
        This table after one more measured step.

        Machines are shared, and what was measured once drifts: of what differs from expectation, the whole table takes
        over a share and the very total a smaller one, which adds up over the rounds that send as much. No single
        measurement counts for more than a factor of two. The measured points themselves stay as they are. It costs
        little enough to be called every round.

        Args:
            rows, tokens, context: Of the step, as for [`~StepCostTable.predict`].
            seconds (`float`): What it took, above 0.
        """
        surprise = _surprise(seconds, self.predict(rows, tokens, context))
        nearest, total = self._nearest(rows), float(self._computed(tokens))
        return self._with(drift=self.drift.after(nearest, total, surprise, self._totals[nearest]))

    def refreshed_draft(self, rows: int, seconds: float) -> StepCostTable:
        """This table after one more measured draft for `rows` rows; the first one is taken as it is."""
        if not self.drafts:
            return self._with(drafts=(DraftCost(rows, seconds),))
        factor = math.exp(_surprise(seconds, self.draft_curve(rows)[-1]) * SHARE)
        return self._with(drafts=tuple(_slower(cost, factor) for cost in self.drafts))

    def _with(self, **fields: Any) -> StepCostTable:
        """A copy with other values in some fields. What was derived of the steps stays, since they do."""
        changed = copy.copy(self)
        vars(changed).update(fields)
        return changed

    def check_target(self, target: PreTrainedModel) -> None:
        """
        Refuses a table that was measured for another target.

        Compared are the last part of the name, the sizes, the dtype and the kind of device, as far as both are known.

        Raises:
            ValueError: they differ.
        """
        actual = target_facts(target)
        wrong = [
            f"{name} {self.target[name]!r}, not {actual[name]!r}"
            for name in actual
            if self.target.get(name) and actual[name] and _comparable(self.target[name]) != _comparable(actual[name])
        ]
        if wrong:
            raise ValueError(
                f"The table of step costs is for another target: it has {', '.join(wrong)}; measure this target with "
                "`dspark profile`."
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings and lists, ready for JSON."""
        return {
            "format": FORMAT,
            "target": dict(self.target),
            "staircase": self.staircase,
            "unstable": len(self.unstable),
            "measured": dict(self.measured),
            "steps": [asdict(cost) for cost in self.steps],
            "drafts": [asdict(cost) for cost in self.drafts],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table to a JSON file, made or replaced."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> StepCostTable:
        """
        Reads a table that [`~StepCostTable.save`] wrote, or one of SGLang's two forms.

        Args:
            source (`str`, `os.PathLike` or `Mapping`): The JSON file, or what it holds.

        Raises:
            ValueError: it holds no table of step costs.
            OSError: it cannot be read.

        Source: SGLang, `SpsAdditiveCostTable` (seconds = bias + alpha(rows) + theta(rows + drafts)) and `SpsCostTable`
        (steps per second by packed tokens); both know neither context nor target.
        """
        try:
            values = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
            if "bias_seconds" in values:
                return cls(_additive(values))
            if "sample_batch_tokens" in values:
                probes = _axis(values, "sample_batch_tokens", "sample_steps_per_sec")
                return cls(tuple(StepCost(1, tokens, 0, 1.0 / rate) for tokens, rate in probes))
            if values.get("format") != FORMAT:
                raise ValueError(f"its format is {values.get('format')!r}, not {FORMAT!r}")
            return cls(
                steps=tuple(StepCost(**cost) for cost in values["steps"]),
                drafts=tuple(DraftCost(**cost) for cost in values["drafts"]),
                staircase=bool(values["staircase"]),
                target=dict(values["target"]),
                measured=dict(values["measured"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError) as error:
            raise ValueError(
                f"{str(source)[:200]} is no table of step costs ({type(error).__name__}: {error}); write one with "
                "`dspark profile`."
            ) from error

    def _computed(self, tokens: Any) -> np.ndarray:
        """Tokens that a step over these computes: on a staircase up to the next tier."""
        total, tiers = np.asarray(tokens, dtype=np.float64), self._tiers
        if not self.staircase:
            return total
        return np.where(total > tiers[-1], total, tiers[np.minimum(tiers.searchsorted(total), len(tiers) - 1)])

    @property
    def _costs(self) -> list[StepCost | DraftCost]:
        return [*self.steps, *self.drafts]

    @cached_property
    def _contexts(self) -> np.ndarray:
        return np.array(sorted({cost.context for cost in self.steps}), dtype=np.float64)

    @cached_property
    def _sheets(self) -> list[_Sheet]:
        return [_Sheet([cost for cost in self.steps if cost.context == context]) for context in self._contexts]

    @cached_property
    def _tiers(self) -> np.ndarray:
        return np.array(sorted({cost.tokens for cost in self.steps}), dtype=np.float64)

    @cached_property
    def _totals(self) -> dict[int, np.ndarray]:
        """Measured totals by row count."""
        found: dict[int, set[int]] = {}
        for cost in self.steps:
            found.setdefault(cost.rows, set()).add(cost.tokens)
        return {rows: np.array(sorted(totals), dtype=np.float64) for rows, totals in found.items()}

    def _nearest(self, rows: int) -> int:
        """The measured row count that is nearest in proportion."""
        return min(self._totals, key=lambda measured: max(rows / measured, measured / rows))


class _Sheet:
    """
    The steps of one context on a grid of rows and tokens, with its gaps filled: `seconds[rows, tokens]`.

    Row counts are measured over different totals. Below its first and beyond its last total, a curve keeps the ratio
    to its neighbour's curve.
    """

    def __init__(self, steps: Sequence[StepCost]) -> None:
        measured: dict[int, dict[int, float]] = {}
        for cost in steps:
            measured.setdefault(cost.rows, {})[cost.tokens] = cost.seconds
        self.rows = np.array(sorted(measured), dtype=np.float64)
        self.tokens = np.array(sorted({cost.tokens for cost in steps}), dtype=np.float64)
        curves = [
            (np.array(sorted(measured[rows]), dtype=np.float64), [measured[rows][n] for n in sorted(measured[rows])])
            for rows in sorted(measured)
        ]
        self.seconds = np.stack([np.interp(self.tokens, xs, ys) for xs, ys in curves])
        self.seconds[-1] = _read(*curves[-1], self.tokens)
        ends = [self.tokens.searchsorted((xs[0], xs[-1])) for xs, _ in curves]
        for i in range(1, len(curves)):
            first = ends[i][0]
            below = self.seconds[i - 1]
            self.seconds[i, :first] *= below[:first] / below[first]
        for i in range(len(curves) - 2, -1, -1):
            last = ends[i][1]
            above = self.seconds[i + 1]
            self.seconds[i, last:] *= above[last:] / above[last]

    def read(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        low, high, weight = _bracket(self.rows, rows, beyond=False)
        seconds = _read(self.tokens, self.seconds[high if weight == 1 else low], tokens)
        if 0 < weight < 1:
            seconds = (1 - weight) * seconds + weight * _read(self.tokens, self.seconds[high], tokens)
        return seconds


def _read(xs: np.ndarray, ys: Any, x: np.ndarray) -> np.ndarray:
    """Linear interpolation; the first value below the points, and the last slope, if it rises, beyond them."""
    read = np.interp(x, xs, ys)
    if len(xs) > 1 and np.max(x) > xs[-1]:
        read = read + max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) * np.maximum(x - xs[-1], 0.0)
    return read


def _bracket(points: np.ndarray, x: float, beyond: bool) -> tuple[int, int, float]:
    """The two points around x and how far x is from the first to the second; more than 1 only if `beyond` allows."""
    if len(points) == 1 or x <= points[0]:
        return 0, 0, 0.0
    high = min(int(points.searchsorted(x)), len(points) - 1)
    weight = float((x - points[high - 1]) / (points[high] - points[high - 1]))
    return high - 1, high, weight if beyond else min(weight, 1.0)


def _slower(cost: DraftCost, factor: float) -> DraftCost:
    return replace(cost, seconds=min(max(cost.seconds * factor, LEAST), MOST))


def _surprise(seconds: float, expected: float) -> float:
    """Logarithm of measured over expected seconds, at most that of two."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} must be finite and above 0.")
    return max(-math.log(2), min(math.log(2), math.log(seconds / expected)))


def _axis(values: Mapping[str, Any], probes: str, results: str) -> list[tuple[int, float]]:
    xs, ys = values[probes], values[results]
    if len(xs) != len(ys) or not xs or any(b <= a for a, b in pairwise(xs)):
        raise ValueError(f"{probes} must rise, with one entry of {results} each")
    return [(int(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def _additive(values: Mapping[str, Any]) -> tuple[StepCost, ...]:
    """The sum of two curves, on the grid of their points: between these, linear interpolation gives the sum again."""
    by_rows = _axis(values, "bs_probes", "alpha_seconds")
    by_tokens = _axis(values, "m_probes", "theta_seconds")
    bias = float(values["bias_seconds"])
    return tuple(StepCost(rows, tokens, 0, bias + a + t) for rows, a in by_rows for tokens, t in by_tokens)


def target_facts(target: PreTrainedModel) -> dict[str, Any]:
    """What the seconds of a target's step depend on, apart from the machine."""
    config = target.config.get_text_config(decoder=True)
    sizes = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    name = str(getattr(target.config, "name_or_path", "") or "")
    return {
        "id": Path(name).name if Path(name).is_dir() else name,  # a file of figures names no folders of a machine
        **{name: getattr(config, name, None) for name in sizes},
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
    }


def _comparable(value: Any) -> Any:
    """A name without the folder or owner before it: the same model may lie anywhere."""
    return Path(value).name.lower() if isinstance(value, str) else value


__all__ = ["DraftCost", "StepCost", "StepCostTable", "target_facts"]
