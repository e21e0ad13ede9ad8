"""
What records of rounds cost: seconds inside the trace over seconds of the rounds, and what runs when nobody asked.

    python -m benchmarks.tracing mt-bench.jsonl --costs costs.json --json tracing.json

The share is taken within each run, so the drift of a machine is in both parts of it. `off` is a profile: the calls of
functions in the files that trace, of which there must be none.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from transformers_dspark import RoundStatistics, StepCostTable, decoding
from transformers_dspark.batch.trace import RoundTrace, RowCounts
from transformers_dspark.cli import device_of, write_json
from transformers_dspark.environment import environment
from transformers_dspark.evaluation.prompts import read_conversations
from transformers_dspark.evaluation.real_pair import fetch_target, find_drafter
from transformers_dspark.evaluation.runs import Pair
from transformers_dspark.telemetry import TraceFile


TRACING = ("trace.py", "ceiling.py", "round_statistics.py", "calibration.py")


@contextmanager
def clock() -> Iterator[list[float]]:
    """Seconds that each round spends on its record: from the counts of its rows until the callback has returned."""
    seconds: list[float] = []
    began, add = [0.0], RoundTrace.add

    def counts(*args: Any) -> RowCounts:
        began[0] = time.perf_counter()
        return RowCounts(*args)

    def timed(self: RoundTrace, *args: Any) -> None:
        add(self, *args)
        seconds.append(time.perf_counter() - began[0])

    decoding.RowCounts, RoundTrace.add = counts, timed
    try:
        yield seconds
    finally:
        decoding.RowCounts, RoundTrace.add = RowCounts, add


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__.splitlines()[1])
    parser.add_argument("prompts", type=Path, metavar="FILE", help="JSON lines; first turns are taken")
    parser.add_argument("--costs", type=Path, required=True, metavar="FILE", help="table of `dspark profile`")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the rounds that went to a file")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    prompts = [turns[0] for turns in read_conversations(args.prompts, max(args.rows))]
    table = StepCostTable.load(args.costs)
    pair = Pair.load(str(fetch_target()), find_drafter(), device_of("cpu"))

    def generate(rows: int, temperature: float, callback: Callable[..., object] | None) -> Any:
        # blocks are trimmed, so that their ceilings have to be looked up in later rounds
        options = {"verify_mode": "compact", "scheduler": "causal", "step_cost_table": table, "seed": 0}
        config = pair.config(args.max_new_tokens, temperature, round_callback=callback, **options)
        return pair.target.generate(
            **pair.batch(prompts[:rows]), generation_config=config, assistant_model=pair.drafter
        ).dspark

    results = []
    with tempfile.TemporaryDirectory() as folder:
        file = TraceFile(args.trace or Path(folder) / "rounds.jsonl")
        callbacks = {"statistics": RoundStatistics(), "file": file}
        for rows in args.rows:
            for temperature in (0.0, 1.0):
                for name, callback in callbacks.items():
                    with clock() as seconds:
                        stats = generate(rows, temperature, callback)
                    total = stats.draft_seconds + stats.verify_seconds
                    results.append(
                        {
                            "rows": rows,
                            "temperature": temperature,
                            "callback": name,
                            "rounds": len(seconds),
                            "microseconds_of_a_record": 1e6 * statistics.median(seconds),
                            "milliseconds_of_a_round": 1e3 * total / stats.rounds,
                            "share": sum(seconds) / total,
                        }
                    )
    profile = cProfile.Profile()
    rounds = profile.runcall(generate, max(args.rows), 1.0, None).rounds
    calls: dict[str, int] = dict.fromkeys(TRACING, 0)
    for (path, _, function), (count, *_) in pstats.Stats(profile).stats.items():
        # every call asks once whether a trace is wanted
        if Path(path).name in calls and "transformers_dspark" in path and function != "asked_for":
            calls[Path(path).name] += count
    result = {
        "environment": environment(pair.target.device, ["python", "-m", "benchmarks.tracing", *sys.argv[1:]]),
        "target": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "on": results,
        "off": {"rounds": rounds, "calls_by_file": calls},
    }
    write_json(args.json, result)
    shown = Table("rows", "T", "callback", "rounds", "us a record", "ms a round", "share")
    for line in results:
        figures = [f"{line['microseconds_of_a_record']:.0f}", f"{line['milliseconds_of_a_round']:.0f}"]
        figures.append(f"{line['share']:.2%}")
        shown.add_row(str(line["rows"]), f"{line['temperature']:g}", line["callback"], str(line["rounds"]), *figures)
    Console().print(shown)
    print(f"off: {sum(calls.values())} calls in {', '.join(TRACING)} over {rounds} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
