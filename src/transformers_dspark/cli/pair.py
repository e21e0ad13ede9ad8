"""Options of the commands that run a target with its drafter, said once, and what they load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import device_of, path_or_id, positive_int, seed, target_place, valid_temperature


if TYPE_CHECKING:
    from rich.progress import Progress

    from ..evaluation.runs import Pair

DTYPES = ("float32", "bfloat16", "float16")


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--target`, `--drafter`, `--device` and `--dtype`, in a group of their own."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", type=target_place, metavar="PATH", help="folder or hub id (default: the demo's)")
    group.add_argument("--drafter", type=path_or_id, metavar="PATH", help="folder or hub id (default: the demo's)")
    group.add_argument("--device", metavar="NAME", help="cuda, cuda:1, cpu (default: cuda if there is one)")
    group.add_argument("--dtype", choices=DTYPES, help="(default: float32 on cpu, else bfloat16)")


def add_prompts(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Adds the files of prompts and `--limit`."""
    words = 'JSON lines of {"turns": ["..."]}'
    parser.add_argument("prompts", type=Path, nargs=nargs, metavar="FILE", help=words)
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N lines of a file")


def add_answer_options(parser: argparse.ArgumentParser, tokens: int, temperatures: Sequence[float] = ()) -> None:
    """
    Adds `--max-new-tokens`, and for commands that can sample `--temperature` and `--seed`.

    Args:
        tokens (`int`): Default number of new tokens.
        temperatures (`Sequence[float]`): The default; several make an option that takes several, none leave it out.
    """
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=tokens,
        metavar="N",
        help="of each answer (default: %(default)s)",
    )
    if temperatures:
        shown = " ".join(f"{value:g}" for value in temperatures)
        parser.add_argument(
            "--temperature",
            type=valid_temperature,
            nargs="+",
            default=list(temperatures),
            metavar="T",
            help=f"0 is greedy; several may be given (default: {shown})",
        )
        parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the draws above temperature 0")


def add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--costs` and `--repeats`, for commands that time plain and drafted runs in turn."""
    parser.add_argument("--costs", type=path_or_id, metavar="FILE", help="table of `dspark profile`: verify what pays")
    parser.add_argument(
        "--repeats", type=positive_int, default=3, metavar="N", help="of each side, in turn (default: %(default)s)"
    )


def load_pair(args: argparse.Namespace) -> Pair:
    """The target and drafter that the options of [`add_pair_options`] name; the demo's where they name none."""
    device = device_of(args.device)
    import torch
    from transformers.utils import logging

    from ..evaluation.real_pair import fetch_target, find_drafter
    from ..evaluation.runs import Pair

    drafter = find_drafter(args.drafter)
    logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    return Pair.load(args.target or str(fetch_target()), drafter, device, dtype)


def progress_bar() -> Progress:
    """A bar with what is done, its rate and the remaining time; on standard error, where it is in no result's way."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.2f}/s" if speed >= 0.1 else f"{60 * speed:.1f}/min")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), Remaining())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


__all__ = [
    "DTYPES",
    "add_answer_options",
    "add_pair_options",
    "add_prompts",
    "add_timing_options",
    "load_pair",
    "progress_bar",
]
