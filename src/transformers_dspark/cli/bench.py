"""`dspark bench`: plain batched `generate` and the batched loop in turn, at several batch sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Interrupted, UsageError, add_json_option, positive_int, write_json
from .pair import add_answer_options, add_pair_options, add_timing_options, load_pair, progress_bar


if TYPE_CHECKING:
    from rich.table import Table

HELP = "tokens per second with and without the drafter, by batch size"
MODE_NAMES = ("static", "compact", "causal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, nargs="+", metavar="FILE", help='JSON lines of {"turns": ["..."]}')
    parser.add_argument(
        "--rows", type=positive_int, nargs="+", default=[1, 4, 16], metavar="N", help="of a batch (default: 1 4 16)"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODE_NAMES, help="causal: compact by the other scheduler (default: as in a call)"
    )
    add_timing_options(parser)
    add_answer_options(parser, 96)
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    args.modes = args.modes or ["static" if args.costs is None else "compact"]
    if args.costs is None and set(args.modes) - {"static"}:
        raise UsageError(
            f"--modes {' '.join(args.modes)} needs --costs FILE: make one with `dspark profile --out FILE`"
        )
    from rich.console import Console

    from ..environment import environment
    from ..evaluation.batches import compare
    from ..evaluation.prompts import read_conversations
    from ..step_costs import StepCostTable

    table = StepCostTable.load(args.costs) if args.costs else None
    files = {path: [turns[0] for turns in read_conversations(path, max(args.rows))] for path in args.prompts}
    for path, prompts in files.items():
        if len(prompts) < max(args.rows):
            raise UsageError(f"{path} holds {len(prompts)} prompts, --rows asks for {max(args.rows)}: ask for fewer")
    pair = load_pair(args)
    lines: list[dict[str, Any]] = []
    kinds = [(path, rows) for path in files for rows in args.rows]
    result: dict[str, Any] = {
        "environment": environment(pair.target.device, args.words),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        **({"step_costs": table.to_dict()} if table else {}),
        "runs": lines,
    }
    try:
        with progress_bar() as bar:
            task = bar.add_task("measuring", total=len(kinds) * args.repeats * (1 + len(args.modes)))
            for path, rows in kinds:
                bar.update(task, description=f"{path.stem}, {rows} rows")
                found = compare(
                    pair,
                    files[path][:rows],
                    args.modes,
                    table,
                    args.max_new_tokens,
                    args.repeats,
                    lambda: bar.advance(task),
                )
                lines.append({"prompts": path.stem, **found})
    except KeyboardInterrupt:
        if lines:
            Console().print(_shown(lines))
            write_json(args.json, result)
        left = "; ".join(f"{path} --rows {rows}" for path, rows in kinds[len(lines) :])
        raise Interrupted(f"{len(lines)} of {len(kinds)} measurements are kept; still to do: {left}") from None
    Console().print(_shown(lines))
    write_json(args.json, result)
    return 0


def _shown(lines: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    heads = ("prompts", "rows", "mode", "plain", "drafted", "", "accepted", "host", "same ids")
    table = Table(*heads, title="Tokens per second", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.columns[0].overflow = "fold"  # names of files are of any length
    for line in lines:
        for mode, figures in line["modes"].items():
            table.add_row(
                line["prompts"],
                str(line["rows"]),
                mode,
                f"{line['plain_tokens_per_second']:.1f}",
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['speed_up']:.2f}x",
                f"{figures['accepted_length']:.2f}",
                f"{figures['overhead_share']:.1%}",
                "yes" if figures["same_ids"] else "NO",
            )
    return table
