"""Linear layers for few tokens, where reading the weights is the whole cost."""

from typing import Any

from .reference import MAX_WEIGHTS, few_rows_linear_reference


def __getattr__(name: str) -> Any:
    # the reference runs where there is no Triton
    if name in ("MAX_TOKENS", "Tiling", "default_tilings", "few_rows_linear", "few_rows_linears"):
        from . import kernel

        return getattr(kernel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "MAX_TOKENS",
    "MAX_WEIGHTS",
    "Tiling",
    "default_tilings",
    "few_rows_linear",
    "few_rows_linear_reference",
    "few_rows_linears",
]
