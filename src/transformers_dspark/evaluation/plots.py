"""Pictures of runs; needs matplotlib, which the extra `train` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def loss_curve(records: Sequence[dict[str, Any]], picture: Path) -> None:
    """
    Draws a training log: the losses by step, and the held-out accepted length beside them.

    Args:
        records (`Sequence[dict]`): The `log_history` of a trainer's state.
        picture (`Path`): A file that matplotlib can write, by its ending.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # a figure without pyplot: no window system, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    losses = figure.add_subplot()
    for name in ("loss", "cross_entropy", "l1", "confidence"):
        points = [(record["step"], record[name]) for record in records if name in record]
        losses.plot(*zip(*points, strict=True) if points else ([], []), label=name.replace("_", "-"), linewidth=1)
    losses.set(xlabel="step", ylabel="loss", ylim=(0, None))
    lengths = losses.twinx()
    points = [(r["step"], r["eval_accepted_length"]) for r in records if r.get("eval_accepted_length")]
    lengths.plot(*zip(*points, strict=True) if points else ([], []), "ko--", label="held-out accepted length")
    lengths.set(ylabel="accepted length", ylim=(1, None))
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(picture, dpi=150)
