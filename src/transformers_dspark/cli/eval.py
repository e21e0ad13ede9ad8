"""`dspark eval`: accepted length of a pair on files of prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import UsageError, add_json_option, device_of, positive_int, seed, valid_temperature, write_json
from .pair import add_pair_options


HELP = "measure a drafter's accepted length on files of prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, nargs="+", metavar="FILE", help='JSON lines of {"turns": ["..."]}')
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N conversations of each file")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=256, metavar="N", help="of each answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=valid_temperature,
        nargs="+",
        default=[0.0],
        metavar="T",
        help="0 is greedy; several may be given",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the draws at temperatures above 0")
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 2:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens} leaves no round to measure: give 2 or more.")
    device = device_of(args.device)
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from transformers.utils import logging

    from ..environment import environment
    from ..evaluation.prompts import read_conversations
    from ..evaluation.real_pair import fetch_target, find_drafter
    from ..evaluation.runs import Pair, converse
    from ..telemetry import GenerationStats

    files = {path: read_conversations(path, args.limit) for path in args.prompts}
    drafter = find_drafter(args.drafter)
    logging.disable_progress_bar()
    pair = Pair.load(args.target or str(fetch_target()), drafter, device)
    table = Table("prompts", "temperature", "answers", "tokens", "accepted length", "by position")
    records = []
    with Progress(transient=True) as progress:
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
                shares = " ".join("-" if share is None else f"{share:.2f}" for share in stats.acceptance_by_position)
                table.add_row(
                    path.stem,
                    f"{temperature:g}",
                    str(answers),
                    str(record["tokens"]),
                    f"{stats.mean_accepted_length:.3f}",
                    shares,
                )
    Console().print(table)
    write_json(
        args.json,
        {
            "environment": environment(device, args.words),
            "drafted_tokens": pair.drafter.config.num_draft_tokens,
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "max_new_tokens": args.max_new_tokens,
            "results": records,
        },
    )
    return 0
