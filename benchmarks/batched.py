"""
`python -m benchmarks.batched`: the batched loop beside plain batched `generate`, at several batch sizes.

For each row count a warm-up, then interleaved repeats of plain generate and of the loop in its modes over the same
left-padded prompts; medians are taken and all ids compared. Step costs are measured first, on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from transformers_dspark import DSparkGenerationConfig, StepCostTable
from transformers_dspark.cli import device_of, write_json
from transformers_dspark.environment import environment
from transformers_dspark.evaluation.prompts import read_conversations
from transformers_dspark.evaluation.real_pair import fetch_target, find_drafter
from transformers_dspark.evaluation.runs import Pair


MODES: dict[str, dict[str, Any]] = {
    "static": {"verify_mode": "static"},
    "compact": {},
    "compact, causal": {"scheduler": "causal"},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batched", description="The batched loop of the real pair."
    )
    parser.add_argument("prompts", type=Path, nargs="+", metavar="FILE", help='JSON lines of {"turns": ["..."]}')
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], metavar="R", help="(default: 1 4 16)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["compact"], help="(default: compact)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="a table of step costs, instead of measuring one")
    parser.add_argument("--device", metavar="NAME", help="cuda, cpu (default: cuda if there is one)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/local-batched.json"), metavar="FILE")
    args = parser.parse_args()
    pair = Pair.load(str(fetch_target()), find_drafter(), device_of(args.device))
    if args.costs is None:
        table = StepCostTable.profile(
            pair.target, pair.drafter, rows=args.rows, tokens_per_row=(1, 2, 3, 4, 6, 8), context=(96, 192), samples=5
        )
    else:
        table = StepCostTable.load(args.costs)
    lines = [
        measure(pair, table, file, rows, args)
        for file in args.prompts
        for rows in track(args.rows, description=file.stem)
    ]
    shown = Table("prompts", "rows", "plain, tokens/s", *(f"{mode}" for mode in args.modes), "overhead", "same ids")
    for line in lines:
        figures = [line["modes"][mode] for mode in args.modes]
        shown.add_row(
            line["prompts"],
            str(line["rows"]),
            f"{line['plain_tokens_per_second']:.1f}",
            *(f"{m['tokens_per_second']:.1f} ({m['speed_up']:.2f}x), tau {m['accepted_length']:.2f}" for m in figures),
            f"{figures[0]['overhead_share']:.1%}",
            "yes" if all(m["same_ids"] for m in figures) else "NO",
        )
    Console().print(shown)
    write_json(
        args.json,
        {
            "environment": environment(pair.target.device, ["python", "-m", "benchmarks.batched", *sys.argv[1:]]),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "step_costs": table.to_dict(),
            "runs": lines,
        },
    )
    return 0


def measure(pair: Pair, table: StepCostTable, file: Path, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Plain generate and the loop over the first `rows` prompts of a file."""
    conversations = read_conversations(file, rows)
    texts = [
        pair.tokenizer.apply_chat_template(
            [{"role": "user", "content": turns[0]}], tokenize=False, add_generation_prompt=True
        )
        for turns in conversations
    ]
    pair.tokenizer.padding_side = "left"
    inputs = pair.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(pair.target.device)
    base = pair.target.generation_config

    def once(options: dict[str, Any] | None, tokens: int) -> tuple[float, Any]:
        config = DSparkGenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=base.eos_token_id,
            pad_token_id=pair.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            **({} if options is None else {"dspark_loop": "batched", "step_cost_table": table} | options),
        )
        start = time.perf_counter()
        output = pair.target.generate(
            **inputs, generation_config=config, **({} if options is None else {"assistant_model": pair.drafter})
        )
        output.sequences.cpu()  # waits for the device
        return time.perf_counter() - start, output

    sides: dict[str, dict[str, Any] | None] = {"plain": None, **{mode: MODES[mode] for mode in args.modes}}
    for options in sides.values():
        once(options, 8)
    runs: dict[str, list[tuple[float, Any]]] = {side: [] for side in sides}
    with ForwardClock(pair) as clock:
        forward: dict[str, float] = {}
        for _ in range(args.repeats):
            for side, options in sides.items():
                clock.seconds = 0.0
                runs[side].append(once(options, args.max_new_tokens))
                forward[side] = clock.seconds
    prompt = inputs["input_ids"].shape[1]
    plain = runs["plain"][0][1].sequences
    new = sum(int((row[prompt:] != pair.tokenizer.pad_token_id).sum()) for row in plain)
    seconds = {side: statistics.median(t for t, _ in found) for side, found in runs.items()}
    modes = {}
    for mode in args.modes:
        stats = runs[mode][-1][1].dspark
        sent = sum(map(sum, stats.verify_lengths))
        modes[mode] = {
            "tokens_per_second": new / seconds[mode],
            "speed_up": seconds["plain"] / seconds[mode],
            "accepted_length": stats.mean_accepted_length,
            "rounds": stats.rounds,
            "verified_per_row_and_round": sent / max(1, sum(map(len, stats.verify_lengths))),
            "draft_milliseconds_per_round": 1e3 * stats.draft_seconds / stats.rounds,
            "verify_milliseconds_per_round": 1e3 * stats.verify_seconds / stats.rounds,
            "overhead_share": 1 - forward[mode] / runs[mode][-1][0],
            "schedule": stats.schedule,
            "same_ids": all(out.sequences.equal(plain) for _, out in runs[mode]),
        }
    return {
        "prompts": file.stem,
        "rows": rows,
        "prompt_tokens": int(inputs["attention_mask"].sum()),
        "tokens": new,
        "plain_tokens_per_second": new / seconds["plain"],
        "modes": modes,
    }


class ForwardClock:
    """Seconds inside the models: the target's forwards, the drafter's context, block and chain without the choices."""

    def __init__(self, pair: Pair) -> None:
        self.seconds, self._pair = 0.0, pair

    def __enter__(self) -> ForwardClock:
        begun: list[float] = []
        target, drafter = self._pair.target, self._pair.drafter
        self._hooks = [
            target.register_forward_pre_hook(lambda *_: begun.append(self._now())),
            target.register_forward_hook(lambda *_: self._add(begun.pop())),
        ]
        for name in ("block_states", "context_keys_values"):
            setattr(drafter, name, self._timed(getattr(drafter, name)))
        chain = self._timed(drafter.chain)

        def without_choices(*args: Any, select: Any, **kwargs: Any) -> Any:
            def choose(*given: Any) -> Any:
                begun = self._now()
                chosen = select(*given)
                self.seconds -= self._now() - begun
                return chosen

            return chain(*args, select=choose, **kwargs)

        drafter.chain = without_choices
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name in ("block_states", "context_keys_values", "chain"):
            delattr(self._pair.drafter, name)

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = self._now()
            found = function(*args, **kwargs)
            self._add(begun)
            return found

        return timed

    def _now(self) -> float:
        if self._pair.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _add(self, begun: float) -> None:
        self.seconds += self._now() - begun


if __name__ == "__main__":
    sys.exit(main())
