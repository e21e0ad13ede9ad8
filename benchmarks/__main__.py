"""
`python -m benchmarks`: figures of the real pair on this machine, as a table and a JSON file.

Repeats are interleaved (alone, drafted, alone, ...) and medians are taken, so that a machine whose speed drifts
favours no side. The ids of all repeats are compared.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from transformers_dspark.cli import device_of, write_json
from transformers_dspark.environment import environment
from transformers_dspark.evaluation.prompts import DEMO_PROMPTS
from transformers_dspark.evaluation.real_pair import fetch_target, find_drafter
from transformers_dspark.evaluation.runs import Pair, run
from transformers_dspark.telemetry import GenerationStats


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Figures of the real pair on this machine."
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of each generation (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--device", metavar="NAME", help="cuda, cpu (default: cuda if there is one)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/local.json"), metavar="FILE")
    args = parser.parse_args()
    result = {
        "environment": environment(device_of(args.device), ["python", "-m", "benchmarks", *sys.argv[1:]]),
        "import": import_seconds(),
        "speed": speed(args),
    }
    write_json(args.json, result)
    table = Table("drafting", "alone, tokens/s", "drafted, tokens/s", "speed-up", "accepted length", "same ids")
    for line in result["speed"]["drafting"]:
        table.add_row(
            line["name"],
            f"{line['alone_tokens_per_second']:.1f}",
            f"{line['drafted_tokens_per_second']:.1f}",
            f"{line['speed_up']:.2f}x",
            f"{line['accepted_length']:.2f}",
            "yes" if line["same_ids"] else "NO",
        )
    Console().print(table)
    added = result["import"]["added_share"]
    print(f"import transformers_dspark adds {added:.1%} to import transformers; figures in {args.json}")
    return 0


def import_seconds(repeats: int = 7) -> dict[str, float]:
    """Median seconds of `import transformers`, alone and with this package behind it; fresh processes, interleaved."""
    statements = {"transformers": "import transformers", "both": "import transformers, transformers_dspark"}
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(repeats):
        for name, statement in statements.items():
            code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
            process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            seconds[name].append(float(process.stdout))
    plain, both = (statistics.median(seconds[name]) for name in statements)
    return {"transformers": plain, "with_transformers_dspark": both, "added_share": both / plain - 1}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second over the demonstration's prompts, greedy: total tokens over the sum of median times."""
    pair = Pair.load(str(fetch_target()), find_drafter(), device_of(args.device))
    prompts = [pair.prompt_ids([{"role": "user", "content": text}]) for text in DEMO_PROMPTS.values()]
    run(pair, prompts[0], 8, drafted=False), run(pair, prompts[0], 8, drafted=True)  # warm-up
    lines = []
    for name, options in {"whole blocks": {}, "as the demonstration": pair.quick_options}.items():
        clock, tokens, stats, same = {False: 0.0, True: 0.0}, 0, [], True
        for ids in prompts:
            runs: dict[bool, list[Any]] = {False: [], True: []}
            for _ in range(args.repeats):
                for drafted in (False, True):
                    runs[drafted].append(run(pair, ids, args.max_new_tokens, drafted=drafted, **options))
            for drafted, repeats in runs.items():
                clock[drafted] += statistics.median(r.seconds for r in repeats)
            same &= all(r.ids.equal(runs[False][0].ids) for repeats in runs.values() for r in repeats)
            tokens += len(runs[True][0].ids)
            stats.append(runs[True][0].stats)
        total = GenerationStats.merge(stats)
        lines.append(
            {
                "name": name,
                "options": options,
                "alone_tokens_per_second": tokens / clock[False],
                "drafted_tokens_per_second": tokens / clock[True],
                "speed_up": clock[False] / clock[True],
                "accepted_length": total.mean_accepted_length,
                "draft_milliseconds_per_round": total.draft_seconds / total.rounds * 1e3,
                "verify_milliseconds_per_round": total.verify_seconds / total.rounds * 1e3,
                "tokens": tokens,
                "same_ids": same,
            }
        )
    return {
        "target": "SmolLM2-135M-Instruct",
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "drafting": lines,
    }


if __name__ == "__main__":
    sys.exit(main())
