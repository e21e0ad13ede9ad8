"""
What makes rounds quicker on a GPU, in place only while they are captured and while prompts are read: kernels for few
rows, compiled parts.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel

from ._compat import mark_size, mode_options, one_build_for_all_shapes
from .compressed import CompressedRows
from .lending import given_forward, lent_forwards
from .modeling_dspark import DSparkDrafter
from .recurrent import RecurrentRows
from .windows import WINDOW_KEYWORD


_ONE_AT_A_TIME = threading.RLock()  # pairs on several threads may have a target in common
COMPILED = ("block_states", "context_keys_values")  # parts of a drafter that are many small operations


class Quicker:
    """
    Changes to a pair that last while a round is captured or a prompt is read. They are made once, so that what was
    compiled with them in place is found again.

    Args:
        target (`PreTrainedModel`), drafter (`DSparkDrafter`): The pair.
        states (`RecurrentRows`, *optional*): The target's recurrent states.
        compiling (`CompileConfig`, *optional*): How they are compiled; `None` leaves them as they are.

    Attributes:
        step (`Callable`): The target's forward.
        compiling (`CompileConfig`, *optional*): As given.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        states: RecurrentRows | CompressedRows | None,
        compiling: CompileConfig | None,
    ) -> None:
        modules = (module for model in (target, drafter) for module in model.modules())
        self._linears = {layer: functools.partial(_few_rows, layer) for layer in modules if _is_served(layer)}
        self.step = target if compiling is None else _step(target, compiling)
        self.compiling, self._functions = compiling, dict[Callable[..., Any], Callable[..., Any]]()
        self._in_place = False
        self._parts: list[tuple[Any, str, Callable[..., Any]]] = []
        if compiling is not None:
            self._parts = [(drafter, name, _compiled(getattr(drafter, name), compiling)) for name in COMPILED]
        if compiling is not None and isinstance(states, RecurrentRows):
            self._parts.append((states, "take", _compiled(states.take, compiling, dynamic=None)))

    def part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """
        A function of tensors for any sizes, compiled while the changes last, once for all that ask for it. Rounds made
        with an earlier [`Quicker`] so find their functions as they are.
        """
        if self.compiling is None or not self._in_place:
            return function
        if function not in self._functions:
            self._functions[function] = _compiled(function, self.compiling)
        return self._functions[function]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While it lasts, the pair is changed."""
        with _ONE_AT_A_TIME, lent_forwards(self._linears), ExitStack() as undone:
            self._in_place = True
            undone.callback(setattr, self, "_in_place", False)
            for owner, name, part in self._parts:
                vars(owner)[name] = part
                undone.callback(vars(owner).pop, name)
            yield


def _compiled(function: Callable[..., Any], config: CompileConfig, dynamic: bool | None = True) -> Callable[..., Any]:
    """
    A compiled function. Graphs are ours to capture, so no mode makes any.

    Args:
        dynamic (`bool`, *optional*): `True` serves any size; `None` only sizes that were marked, or have changed.
    """
    how: dict[str, Any] = {"fullgraph": config.fullgraph, "dynamic": dynamic, "backend": config.backend}
    mode = "max-autotune-no-cudagraphs" if (config.mode or "").startswith("max-autotune") else None
    if config.backend != "inductor":
        how |= {"options": config.options} if config.options else {"mode": mode}
    else:
        from .linear_ops import SHARED_LAUNCHES

        chosen = config.options or mode_options(mode)
        how["options"] = {"post_grad_custom_pre_pass": SHARED_LAUNCHES, **chosen}
    made = torch.compile(function, **how)
    if dynamic is None:
        return made

    def call(*args: Any, **kwargs: Any) -> Any:
        with one_build_for_all_shapes():
            return made(*args, **kwargs)

    return call


def _step(target: PreTrainedModel, config: CompileConfig) -> Callable[..., Any]:
    """
    A target's forward, compiled for any number of rows and tokens, of rounds and of prompts; caches may be taken to
    have their sizes.
    """
    made = _compiled(target.forward, config, dynamic=None)

    def forward(**kwargs: Any) -> Any:
        window = kwargs[WINDOW_KEYWORD]
        for tensor in (kwargs["input_ids"], kwargs["position_ids"], window.places, window.spans, window.reach):
            mark_size(tensor, 1)
        mark_size(window.reach, 0)
        mark_size(window.reach, 2)
        if "logits_to_keep" in kwargs:
            mark_size(kwargs["logits_to_keep"], 0)
        with one_build_for_all_shapes():
            return made(**kwargs)

    return forward


def _is_served(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or given_forward(layer) is not None:
        return False
    weight = layer.weight
    return weight.is_cuda and type(weight) is nn.Parameter and weight.dtype in (torch.bfloat16, torch.float16)


def _few_rows(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    from .linear_ops import few_rows_linear

    return few_rows_linear(states, layer.weight, layer.bias)


__all__ = ["Quicker"]
