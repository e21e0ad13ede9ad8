"""A target's anatomy: its hidden states at the drafter's taps, its layers and its head.

Transformers returns hidden states of chosen layers through `output_hidden_states=[...]`; entry i + 1 is the output of
layer i and entry 0 the embedding output, scaled as the model scales it. Only the last layer needs a hook, because its
entry has passed the final norm.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

from .borrowed_dspark import few_rows_linear
from .lending import Lender, lend_forward
from .windows import WINDOW_KEYWORD, VerifyWindow


class TargetTaps:
    """
    The taps of one generation call; a context manager, since the hook on the last layer lives only as long as the
    call.

    Args:
        target (`PreTrainedModel`): The target.
        layer_ids (`Sequence[int]`): 0-based layers; -1 is the embedding output.
        keep_all (`bool`): Ask the target for all hidden states, because the user wants them too.
        step (`Callable`, *optional*): Another form of the target's forward, for [`~TargetTaps.step`].

    Attributes:
        forward (`Callable`): What [`~TargetTaps.step`] calls; another one takes its place where compilation failed.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layer_ids: Sequence[int],
        keep_all: bool = False,
        step: Callable[..., Any] | None = None,
    ) -> None:
        self.layer_ids = tuple(layer_ids)
        self._target = target
        self.forward = target if step is None else step
        self._keeps_logits = "logits_to_keep" in inspect.signature(target.forward).parameters
        text = target.config.get_text_config()
        self._last = text.num_hidden_layers - 1
        # hyper-connections: a token has several residual streams, and its state is their mean
        self._streams: int | None = getattr(text, "hc_mult", None)
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._last_output: torch.Tensor | None = None
        self._thread: int | None = None
        self.forward_kwargs: dict[str, Any] = {
            "output_hidden_states": True if keep_all else [layer + 1 for layer in self.layer_ids]
        }

    @property
    def needs_hook(self) -> bool:
        """Whether a tap is on the last layer. A forward compiled before the hook was set would skip it."""
        return self._last in self.layer_ids

    def __enter__(self) -> TargetTaps:
        self._thread = threading.get_ident()
        if self.needs_hook:
            self._hook = decoder_layers(self._target)[self._last].register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._last_output = None

    def renew(self) -> None:
        """
        Puts the hook behind those that Transformers sets in a model's first forward, where later calls have it: what
        is compiled depends on their order.
        """
        self.__exit__(None, None, None)
        self.__enter__()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """
        A forward of the target whose taps [`~TargetTaps.read`] joins. From then on forwards that do not pass here
        leave no trace, such as those of a logits processor; those of other threads never do.
        """
        return self._run(self._target, args, kwargs)

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        window: VerifyWindow,
        cache: Cache,
        keep: torch.Tensor | None = None,
        *,
        quick: bool = True,
    ) -> tuple[ModelOutput, torch.Tensor]:
        """
        As [`~TargetTaps.run`], over packed tokens.

        Args:
            ids, positions (`torch.LongTensor` of shape `(total,)`): The tokens.
            window (`VerifyWindow`): Where they belong.
            cache (`Cache`): A ragged one.
            keep (`torch.LongTensor` of shape `(n,)`, *optional*): The tokens whose logits are wanted.
            quick (`bool`): By the other form of the forward if there is one, which is compiled once for all numbers of
                tokens, also of those to keep; a single one would be a case of its own.

        Returns:
            The outputs, and float32 logits `(n, vocab)`, of all tokens without `keep`.
        """
        forward, chosen = self.forward if quick else self._target, keep
        if forward is not self._target:
            chosen = torch.arange(len(ids), device=ids.device) if keep is None else keep
            chosen = chosen.repeat(2) if len(chosen) == 1 else chosen
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "cache": cache,
            "use_cache": True,
            WINDOW_KEYWORD: window,
            **self.forward_kwargs,
        }
        if self._keeps_logits and chosen is not None:
            inputs["logits_to_keep"] = chosen
        outputs = self._run(forward, (), inputs)
        logits = outputs.logits[0]
        if keep is not None and not self._keeps_logits:
            logits = logits[keep.to(logits.device)]
        return outputs, logits[: len(ids if keep is None else keep)].to(ids.device, torch.float32)

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._thread = threading.get_ident()
        try:
            return forward(*args, **kwargs)
        finally:
            self._thread = None

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._thread == threading.get_ident():
            self._last_output = output if isinstance(output, torch.Tensor) else output[0]

    def read(self, outputs: ModelOutput, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """
        Joins the taps of the latest forward.

        Each tap is moved on its own: the layers of a target may lie on several devices.

        Returns:
            `torch.FloatTensor` of shape `(rows, n, num_taps * hidden_size)`, in `layer_ids` order.

        Raises:
            RuntimeError: the target did not return a hidden state that it was asked for.
            NotImplementedError: it keeps several states a token, and not as hyper-connections do.
        """
        states = outputs.get("hidden_states") or ()
        taps = []
        for layer in self.layer_ids:
            if layer == self._last:
                tap = self._last_output
            else:
                tap = states[layer + 1] if layer + 1 < len(states) else None
            if tap is None:
                raise RuntimeError(
                    f"{type(self._target).__name__} returned no hidden state for the tap on layer {layer}; a DSpark "
                    "target has to support `output_hidden_states`."
                )
            if tap.dim() == 4 and tap.shape[2] == self._streams:
                tap = tap.mean(dim=2)
            if tap.dim() != 3:
                raise NotImplementedError(
                    f"The hidden states of {type(self._target).__name__} have shape {tuple(tap.shape)} instead of "
                    "(rows, length, hidden size); DSpark drafters read one state a token: leave the drafter out."
                )
            taps.append(tap.to(device, dtype))
        return torch.cat(taps, dim=-1)


def few_rows_linears(*models: nn.Module) -> AbstractContextManager[None]:
    """
    Lets the linear layers of models use [`~transformers_dspark.borrowed_dspark.few_rows_linear`] while the context
    lasts: on a CPU that makes a step over a handful of tokens hardly longer than one over a single token. A layer that
    is of another kind or not on the CPU, or whose forward someone else replaced, stays as it is.
    """
    layers = (module for model in models for module in model.modules() if type(module) is nn.Linear)
    return _few_rows_lender(layer for layer in layers if layer.weight.device.type == "cpu")


def _with_few_rows(layer: nn.Linear) -> Callable[[], object] | None:
    if "forward" in vars(layer):
        return None
    return lend_forward(layer, functools.partial(_few_rows, layer))


_few_rows_lender = Lender(_with_few_rows)


def _few_rows(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    return few_rows_linear(states, layer.weight, layer.bias)


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """
    The decoder layers of a target, in order, wherever its class keeps them.

    Raises:
        NotImplementedError: no list of `num_hidden_layers` modules was found in the decoder.
    """
    count = target.config.get_text_config().num_hidden_layers
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.base_model
    for module in decoder.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return child
    raise NotImplementedError(
        f"The decoder layers of {type(target).__name__} were not found, and a tap on the last layer needs them: use a "
        "drafter that taps earlier layers."
    )


def learned_positions(target: PreTrainedModel) -> int | None:
    """
    Positions in a target's table of them, if it has one, learned or computed beforehand. Rotary embeddings know no
    last position, and neither do recurrent layers, which tell where they are without any.
    """
    count = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if count is None or any("Rotary" in type(module).__name__ for module in target.modules()):
        return None
    tokens = target.get_input_embeddings()
    learned = (part.weight for part in target.modules() if isinstance(part, nn.Embedding) and part is not tokens)
    lines = [table.shape[0] for table in (*learned, *target.buffers()) if table.dim() > 1]
    # some tables have a few lines in front of the first position
    return count if any(count <= found <= count + 8 for found in lines) else None


__all__ = ["TargetTaps", "decoder_layers", "few_rows_linears", "learned_positions"]
