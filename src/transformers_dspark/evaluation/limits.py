"""Measures what `verdict` judges: plain and drafted generation in turn, taken apart into the parts of a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .batches import Timed, alternate
from .runs import Pair
from .verdict import SpeedFigures


def measure(
    pair: Pair,
    prompts: Sequence[str],
    options: Mapping[str, Any],
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[], object] = lambda: None,
) -> SpeedFigures:
    """
    Generates greedily with and without the drafter in turn.

    Args:
        pair (`Pair`): Target and drafter.
        prompts (`Sequence[str]`): First user turns, one a row.
        options (`Mapping[str, Any]`): Options of drafting.
        max_new_tokens, repeats (`int`): Of every generation, and of each side.
        progress (`Callable`): Called after every generation.

    Raises:
        ValueError: the answers end before there is a round to measure.
    """
    device = pair.target.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # one token a row is the prefill alone: its time is in no round
    first = alternate(pair, prompts, {"plain": None}, 1, repeats)["plain"]
    runs = alternate(pair, prompts, {"plain": None, "drafted": options}, max_new_tokens, repeats, progress)
    stats = runs["drafted"][-1].output.dspark
    prompt = pair.batch(prompts)["input_ids"].shape[1]
    answers = pair.new_ids(runs["plain"][0].output.sequences, prompt)
    steps, tokens = max(map(len, answers)) - 1, sum(map(len, answers))
    sent = [length for row in stats.verify_lengths for length in row]
    if steps < 1 or not sent:
        raise ValueError(
            "The answers end with their first token, so there is no round to measure: give other prompts."
        )

    def median(found: Sequence[Timed], part: Callable[[Timed], float]) -> float:
        return statistics.median(map(part, found))

    prefill = median(first, lambda run: run.target_seconds)
    plain, drafted = runs["plain"], runs["drafted"]
    memory = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        memory = torch.cuda.max_memory_allocated(device) / total
    return SpeedFigures(
        rows=len(prompts),
        plain_tokens_per_second=tokens / median(plain, lambda run: run.seconds),
        drafted_tokens_per_second=tokens / median(drafted, lambda run: run.seconds),
        plain_step_seconds=max(0.0, median(plain, lambda run: run.target_seconds) - prefill) / steps,
        draft_seconds=median(drafted, lambda run: run.drafter_seconds) / stats.rounds,
        verify_seconds=max(0.0, median(drafted, lambda run: run.target_seconds) - prefill) / stats.rounds,
        host_seconds=median(drafted, lambda run: run.seconds - run.target_seconds - run.drafter_seconds)
        / stats.rounds,
        verify_length=sum(sent) / len(sent),
        accepted_length=stats.mean_accepted_length,
        scheduled=bool(options.get("step_cost_table")),
        memory_share=memory,
    )


__all__ = ["measure"]
