"""`dspark profile`: what a step of a target costs on this machine, for the scheduler of verification."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import Interrupted, UsageError, add_json_option, device_of, json_file, positive_int, write_json
from .pair import add_pair_options, progress_bar


if TYPE_CHECKING:
    from rich.table import Table

    from ..step_costs import StepCostTable

HELP = "measure what a step of a target costs on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=json_file, required=True, metavar="FILE", help="the table, as JSON")
    for option, default, words in (
        ("--rows", [1, 4, 16], "rows in a step"),
        ("--tokens", [1, 2, 4, 8], "tokens that each row sends; 1 is the plain step"),
        ("--context", [64, 512], "tokens that each row holds already"),
    ):
        parser.add_argument(
            option,
            type=positive_int,
            nargs="+",
            default=default,
            metavar="N",
            help=f"{words} (default: {' '.join(map(str, default))})",
        )
    parser.add_argument(
        "--samples", type=positive_int, default=7, metavar="N", help="timed steps of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="measure every total that captured rounds on a GPU have, too: about 13 for each number of rows",
    )
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if 1 not in args.tokens:
        raise UsageError(f"--tokens {' '.join(map(str, args.tokens))} lacks the plain step: give 1 as well.")
    if args.tiers and args.target and not args.drafter:
        raise UsageError("--tiers depends on the drafter's blocks: give --drafter as well.")
    device = device_of(args.device)
    import torch
    from rich.console import Console
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from ..evaluation.real_pair import fetch_target, find_drafter
    from ..modeling_dspark import DSparkDrafter
    from ..profiling import totals_of
    from ..step_costs import StepCostTable

    logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype) if args.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    drafter = None
    # a target of the user's own needs no drafter to be measured; the demo's target brings one
    if args.drafter or not args.target:
        found = find_drafter(args.drafter)
        drafter = DSparkDrafter.from_pretrained(found, dtype=dtype).to(device).eval()
    name = args.target or str(fetch_target())
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    rows, tokens, context = (sorted(set(values)) for values in (args.rows, args.tokens, args.context))
    with progress_bar() as progress:
        block = drafter.config.num_draft_tokens if drafter is not None and args.tiers else 0
        kinds = sum(len(totals_of(n, tokens, block)) * len(context) + (drafter is not None) for n in rows)
        task = progress.add_task("measuring", total=kinds)
        try:
            table = StepCostTable.profile(
                target,
                drafter,
                rows=rows,
                tokens_per_row=tokens,
                context=context,
                samples=args.samples,
                block=block,
                command=args.words,
                progress=lambda: progress.advance(task),
            )
        except KeyboardInterrupt:
            raise Interrupted(
                "a table is whole or nothing, so none was written; fewer --rows or --samples are quicker"
            ) from None
    table.save(args.out)
    console = Console()
    for length in context:
        console.print(_shown(table, length, tokens))
    if table.unstable:
        console.print(
            f"? {len(table.unstable)} of {len(table.steps) + len(table.drafts)} kinds varied by more than a fifth: "
            "something else was running; measure again when the machine is quiet.",
            style="yellow",
        )
    console.print(f"Written to {args.out}", soft_wrap=True)
    write_json(args.json, table.to_dict())
    return 0


def _shown(table: StepCostTable, context: int, widths: list[int]) -> Table:
    """Milliseconds by rows and tokens a row; a question mark where the samples vary."""
    from rich.table import Table

    steps = {(cost.rows, cost.tokens / cost.rows): cost for cost in table.steps if cost.context == context}
    drafts = {cost.rows: cost for cost in table.drafts}
    shown = Table(title=f"Milliseconds, context {context}", title_justify="left")
    for heading in ("rows", *(f"{width} a row" for width in widths), *(["draft"] if drafts else [])):
        shown.add_column(heading, justify="right")
    for rows in sorted({rows for rows, _ in steps}):
        costs = [steps[rows, width] for width in widths] + ([drafts[rows]] if drafts else [])
        marks = ["?" if cost in table.unstable else "" for cost in costs]
        values = (f"{1000 * cost.seconds:.1f}{mark}" for cost, mark in zip(costs, marks, strict=True))
        shown.add_row(str(rows), *values)
    return shown
