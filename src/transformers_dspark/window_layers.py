"""
Mixers that read a whole window in one call of fixed shape, and show their states behind each of its tokens.

A convolution's states are a few inputs, so those behind a token are a slice of all that it has read. Recurrences are
told apart by the function that a mixer calls for several tokens. In the place of both, the mixer's own code calls
functions of `scans`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ._compat import rebind
from .lending import given_forward
from .mixers import STATES, call_mixer, mixers, names_used, one_by_one, one_of_each, relative_gap
from .scans import CONVOLUTIONS, SCANS, StatesBehind


class WindowLayer(LinearAttentionLayer):
    """
    A layer of a cache over states that stay as they are while a mixer reads a window, one of each kind at most.

    Args:
        states (`Mapping[str, torch.Tensor]`): Of kinds `conv_states` and `recurrent_states`, `(rows, ...)` each.
    """

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.has_previous_state[0] = True
        for name, state in states.items():
            getattr(self, name)[0] = state
        self._inputs: torch.Tensor | None = None  # [rows, channels, kernel + width], those before the window first
        self._behind: StatesBehind | None = None

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        before = self.conv_states[state_idx]
        assert before is not None  # for the type checker
        self._inputs = torch.cat((before, conv_states), dim=-1)
        return self._inputs

    def update_recurrent_state(  # what our scans return for a state
        self, recurrent_states: StatesBehind, state_idx: int = 0, **kwargs: Any
    ) -> StatesBehind:
        self._behind = recurrent_states
        return recurrent_states

    def take(self, counts: torch.Tensor) -> None:
        """Moves the states on by the first `(rows,)` tokens of the window, in place, and forgets the rest."""
        state, inputs = self.conv_states[0], self._inputs
        if state is not None and inputs is not None:
            columns = counts[:, None, None] + torch.arange(state.shape[-1], device=state.device)
            state.copy_(inputs.gather(2, columns.expand(-1, state.shape[1], -1)))
        state = self.recurrent_states[0]
        if state is not None and self._behind is not None:
            self._behind.take(state, counts)
        self._inputs = self._behind = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that have as many rows as the window."""
        for tensor in (self.conv_states[0], self.recurrent_states[0], self._inputs, *(self._behind or ())):
            if tensor is not None:
                yield tensor


def windowed(mixer: nn.Module) -> Callable[..., Any]:
    """A mixer's `forward` over a [`WindowLayer`]."""
    return MethodType(_windowed(type(mixer)), mixer)  # type: ignore[arg-type]  # classes are hashable


@cache  # what is compiled with it in place is found again only if it is the same function
def _windowed(kind: type[nn.Module]) -> Callable[..., Any]:
    forward, known = kind.forward, {**CONVOLUTIONS, **SCANS}
    names = known.keys() & set(inspect.unwrap(forward).__code__.co_names)
    return rebind(forward, **{name: known[name] for name in names})


def missing_windows(target: PreTrainedModel) -> str | None:
    """Why a target's mixers cannot read windows this way, in words; `None` if they can, or if it has none."""
    size = target.config.get_text_config(decoder=True).hidden_size
    found = mixers(target).values()
    for mixer in found:
        if given_forward(mixer) is not None:
            return f"the forward of a {type(mixer).__name__} is not its own"
    for mixer in one_of_each(found):
        if reason := _tried(mixer, size, target.dtype):
            return f"{type(mixer).__name__} {reason}"
    return None


# what trying a mixer has shown
_known: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


@torch.no_grad()
def _tried(mixer: nn.Module, size: int, dtype: torch.dtype) -> str | None:
    if mixer not in _known:
        used = names_used(type(mixer))
        if "update_recurrent_state" in used and not used & SCANS.keys():
            _known[mixer] = "shows its state behind the last token of a window alone"
        else:
            try:
                gap = _gap(mixer, size, dtype)
            except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
                _known[mixer] = f"reads no whole windows ({type(error).__name__}: {error})"
            else:
                close = gap <= (1e-3 if dtype == torch.float32 else 0.1)
                _known[mixer] = None if close else "computes a window otherwise than its tokens one by one"
    return _known[mixer]


def _gap(mixer: nn.Module, size: int, dtype: torch.dtype) -> float:
    """Relative distance of what two rows give that keep one token and all three of a window, from those one by one."""
    device, noise = next(mixer.parameters()).device, torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 6, size, generator=noise).to(device, dtype)
    plain = LinearAttentionLayer()
    call_mixer(mixer, mixer.forward, hidden[:, :3], plain)
    layer, steps = WindowLayer(_states(plain)), []
    found = call_mixer(mixer, windowed(mixer), hidden[:, 3:], layer)
    layer.take(torch.tensor([1, 3], device=device))
    outputs = one_by_one(mixer, mixer.forward, hidden[:, 3:], plain, lambda column: steps.append(_states(plain)))
    gaps = [relative_gap(found, outputs)]
    for name, state in _states(layer).items():
        gaps += [relative_gap(state[row], steps[column][name][row]) for row, column in ((0, 0), (1, 2))]
    return max(gaps)


def _states(layer: LinearAttentionLayer) -> dict[str, torch.Tensor]:
    return {name: state.clone() for name in STATES if (state := getattr(layer, name)[0]) is not None}


__all__ = ["WindowLayer", "missing_windows", "windowed"]
