"""A linear layer for few tokens, where reading the weight is the whole cost."""

from typing import Any

from .reference import few_rows_linear_reference


def __getattr__(name: str) -> Any:
    # the reference runs where there is no Triton
    if name in ("MAX_TOKENS", "Tiling", "default_tilings", "few_rows_linear"):
        from . import kernel

        return getattr(kernel, name)
    if name == "few_rows_linear_op":  # registered when first asked for
        from .op import few_rows_linear_op

        return few_rows_linear_op
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "MAX_TOKENS",
    "Tiling",
    "default_tilings",
    "few_rows_linear",
    "few_rows_linear_op",
    "few_rows_linear_reference",
]
