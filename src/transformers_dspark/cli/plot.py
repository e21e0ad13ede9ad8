"""`dspark plot`: pictures of the files that the other commands write."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import UsageError, add_json_option, write_json


HELP = "draw what other commands wrote, as PNG and SVG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="of eval, calibrate, profile, bench, or a round trace"
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="(default: this folder)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from ..evaluation.plots import draw, pictures_of, read_result

    results = {path: read_result(path) for path in args.results}
    for path, result in results.items():
        if not pictures_of(result):
            of_gpu = isinstance(result, dict) and "parts" in result
            raise UsageError(
                f"{path} is of the GPU benchmark: draw it with `python -m benchmarks.gpu --plot {path}` in a checkout"
                if of_gpu
                else f"{path} holds nothing to draw: give a file of `dspark eval --json`, `calibrate --json`, "
                "`bench --json`, `profile --out`, or a round trace"
            )
    written = {str(path): [str(p) for p in draw(result, args.out, path.stem)] for path, result in results.items()}
    for names in written.values():
        print("\n".join(names))
    write_json(args.json, {"pictures": written})
    return 0
