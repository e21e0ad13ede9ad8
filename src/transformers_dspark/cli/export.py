"""`dspark export`: a drafter in the form of another project, for the engines that serve that form."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import UsageError, add_json_option, path_or_id, write_json


HELP = "write a drafter in the form of DeepSpec, SpecForge or speculators, or in this package's own"
FORMS = ("deepspec", "specforge", "speculators", "canonical")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=path_or_id, metavar="DRAFTER", help="folder or hub id, of any family")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument("--to", choices=FORMS, required=True, help="whose form")
    parser.add_argument(
        "--target",
        type=path_or_id,
        metavar="PATH",
        help="write this target's embedding and head into the file too",
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
    from huggingface_hub import HfApi
    from rich.console import Console
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from ..evaluation.real_pair import find_drafter
    from ..exporting import export_drafter
    from ..inspection import Inspection
    from ..modeling_dspark import DSparkDrafter

    logging.disable_progress_bar()
    drafter = DSparkDrafter.from_pretrained(find_drafter(args.drafter), own_embeddings=args.own_embeddings)
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
