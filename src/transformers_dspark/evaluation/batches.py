"""The batched loop beside plain batched `generate`, over the same prompts, in turn: how fast, and where time goes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..step_costs import StepCostTable
from .forward_clock import ForwardClock
from .runs import Pair


# What can be measured beside plain `generate`, and its options of drafting; "compact" needs a table of step costs.
MODES: dict[str, dict[str, Any]] = {
    "static": {"verify_mode": "static"},
    "compact": {"verify_mode": "compact"},
    "causal": {"verify_mode": "compact", "scheduler": "causal"},
}


@dataclass(frozen=True)
class Timed:
    """One generation: wall seconds, those inside the target and the drafter, and what `generate` returned."""

    seconds: float
    target_seconds: float
    drafter_seconds: float
    output: Any


def alternate(
    pair: Pair,
    prompts: Sequence[str],
    sides: Mapping[str, Mapping[str, Any] | None],
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, list[Timed]]:
    """
    Generates greedily with every side in turn, so that a machine whose speed drifts favours none.

    Args:
        pair (`Pair`): Target and drafter.
        prompts (`Sequence[str]`): First user turns, one a row.
        sides (`Mapping`): Name to options of drafting, `None` being plain `generate`.
        max_new_tokens, repeats (`int`): Of every generation, and of every side; a short warm-up is not counted.
        progress (`Callable`): Called after every counted generation.
    """
    inputs = pair.batch(prompts)

    def once(options: Mapping[str, Any] | None, tokens: int) -> Timed:
        config = pair.config(tokens, **({} if options is None else {"dspark_loop": "batched", **options}))
        assistant = {} if options is None else {"assistant_model": pair.drafter}
        with ForwardClock(pair.target, pair.drafter) as clock:
            start = time.perf_counter()
            output = pair.target.generate(**inputs, generation_config=config, **assistant)
            output.sequences.cpu()  # waits for the device
            return Timed(time.perf_counter() - start, clock.target, clock.drafter, output)

    for options in sides.values():
        once(options, min(8, max_new_tokens))
    runs: dict[str, list[Timed]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, options in sides.items():
            runs[side].append(once(options, max_new_tokens))
            progress()
    return runs


def compare(
    pair: Pair,
    prompts: Sequence[str],
    modes: Sequence[str],
    table: StepCostTable | None,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """
    Plain `generate` and the loop in `modes` over the same rows: medians, as plain numbers.

    Args:
        modes (`Sequence[str]`): Names of `MODES`.
        table (`StepCostTable`, *optional*): For the modes that schedule.
    """
    costs: dict[str, Any] = {"step_cost_table": table} if table else {"step_cost_table": False}
    sides = {"plain": None, **{mode: {**costs, **MODES[mode]} for mode in modes}}
    runs = alternate(pair, prompts, sides, max_new_tokens, repeats, progress)
    plain = runs["plain"][0].output.sequences
    prompt = pair.batch(prompts)["input_ids"].shape[1]
    new = sum(map(len, pair.new_ids(plain, prompt)))
    seconds = {side: statistics.median(run.seconds for run in found) for side, found in runs.items()}
    return {
        "rows": len(prompts),
        "tokens": new,
        "plain_tokens_per_second": new / seconds["plain"],
        "modes": {mode: _figures(runs[mode], plain, new, seconds[mode], seconds["plain"]) for mode in modes},
    }


def _figures(runs: Sequence[Timed], plain: torch.Tensor, new: int, seconds: float, alone: float) -> dict[str, Any]:
    stats = runs[-1].output.dspark
    sent = Counter(length for row in stats.verify_lengths for length in row)
    rounds = max(1, stats.rounds)
    return {
        "tokens_per_second": new / seconds,
        "speed_up": alone / seconds,
        "accepted_length": stats.mean_accepted_length,
        "acceptance_by_position": stats.acceptance_by_position,
        "rounds": stats.rounds,
        "verified_per_row_and_round": sum(k * n for k, n in sent.items()) / max(1, sent.total()),
        "verify_length_counts": [sent[k] for k in range(max(sent, default=0) + 1)],
        "draft_milliseconds_per_round": 1e3 * stats.draft_seconds / rounds,
        "verify_milliseconds_per_round": 1e3 * stats.verify_seconds / rounds,
        "overhead_share": statistics.median(1 - (r.target_seconds + r.drafter_seconds) / r.seconds for r in runs),
        "schedule": stats.schedule,
        "same_ids": all(run.output.sequences.equal(plain) for run in runs),
    }


__all__ = ["MODES", "Timed", "alternate", "compare"]
