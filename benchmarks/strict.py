"""
`strict_greedy` on the real pair in half precision: which texts are those of the loop without drafts, and its price.

    python -m benchmarks.strict mt-bench.jsonl --json strict.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from transformers_dspark.cli import device_of, write_json
from transformers_dspark.environment import environment
from transformers_dspark.evaluation.prompts import read_conversations
from transformers_dspark.evaluation.real_pair import fetch_target, find_drafter
from transformers_dspark.evaluation.runs import Pair


WHAT = ("without drafts", "drafted")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strict", description=__doc__.splitlines()[1])
    parser.add_argument("prompts", type=Path, metavar="FILE", help="JSON lines; first turns are taken")
    parser.add_argument("--limit", type=int, default=12, metavar="N")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="of a batch")
    parser.add_argument("--max-new-tokens", type=int, default=24, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    texts = [turns[0] for turns in read_conversations(args.prompts, args.limit)]
    pair = Pair.load(str(fetch_target()), find_drafter(), device_of(args.device), getattr(torch, args.dtype))

    def generate(batch: dict[str, torch.Tensor], strict: bool, drafts: bool) -> tuple[torch.Tensor, Any, float]:
        width = {} if drafts else {"max_verify_tokens": 0}
        config = pair.config(args.max_new_tokens, dspark_loop="batched", strict_greedy=strict, **width)
        began = time.perf_counter()
        out = pair.target.generate(**batch, generation_config=config, assistant_model=pair.drafter)
        ids = out.sequences.cpu()  # waits for the device
        return ids, out.dspark, time.perf_counter() - began

    sides = {f"{name}, {what}": (name == "strict", what == "drafted") for name in ("strict", "free") for what in WHAT}
    found: dict[str, dict[str, float]] = {side: {"seconds": 0.0, "round_seconds": 0.0, "rounds": 0} for side in sides}
    same = {"strict": 0, "free": 0}
    for first in range(0, len(texts), args.rows):
        batch = pair.batch(texts[first : first + args.rows])
        ids = {}
        for side, (strict, drafts) in sides.items():
            ids[side], stats, seconds = generate(batch, strict, drafts)
            found[side]["seconds"] += seconds
            found[side]["round_seconds"] += stats.draft_seconds + stats.verify_seconds
            found[side]["rounds"] += stats.rounds
        for name in same:
            same[name] += int((ids[f"{name}, drafted"] == ids[f"{name}, without drafts"]).all(dim=1).sum())
        print(f"{min(first + args.rows, len(texts))} of {len(texts)}: {same}", file=sys.stderr)
    for line in found.values():
        line["milliseconds_of_a_round"] = 1e3 * line["round_seconds"] / max(1, line["rounds"])
    result = {
        "environment": environment(pair.target.device, ["python", "-m", "benchmarks.strict", *sys.argv[1:]]),
        "target": "SmolLM2-135M-Instruct",
        "dtype": args.dtype,
        "rows": args.rows,
        "max_new_tokens": args.max_new_tokens,
        "prompts": len(texts),
        "texts_equal_to_those_without_drafts": same,
        "sides": found,
    }
    write_json(args.json, result)
    shown = Table("loop", "rounds", "ms a round", "s in rounds", "equal texts")
    for side, line in found.items():
        name, _, what = side.partition(", ")
        equal = f"{same[name]} of {len(texts)}" if what == "drafted" else ""
        figures = f"{line['milliseconds_of_a_round']:.0f}", f"{line['round_seconds']:.1f}"
        shown.add_row(side, str(int(line["rounds"])), *figures, equal)
    Console().print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
