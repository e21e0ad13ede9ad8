"""`dspark eval`: accepted length of a pair on files of prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import Interrupted, UsageError, add_json_option, json_file, positive_int, write_json
from .pair import add_answer_options, add_pair_options, add_prompts, load_pair, progress_bar


HELP = "measure a drafter's accepted length on files of prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, "+")
    parser.add_argument("--rows", type=positive_int, default=8, metavar="N", help="of a batch (default: %(default)s)")
    add_answer_options(parser, 256, [0.0])
    parser.add_argument("--markdown", type=json_file, metavar="FILE", help="also write tables to FILE")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also draw into this folder; needs matplotlib")
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 2:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens} leaves no round to measure: give 2 or more.")
    from ..environment import environment
    from ..evaluation.lengths import figures, read_groups
    from ..evaluation.runs import converse
    from ..telemetry import GenerationStats

    parts = [
        (path, domain, language, conversations)
        for path in args.prompts
        for (domain, language), conversations in read_groups(path, args.limit).items()
    ]
    pair = load_pair(args)
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
            for path, domain, language, conversations in parts:
                for temperature in args.temperature:
                    answers = sum(map(len, conversations))
                    task = progress.add_task(f"{path.stem}, temperature {temperature:g}", total=answers)
                    calls = []
                    for call in converse(pair, conversations, args.rows, args.max_new_tokens, temperature, args.seed):
                        calls.append(call)
                        progress.advance(task, len(call.ids))
                    about: dict[str, Any] = {"prompts": path.stem, "domain": domain, "language": language}
                    about |= {"temperature": temperature, "conversations": len(conversations), "answers": answers}
                    tokens = sum(len(ids) for call in calls for ids in call.ids)
                    stats = GenerationStats.merge(call.stats for call in calls)
                    seconds = sum(call.seconds for call in calls)
                    records.append({**about, "tokens": tokens, **figures(stats), "seconds": seconds})
    except KeyboardInterrupt:
        if records:
            _show(report, args)
        kinds = [f"{path} --temperature {t:g}" for path, *_ in parts for t in args.temperature]
        left = "; ".join(dict.fromkeys(kinds[len(records) :]))
        raise Interrupted(f"{len(records)} of {len(kinds)} results are kept; still to do: {left}") from None
    _show(report, args)
    return 0


def _show(report: dict[str, Any], args: argparse.Namespace) -> None:
    from rich.console import Console

    from ..evaluation.lengths import markdown
    from ..evaluation.plots import draw
    from ..evaluation.tables import length_table

    Console().print(length_table(report["results"]))
    write_json(args.json, report)
    if args.markdown:
        args.markdown.write_text(markdown(report), encoding="utf-8")
    if args.pictures:
        print("\n".join(map(str, draw(report, args.pictures, "eval"))))
