"""`dspark why`: what limits the speed of a pair, in three sentences, from a measurement on the spot."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from . import Interrupted, UsageError, add_json_option, positive_int, write_json
from .pair import add_answer_options, add_pair_options, add_prompts, add_timing_options, load_pair, progress_bar


if TYPE_CHECKING:
    from rich.table import Table

    from ..evaluation.verdict import SpeedFigures, Verdict

HELP = "say what limits the speed, and which option to try"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, "?")
    parser.add_argument(
        "--rows", type=positive_int, default=1, metavar="N", help="of the batch (default: %(default)s)"
    )
    parser.add_argument("--max-verify-tokens", type=positive_int, metavar="N", help="send no more drafted tokens")
    add_timing_options(parser)
    add_answer_options(parser, 96)
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 3:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens} leaves no round to measure: give 3 or more")
    from rich.console import Console

    from ..environment import environment
    from ..evaluation.limits import measure
    from ..evaluation.prompts import DEMO_PROMPTS, read_conversations
    from ..evaluation.verdict import judge
    from ..step_costs import StepCostTable

    if args.prompts:
        prompts = [turns[0] for turns in read_conversations(args.prompts, args.limit)]
    else:
        prompts = list(DEMO_PROMPTS.values())[: args.limit]
    if len(prompts) < args.rows:
        raise UsageError(
            f"--rows {args.rows} is more than the {len(prompts)} prompts: give more prompts or fewer rows"
        )
    options = {
        "step_cost_table": StepCostTable.load(args.costs) if args.costs else False,
        **({"max_verify_tokens": args.max_verify_tokens} if args.max_verify_tokens else {}),
    }
    pair = load_pair(args)
    try:
        with progress_bar() as bar:
            task = bar.add_task("plain and drafted in turn", total=2 * args.repeats)
            figures = measure(
                pair, prompts[: args.rows], options, args.max_new_tokens, args.repeats, lambda: bar.advance(task)
            )
    except KeyboardInterrupt:
        raise Interrupted(
            "a comparison is whole or nothing, so none was made; fewer --repeats or --max-new-tokens are quicker"
        ) from None
    verdict = judge(figures)
    console = Console()
    console.print(_shown(figures, verdict))
    for sentence in verdict.sentences:
        console.print(sentence, markup=False, highlight=False)
    write_json(
        args.json,
        {
            "environment": environment(pair.target.device, args.words),
            **dataclasses.asdict(verdict),
            "figures": dataclasses.asdict(figures) | {"speed_up": figures.speed_up},
        },
    )
    return 0


def _shown(figures: SpeedFigures, verdict: Verdict) -> Table:
    from rich.table import Table

    table = Table("part of a round", "measured", "as fast without this limit")
    for name, measured in (
        ("drafter acceptance", f"{figures.accepted_length - 1:.2f} of {figures.verify_length:.2f} tokens pass"),
        ("verify cost", f"{1e3 * figures.verify_seconds:.1f} ms, plain {1e3 * figures.plain_step_seconds:.1f} ms"),
        ("draft cost", f"{1e3 * figures.draft_seconds:.1f} ms"),
        ("host overhead", f"{1e3 * figures.host_seconds:.1f} ms"),
    ):
        table.add_row(name, measured, f"{verdict.gains[name]:.2f}x")
    table.add_row("memory", "-" if figures.memory_share is None else f"{figures.memory_share:.0%} of the device", "")
    return table
