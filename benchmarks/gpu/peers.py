"""
What Transformers does by itself, timed step by step in the same run.

A stopping criterion that never stops notes the host's clock once a step. Each step waits for the one before it, so
over many steps the host's clock is the device's; what comes before the steps that are counted, such as compilation,
stays out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

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
    """`generate_batch`: tokens of all requests over the second half of the time in which they appeared."""
    outputs = models.target.generate_batch(
        ids.tolist(), max_new_tokens=steps, record_timestamps=True, progress_bar=False
    )
    times = sorted(moment for output in outputs.values() for moment in output.timestamps)
    late = times[len(times) // 2 :]
    rate = (len(late) - 1) / (late[-1] - late[0])
    return {"step_seconds": len(ids) / rate, "tokens_per_second": rate}


def _of_rows(seconds: float, rows: int) -> dict[str, float]:
    return {"step_seconds": seconds, "tokens_per_second": rows / seconds}


PEERS: dict[str, Callable[[Models, torch.Tensor, int], dict[str, float]]] = {
    "generate": plain,
    "generate, static cache, compiled": compiled,
    "native DFlash": native_dflash,
    "generate_batch": continuous,
}
STEPS = {"generate": 24, "generate, static cache, compiled": 64, "native DFlash": 24, "generate_batch": 24}
