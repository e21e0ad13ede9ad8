"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers_dspark.cli import UsageError, device_of, json_file, positive_float, positive_int
from transformers_dspark.environment import environment
from transformers_dspark.generation_config import VERIFY_MODES

from . import __doc__ as about
from .bench import Bench, Settings
from .parts import PARTS
from .pictures import draw
from .profiles import PROFILES
from .report import Report, print_summary
from .rounds import ENGINES
from .shapes import SHAPES
from .summary import summary


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    try:
        return _run(parser().parse_args(words), words)
    except (UsageError, OSError, ImportError, ValueError) as error:
        print(f"benchmarks.gpu: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks.gpu: stopped; the file of --json holds what was measured", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, words: list[str]) -> int:
    deadline = time.monotonic() + 60 * args.minutes
    if args.plot is not None:
        for path in draw(_result(args.plot), args.plot.parent, args.plot.stem):
            print(path)
        return 0
    parts = list(PARTS) if args.parts is None else args.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"--parts {args.parts}: there is no part {unknown[0]!r}; give some of {','.join(PARTS)}")
    settings = settings_of(args)
    header = {
        "environment": environment(settings.device, ["python", "-m", "benchmarks.gpu", *words]),
        "settings": {name: _plain(value) for name, value in vars(settings).items()},
    }
    if args.add:
        header |= _earlier(args.json, header)
    report = Report(args.json, header, deadline)
    with Bench(settings, deadline) as bench:
        report.add("device", {"copy_bytes_per_second": bench.bandwidth})
        for part in parts:
            bench.make_room()
            report.measure(part, PARTS[part][0](bench), bench.release)
    print_summary(summary(report.result["parts"]))
    return 0


def _earlier(path: Path | None, header: dict[str, Any]) -> dict[str, Any]:
    """What an earlier command wrote to a file, and where that was measured."""
    if path is None or not path.exists():
        return {}
    before = _result(path)
    for of, name in (("environment", "device"), ("settings", "shape")):
        if before[of][name] != header[of][name]:
            raise UsageError(
                f"--add: {path.name} has {name} {before[of][name]}, not {header[of][name]}: name another file"
            )
    kept = {name: lines for name, lines in before["parts"].items() if name != "device"}
    return {"parts": kept, "earlier": [*before.get("earlier", []), before["environment"]]}


def _result(path: Path) -> dict[str, Any]:
    """What an earlier command wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    needed = {"environment": {"device"}, "settings": {"shape"}, "parts": set()}
    about = found if isinstance(found, dict) else {}
    if not all(isinstance(about.get(name), dict) and keys <= about[name].keys() for name, keys in needed.items()):
        raise UsageError(f"{path} is no result of this benchmark: give a file that its --json wrote")
    return found


def settings_of(args: argparse.Namespace) -> Settings:
    device = device_of("cpu" if args.shape == "tiny" and args.device is None else args.device)
    engine = args.engine or ("compiled" if device.type == "cuda" else "eager")
    if device.type != "cuda" and engine != "eager":
        raise UsageError(f"--engine {engine} needs CUDA, and the device is {device}: leave it out")
    if device.type != "cuda" and args.shape != "tiny":
        raise UsageError(f"--shape {args.shape} needs CUDA, and the device is {device}: give --shape tiny here")
    for path in (args.pair_target, args.pair_prompts):
        if path is not None and not path.exists():
            raise UsageError(f"{path} does not exist: give the target's folder, or a file of prompts")
    return Settings(
        shape=args.shape,
        device=device,
        rows=tuple(sorted(set(args.rows))),
        contexts=tuple(sorted(set(args.context))),
        profiles=tuple(args.profiles),
        modes=tuple(args.modes),
        peer_rows=tuple(sorted(set(args.peer_rows))),
        rounds=args.rounds,
        engine=engine,
        engines=tuple(args.engines) if device.type == "cuda" else (engine,),
        pair_target=args.pair_target,
        pair_drafter=args.pair_drafter,
        pair_prompts=args.pair_prompts,
        pair_tokens=args.pair_tokens,
    )


def parser() -> argparse.ArgumentParser:
    seconds = ", ".join(f"{part} {estimate}" for part, (_, estimate) in PARTS.items())
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=about,
        epilog=f"Expected seconds on an H200 with the defaults, compilation aside: {seconds}.",
    )
    add = made.add_argument
    add("--parts", metavar="A,B", help=f"some of {','.join(PARTS)} (default: all)")
    add("--shape", choices=SHAPES, default="8b", help="of Qwen3, with random weights (default: %(default)s)")
    add("--rows", type=positive_int, nargs="+", default=[1, 8, 32, 64, 128, 256], metavar="N")
    add("--context", type=positive_int, nargs="+", default=[512], metavar="N", help="(default: %(default)s)")
    add("--profiles", choices=PROFILES, nargs="+", default=list(PROFILES), help="of acceptance (default: all)")
    add("--modes", choices=VERIFY_MODES, nargs="+", default=list(VERIFY_MODES), help="(default: all)")
    add("--peer-rows", type=positive_int, nargs="+", default=[1, 32], metavar="N", help="(default: %(default)s)")
    add("--rounds", type=positive_int, default=40, metavar="N", help="counted in a call (default: %(default)s)")
    add("--engine", choices=ENGINES, help="how the loop runs the target (default: compiled; on a CPU eager)")
    add("--engines", choices=ENGINES, nargs="+", default=list(ENGINES), help="that `verify` compares (default: all)")
    add("--minutes", type=positive_float, default=60.0, metavar="M", help="then nothing more is measured")
    add("--pair-target", type=Path, metavar="FOLDER", help="the real target, for the parts pair and divergence")
    add("--pair-drafter", metavar="FOLDER", help="its drafter (default: the one of the repository)")
    add("--pair-prompts", type=Path, metavar="FILE", help='JSON lines of {"turns": ["..."]}')
    add("--pair-tokens", type=positive_int, default=160, metavar="N", help="of an answer (default: %(default)s)")
    add("--device", metavar="NAME", help="cuda, cpu (default: cuda if there is one)")
    add("--json", type=json_file, metavar="FILE", help="the result, written after every line")
    add("--add", action="store_true", help="keep what FILE holds, except lines about the same")
    add("--plot", type=Path, metavar="FILE", help="draw the pictures of a result beside it, and measure nothing")
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return value if isinstance(value, (int, float, str, type(None))) else _listed(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    sys.exit(main())
