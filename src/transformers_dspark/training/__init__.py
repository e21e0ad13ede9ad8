"""Training of drafters. The names below are imported on first use: the other modules here need no trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


# public name -> the module that defines it
_EXPORTS = {
    "AnswerDataset": "data",
    "DSparkTrainer": "trainer",
    "DSparkTrainingArguments": "arguments",
    "DrafterShape": "arguments",
    "load_sequences": "data",
    "new_drafter": "fresh",
}

__all__ = [
    "AnswerDataset",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "DrafterShape",
    "load_sequences",
    "new_drafter",
]

if TYPE_CHECKING:
    from .arguments import DrafterShape, DSparkTrainingArguments
    from .data import AnswerDataset, load_sequences
    from .fresh import new_drafter
    from .trainer import DSparkTrainer


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
