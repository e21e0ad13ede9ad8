"""`dspark export`: a drafter in the form of another project, for the engines that serve that form."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import UsageError, add_json_option, path_or_id, target_place, write_json


HELP = "write a drafter in the form of DeepSpec, SpecForge or speculators, or in this package's own"
FORMS = ("deepspec", "specforge", "speculators", "canonical")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=path_or_id, metavar="DRAFTER", help="folder or hub id, of any family")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument("--to", choices=FORMS, required=True, help="whose form")
    parser.add_argument(
        "--target",
        type=target_place,
        metavar="PATH",
        help="write this target's embedding and head into the file too; canonical: its tokenizer and name instead",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="canonical: accepted lengths for the card, by `dspark eval --json`",
    )
    parser.add_argument(
        "--own-embeddings", action="store_true", help="keep the embedding and head that the drafter's file holds"
    )
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the folder to this repository afterwards")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.out.is_file() or (args.out.is_dir() and any(args.out.iterdir())):
        raise UsageError(f"{args.out} is not empty: name a new folder, or empty this one.")
    if args.target and args.own_embeddings:
        raise UsageError("--target and --own-embeddings each say whose embedding to write: give one of them.")
    if args.results and args.to != "canonical":
        raise UsageError(f"--results goes into the card of the canonical form: leave it out with --to {args.to}.")
    results = read_results(args.results) if args.results else []
    from huggingface_hub import HfApi
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from ..evaluation.real_pair import find_drafter
    from ..exporting import export_drafter
    from ..inspection import Inspection
    from ..modeling_dspark import DSparkDrafter
    from ..packaging import write_repository

    logging.disable_progress_bar()
    drafter = DSparkDrafter.from_pretrained(find_drafter(args.drafter), own_embeddings=args.own_embeddings)
    if args.to == "canonical":
        write_repository(
            drafter,
            args.out,
            repository=args.push_to_hub,
            base_model=None if args.target is None or Path(args.target).exists() else args.target,
            tokenizer=AutoTokenizer.from_pretrained(args.target) if args.target else None,
            results=results,
        )
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto") if args.target else None
        export_drafter(drafter, args.out, args.to, target)
    report, console = Inspection.of(args.out).to_dict(), Console()
    console.print(
        f"Written to {args.out}: {report['family']}, layout {report['layout']['name']}, "
        f"{report['drafted_tokens']} drafted tokens, taps {report['taps']}",
        soft_wrap=True,
    )
    if args.push_to_hub:
        api = HfApi()
        repository = api.create_repo(args.push_to_hub, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=args.out, commit_message=f"Drafter in the form of {args.to}")
        console.print(f"Uploaded to {repository}", soft_wrap=True)
    write_json(args.json, report)
    return 0


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in a file that `dspark eval --json` wrote."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        for record in results:
            _ = record["prompts"] + "", float(record["temperature"]), float(record["accepted_length"])
            _ = int(record["answers"]), list(record["acceptance_by_position"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no results of `dspark eval --json`: {error!r}.") from error
    return results
