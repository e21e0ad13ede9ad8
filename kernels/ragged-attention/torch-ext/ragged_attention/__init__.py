"""Attention of windows of new tokens over caches that hold a different number of tokens in every row."""

from typing import Any

from .reference import ragged_attention_reference


def __getattr__(name: str) -> Any:
    # the reference runs where there is no Triton
    if name in ("Tiling", "default_tiling", "ragged_attention"):
        from . import kernel

        return getattr(kernel, name)
    if name == "write_entries":
        from .write import write_entries

        return write_entries
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Tiling", "default_tiling", "ragged_attention", "ragged_attention_reference", "write_entries"]
