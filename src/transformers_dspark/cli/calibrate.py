"""`dspark calibrate`: makes a drafter's confidences mean what they say, by temperatures fitted to real decoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import Interrupted, UsageError, add_json_option, json_file, positive_int, write_json
from .pair import add_answer_options, add_pair_options, add_prompts, load_pair, progress_bar


HELP = "fit the temperatures of a drafter's confidences on prompts of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser)
    parser.add_argument("--out", type=json_file, metavar="FILE", help="the temperatures, as JSON")
    parser.add_argument("--store", action="store_true", help="also write them into the drafter's config.json")
    parser.add_argument("--rows", type=positive_int, default=8, metavar="N", help="of a batch (default: %(default)s)")
    add_answer_options(parser, 128, [0.0, 1.0])
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from ..calibration import FEW, ConfidenceCalibration
    from ..checkpoints import read_config
    from ..configuration_dspark import DSparkConfig
    from ..environment import environment
    from ..evaluation.confidences import calibration_figures, labelled_confidences, means, reliability
    from ..evaluation.prompts import read_conversations
    from ..evaluation.real_pair import find_drafter
    from ..evaluation.runs import converse
    from ..evaluation.tables import calibration_table
    from ..telemetry import GenerationStats

    prompts = [turns[:1] for turns in read_conversations(args.prompts, args.limit)]
    if len(prompts) < 2:
        raise UsageError(f"{args.prompts} gives one prompt: give two or more, half to fit and half to judge.")
    drafter = find_drafter(args.drafter)
    if args.store and not Path(drafter, "config.json").is_file():
        raise UsageError(f"--store writes into a folder, and {drafter} is none: give --out instead.")
    if args.store and read_config(drafter).get("model_type") != DSparkConfig.model_type:
        raise UsageError(
            f"--store writes into a canonical folder, and {drafter} is another project's: run `dspark export` with "
            "--to canonical first, or give --out instead."
        )
    pair = load_pair(args)
    if not pair.drafter.config.enable_confidence_head:
        raise UsageError(f"{drafter} has no confidence head, so there is nothing to calibrate.")
    halves: dict[tuple[str, float], list[GenerationStats]] = {
        (half, temperature): [] for temperature in args.temperature for half in ("fit", "judge")
    }
    try:
        with progress_bar() as progress:
            task = progress.add_task("answering", total=len(prompts) * len(args.temperature))
            for (half, temperature), calls in halves.items():
                share = prompts[::2] if half == "fit" else prompts[1::2]
                for answers in converse(pair, share, args.rows, args.max_new_tokens, temperature, args.seed):
                    calls.append(answers.stats)
                    progress.advance(task, len(answers.ids))
    except KeyboardInterrupt:
        answered = sum(len(stats.accepted_lengths) for calls in halves.values() for stats in calls)
        raise Interrupted(
            f"temperatures need both halves, so none are written; --limit {answered} would be done by now"
        ) from None
    applied = ConfidenceCalibration.of(pair.drafter.config).temperatures
    parts = {key: labelled_confidences(GenerationStats.merge(calls), applied) for key, calls in halves.items()}
    blocks: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for half in ("fit", "judge"):
        logits, passed = zip(*(part for key, part in parts.items() if key[0] == half), strict=True)
        blocks[half] = torch.cat(logits), torch.cat(passed)
    if not all(len(logits) for logits, _ in blocks.values()):
        raise UsageError(
            "The answers are too short for a whole block: give more prompts or a larger --max-new-tokens."
        )
    found = ConfidenceCalibration.fit(*blocks["fit"])
    figures = calibration_figures(*blocks["judge"], applied, found.temperatures)
    points = reliability(*blocks["judge"], applied, found.temperatures)
    console = Console()
    console.print(calibration_table(figures, found))
    print(f"fitted on {found.samples} blocks, judged on {len(blocks['judge'][0])} of other prompts")
    if found.uncertain:
        console.print(
            f"? Fewer than {FEW} blocks say something about drafted tokens from number {found.uncertain[0]} on "
            f"({found.reached[-1]} about the last): take their temperatures for a guess, and give more prompts or a "
            "larger --max-new-tokens.",
            style="yellow",
        )
    if args.out:
        found.save(args.out)
    if args.store:
        config = DSparkConfig.from_pretrained(drafter)
        found.store_in(config)
        config.save_pretrained(drafter)
    result: dict[str, Any] = {
        "environment": environment(pair.target.device, args.words),
        "temperatures": list(found.temperatures),
        "fitted_on_blocks": found.samples,
        "fitted_on_blocks_by_position": list(found.reached),
        "judged_on_blocks": len(blocks["judge"][0]),
        "means": means(figures),
        "means_by_temperature": {
            f"{temperature:g}": means(calibration_figures(*part, applied, found.temperatures))
            for (half, temperature), part in parts.items()
            if half == "judge" and len(part[0])
        },
        "positions": [{**line, **bins} for line, bins in zip(figures, points, strict=True)],
    }
    write_json(args.json, result)
    return 0
