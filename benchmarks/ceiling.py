"""
Acceptance ceilings of trimmed blocks: the bounds that compact estimates, beside the truth that cap-accept sees.

    python -m benchmarks.ceiling mt-bench.jsonl humaneval.jsonl gsm8k.jsonl --costs costs.json --json ceiling.json

Both modes decode the same prompts with the same seeds and a table of step costs that learns nothing, so they take the
same decisions and each block of one is a block of the other. A window is what `CeilingWindow` keeps: the latest
blocks, whose mean ceiling is bounded; beside those of the run, random ones are drawn from its blocks, because windows
that follow each other share nearly all of theirs. Above temperature 0 the truth of a single block is one outcome of an
expectation, and scatters around it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from transformers_dspark import StepCostTable
from transformers_dspark.ceiling import CeilingWindow, acceptance_ceiling
from transformers_dspark.cli import device_of, write_json
from transformers_dspark.environment import environment
from transformers_dspark.evaluation.prompts import read_conversations
from transformers_dspark.evaluation.real_pair import fetch_target, find_drafter
from transformers_dspark.evaluation.runs import Pair
from transformers_dspark.telemetry import BlockCeiling, RoundRecord, TraceFile, read_trace


class FixedTable(StepCostTable):
    """Learns nothing from the rounds: what is decided depends on no clock."""

    def refreshed(self, *args: Any) -> StepCostTable:
        return self

    def refreshed_draft(self, *args: Any) -> StepCostTable:
        return self


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceiling", description=__doc__.splitlines()[1])
    parser.add_argument("prompts", type=Path, nargs="+", metavar="FILE", help="JSON lines; first turns are taken")
    parser.add_argument("--costs", type=Path, required=True, metavar="FILE", help="table of `dspark profile`")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="prompts of each file")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="of a batch")
    parser.add_argument("--scheduler", choices=("causal", "lagged"), default="causal", help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 256], metavar="N", help="blocks of a window")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    files = [[turns[0] for turns in read_conversations(path, args.limit)] for path in args.prompts]
    prompts = list(chain.from_iterable(zip(*files, strict=False)))  # mixed, as a server's are
    pair = Pair.load(str(fetch_target()), find_drafter(), device_of("cpu"))
    costs = StepCostTable.load(args.costs)
    table = FixedTable(costs.steps, costs.drafts, costs.staircase, costs.target, costs.measured)
    results: list[dict[str, Any]] = []
    result = {
        "environment": environment(pair.target.device, ["python", "-m", "benchmarks.ceiling", *sys.argv[1:]]),
        "target": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "prompts": {path.stem: len(found) for path, found in zip(args.prompts, files, strict=True)},
        "rows": args.rows,
        "scheduler": args.scheduler,
        "max_new_tokens": args.max_new_tokens,
        "results": results,
    }
    for temperature in args.temperature:
        traces = {m: trace(pair, prompts, table, m, temperature, args) for m in ("compact", "cap-accept")}
        results.append({"temperature": temperature, **compared(traces, args.windows)})
        write_json(args.json, result)
    shown = Table("T", "blocks", "trimmed", "window", "inside", "width", "drawn: inside", "width")
    for line in results:
        for found in line["windows"]:
            figures = []
            for side in (found, found["drawn"]):
                figures += [f"{side['inside']:.1%}", f"{side['mean_width']:.3f}"] if side["windows"] else ["-", "-"]
            counts = [str(line["blocks"]), str(line["trimmed"]), str(found["blocks"])]
            shown.add_row(f"{line['temperature']:g}", *counts, *figures)
    Console().print(shown)
    return 0


def trace(
    pair: Pair, prompts: list[str], table: StepCostTable, mode: str, temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Records of every call, the texts, and whether the file of rounds says the same as the callback heard."""
    calls: list[list[RoundRecord]] = []
    texts, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = TraceFile(Path(folder) / "rounds.jsonl")
        for first in range(0, len(prompts), args.rows):
            records: list[RoundRecord] = []

            def hear(record: RoundRecord, records: list[RoundRecord] = records) -> None:
                records.append(record)
                file(record)

            config = pair.config(
                args.max_new_tokens,
                temperature,
                verify_mode=mode,
                scheduler=args.scheduler,
                step_cost_table=table,
                round_callback=hear,
                seed=first,
            )
            inputs = pair.batch(prompts[first : first + args.rows])
            out = pair.target.generate(**inputs, generation_config=config, assistant_model=pair.drafter)
            texts.append(out.sequences.tolist())
            calls.append(records)
            print(f"{mode}, temperature {temperature:g}: {first + args.rows} of {len(prompts)}", file=sys.stderr)
        window = CeilingWindow()
        for record in chain.from_iterable(calls):
            window.add(record)
        same = acceptance_ceiling(read_trace(Path(folder) / "rounds.jsonl")) == window.bounds
    return {"calls": calls, "texts": texts, "file_agrees": same, "seconds": time.perf_counter() - began}


def compared(traces: dict[str, dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Bounds of compact against the truth of cap-accept, block by block and window by window."""
    compact, exact = traces["compact"], traces["cap-accept"]
    same = [ours == theirs for ours, theirs in zip(compact["texts"], exact["texts"], strict=True)]
    pairs: list[tuple[BlockCeiling, float]] = []
    for ours, theirs, usable in zip(compact["calls"], exact["calls"], same, strict=True):
        truth = {(c.row, c.round): c.lower for record in theirs for c in record.ceilings}
        pairs += [(c, truth[c.row, c.round]) for record in ours for c in record.ceilings if usable]
    rounds = list(chain.from_iterable(compact["calls"]))
    trimmed = sum(s < d for r in rounds for d, s in zip(r.drafted, r.sent, strict=True))
    draws = random.Random(0)
    found = []
    for size in (1, *sizes):
        following = [pairs[k : k + size] for k in range(len(pairs) - size + 1)]
        found.append({"blocks": size, **_judged(following), "drawn": _judged(_drawn(pairs, size, draws))})
    return {
        "blocks": len(pairs),
        "trimmed": trimmed,
        "rounds": len(rounds),
        "calls": len(same),
        "calls_with_equal_texts": sum(same),
        "file_agrees": compact["file_agrees"] and exact["file_agrees"],
        "mean_lower": statistics.fmean(c.lower for c, _ in pairs),
        "mean_truth": statistics.fmean(true for _, true in pairs),
        "mean_upper": statistics.fmean(c.upper for c, _ in pairs),
        "windows": found,
        "seconds": {mode: traces[mode]["seconds"] for mode in traces},
    }


def _drawn(pairs: list[tuple[BlockCeiling, float]], size: int, draws: random.Random) -> Iterator[Any]:
    return (draws.choices(pairs, k=size) for _ in range(2000))


def _judged(windows: Iterable[Sequence[tuple[BlockCeiling, float]]]) -> dict[str, Any]:
    """How many windows there are, the share whose true mean lies between the mean bounds, and how wide these are."""
    inside, widths = [], []
    for window in windows:
        low, true, high = (sum(values) for values in zip(*((c.lower, t, c.upper) for c, t in window), strict=True))
        inside.append(low - 1e-6 <= true <= high + 1e-6)
        widths.append((high - low) / len(window))
    if not inside:
        return {"windows": 0, "inside": None, "mean_width": None}
    return {"windows": len(inside), "inside": statistics.fmean(inside), "mean_width": statistics.fmean(widths)}


if __name__ == "__main__":
    sys.exit(main())
