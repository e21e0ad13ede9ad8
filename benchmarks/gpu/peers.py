"""
What Transformers does by itself, timed step by step in the same run.

A stopping criterion that never stops notes the host's clock once a step. Each step waits for the one before it, so
over many steps the host's clock is the device's; what comes before the steps that are counted, such as compilation,
stays out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from .shapes import Models, native_assistant


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class StepClock(StoppingCriteria):
    """Notes when each step of a generation is over."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def seconds(self) -> float:
        """Of a step, on average over the second half: compilation and capture are over by then."""
        middle, last = len(self.times) // 2, len(self.times) - 1
        return (self.times[last] - self.times[middle]) / (last - middle)


def step_seconds(target: PreTrainedModel, ids: torch.Tensor, steps: int, **options: Any) -> float:
    """Seconds of a step of `target.generate` over `(rows, length)` prompts; with an assistant, of a round."""
    clock = StepClock()
    target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        stopping_criteria=StoppingCriteriaList([clock]),
        **GREEDY,
        **options,
    )
    return clock.seconds


def plain(models: Models, ids: torch.Tensor, steps: int) -> dict[str, float]:
    """`generate` as it is, with a cache that grows."""
    return _of_rows(step_seconds(models.target, ids, steps), len(ids))


def compiled(models: Models, ids: torch.Tensor, steps: int) -> dict[str, float]:
    """`generate` with a static cache, whose steps Transformers compiles on a GPU."""
    return _of_rows(step_seconds(models.target, ids, steps, cache_implementation="static"), len(ids))


def native_dflash(models: Models, ids: torch.Tensor, steps: int) -> dict[str, float]:
    """A round of Transformers' own DFlash for one prompt; its tokens per second follow from an accepted length."""
    assistant = native_assistant(models)
    options = {"assistant_model": assistant, "speculation_type": "dflash"}
    return {"round_seconds": step_seconds(models.target, ids[:1], steps, **options)}


def continuous(models: Models, ids: torch.Tensor, steps: int) -> dict[str, float]:
    """
    `generate_batch`, as it is: tokens of all requests in the time in which all of them were decoded together.

    Raises:
        RuntimeError: a request failed, or there was no such time.
    """
    # its own options, since it writes to them
    options = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = models.target.generate_batch(ids.tolist(), options, record_timestamps=True)
    return together([output.timestamps for output in outputs.values() if output.error is None], len(ids))


def together(times: Sequence[Sequence[float]], rows: int) -> dict[str, float]:
    """
    Figures of a step from the moments of each request's tokens: of those behind the first token of the last request to
    begin, up to the last of the first to end.
    """
    if len(times) < rows:
        raise RuntimeError(f"{rows - len(times)} of {rows} requests did not end as they should; see what was logged")
    begin, end = max(moments[0] for moments in times), min(moments[-1] for moments in times)
    tokens = sum(begin < moment <= end for moments in times for moment in moments)
    if not tokens:
        raise RuntimeError("some requests had ended before others began: there is no step of all")
    return _of_rows(rows * (end - begin) / tokens, rows)


def _of_rows(seconds: float, rows: int) -> dict[str, float]:
    return {"step_seconds": seconds, "tokens_per_second": rows / seconds}


# in the order of what they take: compiled steps come last
PEERS: dict[str, Callable[[Models, torch.Tensor, int], dict[str, float]]] = {
    "native DFlash": native_dflash,
    "generate": plain,
    "generate_batch": continuous,
    "generate, static cache, compiled": compiled,
}
STEPS = {"generate": 24, "generate, static cache, compiled": 64, "native DFlash": 24, "generate_batch": 64}
