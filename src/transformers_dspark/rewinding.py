"""Caches of compressed attention that can take back the last tokens of their latest forward.

Such a layer closes a window of so many tokens into one entry, and keeps the tokens of the open window in a buffer;
cropping its keys alone would leave rejected tokens in both. Nothing is undone here. The tensors of these layers are
never written to, so keeping the state from before a forward costs no copy: to forget tokens, a layer goes back to that
state and is told once more what it was told since, of the tokens that stay. No weight is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer


class RewindingLayer(DynamicSlidingWindowLayer):
    """
    What [`rewinding`] adds to a layer of compressed attention. A forward calls `update` first, then the others.

    Args of the others are those of Transformers: tokens are the second dimension of `kv` and `gate`
    `(rows, tokens, size)`, windows that of an overlap `(rows, windows, rate, size)` and of `compressed`
    `(rows, windows, size)`; `name` is the compressor's, of which a layer may have two.

    Source: the order and the meaning of these calls in Transformers' compressors of DeepSeek-V4.
    """

    is_croppable = True
    _record: tuple[dict[str, Any], list[tuple[str, tuple[Any, ...]]]] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        state.pop("_record", None)
        self._record = state, []
        return self._told("update", key_states, value_states)

    def store_compression_weights(self, name: str, kv: torch.Tensor, gate: torch.Tensor) -> Any:
        return self._told("store_compression_weights", name, kv, gate)

    def update_overlap_state(self, name: str, kv: torch.Tensor, gate: torch.Tensor, head_dim: int) -> Any:
        return self._told("update_overlap_state", name, kv, gate, head_dim)

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> Any:
        return self._told("update_compressor_states", name, compressed)

    def _told(self, method: str, *args: Any) -> Any:
        if self._record is not None:
            self._record[1].append((method, args))
        return getattr(super(), method)(*args)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Forgets the last `-tokens_to_remove` tokens. All others are then certain.

        Raises:
            RuntimeError: they are more than the latest forward brought.
        """
        (before, calls), self._record = self._record or ({}, []), None
        if not tokens_to_remove:
            return
        fed = calls[0][1][0].shape[-2] if calls else 0
        stay = fed + tokens_to_remove
        if stay < 0:
            raise RuntimeError(
                f"Cannot take back {-tokens_to_remove} tokens: the latest forward brought {fed}, and compressed "
                "attention forgets how to go back further."
            )
        self.__dict__.update(before)
        if stay:
            self._tell_again(calls, stay)

    def _tell_again(self, calls: list[tuple[str, tuple[Any, ...]]], stay: int) -> None:
        """What is said of tokens is cut to the first `stay`, what is said of windows to those that these close."""
        closed: dict[str, int] = {}
        for method, (first, *others) in calls:
            tell = getattr(super(), method)
            if method == "update":
                tell(first[..., :stay, :], *(states[..., :stay, :] for states in others))
            elif method == "store_compression_weights":
                chunk = tell(first, *(tokens[:, :stay] for tokens in others))[0]
                closed[first] = chunk.shape[1] // self.compress_rate
            elif method == "update_compressor_states" or closed[first]:
                tell(first, *(t[:, : closed[first]] if isinstance(t, torch.Tensor) else t for t in others))


@functools.cache
def _kind(layer: type) -> type:
    # `_layer_type` would put the new class in the place of Transformers' own
    return type(f"Rewinding{layer.__name__}", (RewindingLayer, layer), {"_layer_type": None})


def compresses(layer: CacheLayerMixin) -> bool:
    """Whether a layer of a cache is one of compressed attention."""
    return hasattr(layer, "store_compression_weights")


def _let_rewind(cache: Cache) -> list[tuple[CacheLayerMixin, type]]:
    changed = [(layer, type(layer)) for layer in cache.layers if compresses(layer)]
    for layer, kind in changed:
        layer.__class__ = _kind(kind)  # type: ignore[arg-type]  # classes are hashable
    return changed


def rewinding_cache(config: PreTrainedConfig) -> Cache:
    """An empty cache of Transformers' own for a target, which can be cropped."""
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    _let_rewind(cache)
    return cache


@contextmanager
def rewinding(cache: Cache | None) -> Iterator[None]:
    """While it lasts, the layers of compressed attention of a cache can be cropped. Afterwards they are as before."""
    changed = [] if cache is None else _let_rewind(cache)
    try:
        yield
    finally:
        for layer, kind in changed:
            layer.__class__ = kind
            vars(layer).pop("_record", None)


__all__ = ["RewindingLayer", "compresses", "rewinding", "rewinding_cache"]
