"""A run's budget of time: when to stop, to save and to evaluate. All processes go by the first one's clock."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState


def share_of_peak(done: float, step: int, warmup: float, final: float) -> float:
    """
    Share of the peak learning rate: a linear warm-up, then a cosine.

    Args:
        done (`float`): Share of the budget that is used, 0..1.
        step (`int`): Steps taken.
        warmup (`float`): Share of the budget to warm up for.
        final (`float`): Share of the peak rate at the end.
    """
    if done < warmup:
        # a tenth of the peak is reached by steps alone: at first no budget has moved
        return max(done / warmup, min(1.0, (step + 1) / 100) * 0.1)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


class Pace(TrainerCallback, ExportableState):
    """
    Args:
        max_seconds, save_seconds, evaluations: See [`~transformers_dspark.training.DSparkTrainingArguments`].

    Evaluating and saving take no time of the budget. What has passed is kept in checkpoints.
    """

    def __init__(
        self, max_seconds: float | None = None, save_seconds: float | None = None, evaluations: int | None = None
    ) -> None:
        self.max_seconds, self.save_seconds, self.evaluations = max_seconds, save_seconds, evaluations
        self.seconds, self.saved_at, self.evaluated = 0.0, 0.0, 0
        self.clock = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        settings = ("max_seconds", "save_seconds", "evaluations")
        return {
            "args": {name: getattr(self, name) for name in settings},
            "attributes": {name: getattr(self, name) for name in ("seconds", "saved_at", "evaluated")},
        }

    def progress(self, state: TrainerState) -> float:
        """Share of the nearer budget that is used, 0..1."""
        by_time = self.seconds / self.max_seconds if self.max_seconds else 0.0
        return min(1.0, max(state.global_step / max(1, state.max_steps), by_time))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the clock."""
        self.clock = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts the step's time and decides."""
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        if PartialState().num_processes > 1 and (self.max_seconds or self.save_seconds):
            seconds = torch.tensor([self.seconds], dtype=torch.float32, device=PartialState().device)
            self.seconds = broadcast(seconds).item()
        done = self.progress(state)
        if done >= 1:
            control.should_training_stop = True
            return
        if self.evaluations and done >= (self.evaluated + 1) / self.evaluations:
            self.evaluated = int(done * self.evaluations)
            control.should_evaluate = True
        if self.save_seconds and self.seconds >= self.saved_at + self.save_seconds:
            self.saved_at = self.seconds
            control.should_save = True

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Time spent evaluating does not count."""
        self.clock = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Neither does that spent saving."""
        self.clock = time.perf_counter()


__all__ = ["Pace", "share_of_peak"]
