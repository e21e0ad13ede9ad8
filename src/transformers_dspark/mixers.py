"""The modules of a target that keep a state between calls: how they are found, tried and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from ._compat import keeps_recurrent_state
from .windows import WINDOW_KEYWORD


RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# what a mixer returns: states `(n, width, ...)`, or several such
Mixed: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
_PACKED = {"attention_mask", "position_ids", WINDOW_KEYWORD}
_UPDATES = {"update_conv_state", "update_recurrent_state"}
STATES = ("conv_states", "recurrent_states")  # of a layer of Transformers' caches


def mixers(target: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules of a target that keep a state in its cache, by the number of their layer."""
    return {index: modules[-1] for index, modules in _by_layer(target).items()}


def _by_layer(target: PreTrainedModel) -> dict[int, list[nn.Module]]:
    numbered = [module for module in target.modules() if getattr(module, "layer_idx", None) is not None]
    keeping = {kind for kind in set(map(type, numbered)) if names_used(kind) & _UPDATES}
    found: dict[int, list[nn.Module]] = {}
    for module in numbered:
        if type(module) in keeping:
            found.setdefault(int(module.layer_idx), []).append(module)
    return found


def names_used(kind: type) -> set[str]:
    """Names that the methods of a class use."""
    functions = [inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value)]
    return {name for function in functions for name in function.__code__.co_names}


def missing_mixers(target: PreTrainedModel) -> str | None:
    """Why the states of a target cannot be kept row by row, or `None` if they can, or if it has none."""
    config = target.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    found = _by_layer(target)
    if keeps_recurrent_state(target) and not found:
        return "keeps a state outside the cache that a forward call is given"
    if absent := [layer for layer, kind in enumerate(kinds) if kind in RECURRENT_KINDS and layer not in found]:
        return f"keeps the state of layer {absent[0]} in no module that could be found"
    if several := [layer for layer, modules in found.items() if len(modules) > 1]:
        names = ", ".join(sorted({type(module).__name__ for module in found[several[0]]}))
        return f"keeps states of layer {several[0]} in {len(found[several[0]])} modules ({names})"
    for mixer in one_of_each(modules[0] for modules in found.values()):
        if isinstance(reason := _tried(mixer, config.hidden_size, target.dtype), str):
            return f"has a {type(mixer).__name__}, which {reason}"
    return None


def read_one_by_one(target: PreTrainedModel) -> bool:
    """
    Whether a target's mixers have to be given one token at a time, after [`missing_mixers`]. Some begin a new text
    whenever they are given several, and some compute several otherwise than one, as plain decoding gives them.
    """
    config = target.config.get_text_config(decoder=True)
    return any(
        _tried(mixer, config.hidden_size, target.dtype) is True for mixer in one_of_each(mixers(target).values())
    )


def one_of_each(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """One module of each class."""
    return {type(module): module for module in modules}.values()


# what trying a mixer has shown: that it takes tokens one by one alone, or not so; or why it takes none
_known: WeakKeyDictionary[nn.Module, bool | str] = WeakKeyDictionary()


@torch.no_grad()
def _tried(mixer: nn.Module, size: int, dtype: torch.dtype) -> bool | str:
    if mixer not in _known:
        device, noise = next(mixer.parameters()).device, torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 6, size, generator=noise).to(device, dtype)  # weights may be quantised
        first, second = hidden[:, :3], hidden[:, 3:]
        together, apart = LinearAttentionLayer(1), LinearAttentionLayer(1)
        try:
            for layer in (together, apart):
                call_mixer(mixer, mixer.forward, first, layer)
            gap = relative_gap(
                call_mixer(mixer, mixer.forward, second, together), one_by_one(mixer, mixer.forward, second, apart)
            )
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            _known[mixer] = f"reads more than the states before it ({type(error).__name__}: {error})"
        else:
            _known[mixer] = heeds_bounds(mixer) or not gap <= (1e-3 if dtype == torch.float32 else 0.1)
    return _known[mixer]


def heeds_bounds(mixer: nn.Module) -> bool:
    """Whether time steps have bounds, which are heeded where several tokens are read, and not where one is."""
    return tuple(getattr(mixer, "time_step_limit", None) or (0.0, float("inf"))) != (0.0, float("inf"))


def call_mixer(
    mixer: nn.Module, forward: Callable[..., Any], hidden: torch.Tensor, layer: LinearAttentionLayer, **named: Any
) -> Mixed:
    """A mixer's `forward` over states `(n, width, hidden)`, with a cache that holds nothing but its own layer."""
    index = int(mixer.layer_idx)  # type: ignore[arg-type]
    return forward(hidden, cache=Cache(layers=[layer] * (index + 1)), **named)


def one_by_one(
    mixer: nn.Module,
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    layer: LinearAttentionLayer,
    after: Callable[[int], None] | None = None,
    **named: Any,
) -> Mixed:
    """The same as [`call_mixer`], token by token; `after` is called behind each."""
    columns = []
    for column in range(hidden.shape[1]):
        columns.append(call_mixer(mixer, forward, hidden[:, column : column + 1], layer, **named))
        if after is not None:
            after(column)
    return map_mixed(lambda *states: torch.cat(states, dim=1), *columns)


def map_mixed(function: Callable[..., torch.Tensor], *mixed: Mixed) -> Mixed:
    """Applies a function to what mixers returned, one by one if it is several."""
    if isinstance(mixed[0], torch.Tensor):
        return function(*mixed)
    return tuple(function(*states) for states in zip(*mixed, strict=True))


def relative_gap(found: Mixed, expected: Mixed) -> float:
    """The largest distance of two tensors, in units of the second one's length."""
    pairs = zip(*((mixed,) if isinstance(mixed, torch.Tensor) else mixed for mixed in (found, expected)), strict=True)
    return max(float(torch.dist(a.float(), b.float()) / b.float().norm()) for a, b in pairs)


def packed_arguments(mixer: nn.Module) -> frozenset[str]:
    """Arguments of a mixer that speak of the packed forward, and not of what it reads."""
    return frozenset(_PACKED | ({"position_embeddings"} - inspect.signature(type(mixer).forward).parameters.keys()))


def mixer_arguments(
    mixer: nn.Module, packed: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """
    What a call of a mixer in a packed forward gives it: the states to read, and options.

    Args:
        mixer (`nn.Module`): The mixer.
        packed (`frozenset[str]`): Of [`packed_arguments`].
        args (`tuple`), kwargs (`dict`): Of the call.

    Raises:
        NotImplementedError: it is given more to read than these.
    """
    named = {name: value for name, value in kwargs.items() if name not in packed and not isinstance(value, Cache)}
    hidden = named.pop("hidden_states") if "hidden_states" in named else args[0]
    if any(isinstance(value, (torch.Tensor, tuple)) for value in (*args[1:], *named.values())):
        raise NotImplementedError(
            f"{type(mixer).__name__} reads more than the layer before it, which the batched loop cannot feed again: "
            "generate without the drafter."
        )
    return hidden, named


__all__ = [
    "RECURRENT_KINDS",
    "STATES",
    "Mixed",
    "call_mixer",
    "heeds_bounds",
    "map_mixed",
    "missing_mixers",
    "mixer_arguments",
    "mixers",
    "names_used",
    "one_by_one",
    "one_of_each",
    "packed_arguments",
    "read_one_by_one",
    "relative_gap",
]
