"""Options of the commands that run a target with its drafter."""

from __future__ import annotations

import argparse

from . import path_or_id


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--target`, `--drafter` and `--device`."""
    parser.add_argument(
        "--target",
        type=path_or_id,
        metavar="PATH",
        help="folder or hub id (default: SmolLM2-135M-Instruct, fetched once)",
    )
    parser.add_argument(
        "--drafter", type=path_or_id, metavar="PATH", help="folder or hub id (default: the one in this checkout)"
    )
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1, cpu (default: cuda if there is one)")
