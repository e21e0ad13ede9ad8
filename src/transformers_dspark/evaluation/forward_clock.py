"""Seconds inside the models of a pair, so that what is left of a generation's time is the host's own work."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter


class ForwardClock:
    """
    Within its context, `target` holds the seconds of the target's forwards, and `drafter` those of the drafter's
    context, block and chain without the choices of tokens. The models are as before afterwards.
    """

    def __init__(self, target: PreTrainedModel, drafter: DSparkDrafter) -> None:
        self.target = self.drafter = 0.0
        self._models = target, drafter

    def __enter__(self) -> ForwardClock:
        begun: list[float] = []
        target, drafter = self._models

        def end(*_: Any) -> None:
            self.target += self._now() - begun.pop()

        self._hooks = [
            target.register_forward_pre_hook(lambda *_: begun.append(self._now())),
            target.register_forward_hook(end),
        ]
        for name in ("block_states", "context_keys_values"):
            setattr(drafter, name, self._timed(getattr(drafter, name)))
        chain = self._timed(drafter.chain)

        def without_choices(*args: Any, select: Any, **kwargs: Any) -> Any:
            def choose(*given: Any) -> Any:
                start = self._now()
                chosen = select(*given)
                self.drafter -= self._now() - start
                return chosen

            return chain(*args, select=choose, **kwargs)

        setattr(drafter, "chain", without_choices)  # noqa: B010 - a method, shadowed for the time of the context
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name in ("block_states", "context_keys_values", "chain"):
            delattr(self._models[1], name)

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            found = function(*args, **kwargs)
            self.drafter += self._now() - start
            return found

        return timed

    def _now(self) -> float:
        if self._models[0].device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


__all__ = ["ForwardClock"]
