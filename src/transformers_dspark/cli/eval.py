"""`dspark eval`: accepted length of a pair on files of prompts."""

from __future__ import annotations

import argparse
from typing import Any

from . import Interrupted, UsageError, add_json_option, write_json
from .pair import add_answer_options, add_pair_options, add_prompts, load_pair, progress_bar


HELP = "measure a drafter's accepted length on files of prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, "+")
    add_answer_options(parser, 256, [0.0])
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 2:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens} leaves no round to measure: give 2 or more.")
    from rich.console import Console
    from rich.table import Table

    from ..environment import environment
    from ..evaluation.prompts import read_conversations
    from ..evaluation.runs import converse
    from ..telemetry import GenerationStats

    files = {path: read_conversations(path, args.limit) for path in args.prompts}
    pair = load_pair(args)
    table = Table("prompts", "temperature", "answers", "tokens", "accepted length", "by position")
    records: list[dict[str, Any]] = []
    report = {
        "environment": environment(pair.target.device, args.words),
        "drafted_tokens": pair.drafter.config.num_draft_tokens,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "max_new_tokens": args.max_new_tokens,
        "results": records,
    }
    try:
        with progress_bar() as progress:
            for path, conversations in files.items():
                for temperature in args.temperature:
                    answers = sum(map(len, conversations))
                    task = progress.add_task(f"{path.stem}, temperature {temperature:g}", total=answers)
                    runs = []
                    for result in converse(pair, conversations, args.max_new_tokens, temperature, args.seed):
                        runs.append(result)
                        progress.advance(task)
                    stats = GenerationStats.merge(result.stats for result in runs)
                    record = {
                        "prompts": path.stem,
                        "temperature": temperature,
                        "conversations": len(conversations),
                        "answers": answers,
                        "tokens": sum(len(result.ids) for result in runs),
                        "rounds": stats.rounds,
                        "accepted_length": stats.mean_accepted_length,
                        "acceptance_by_position": stats.acceptance_by_position,
                        "seconds": sum(result.seconds for result in runs),
                    }
                    records.append(record)
                    shares = " ".join(
                        "-" if share is None else f"{share:.2f}" for share in stats.acceptance_by_position
                    )
                    table.add_row(
                        path.stem,
                        f"{temperature:g}",
                        str(answers),
                        str(record["tokens"]),
                        f"{stats.mean_accepted_length:.3f}",
                        shares,
                    )
    except KeyboardInterrupt:
        if records:
            Console().print(table)
            write_json(args.json, report)
        pairs = [f"{path} --temperature {temperature:g}" for path in files for temperature in args.temperature]
        left = "; ".join(pairs[len(records) :])
        raise Interrupted(f"{len(records)} of {len(pairs)} results are kept; still to do: {left}") from None
    Console().print(table)
    write_json(args.json, report)
    return 0
