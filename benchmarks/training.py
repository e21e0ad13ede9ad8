"""
`python -m benchmarks.training`: a training step at the shape of Qwen3-8B with random weights: peak memory, tokens per
second, and the share of the machine's own rate of matrix products, which is measured in the same run. What may be
quicker, or take less memory:

    python -m benchmarks.training --json one.json                                       # 512 anchors of 4,096 tokens
    python -m benchmarks.training --rows 2 --compile-target --logits-memory 8
    python -m benchmarks.training --pure-bf16 --checkpointing

One GPU against two, over the same batches:

    python -m benchmarks.training --processes 1 2 --json processes.json                 # and --shard-target

One process then accumulates what two share, so their losses should be the same. `--tiny` runs anywhere and measures
nothing of interest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from transformers_dspark.cli import write_json
from transformers_dspark.environment import environment
from transformers_dspark.training import (
    AnswerDataset,
    DrafterShape,
    DSparkTrainer,
    DSparkTrainingArguments,
    new_drafter,
)
from transformers_dspark.training.data import Sequences
from transformers_dspark.training.estimates import estimate_training


QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=(__doc__ or "").split(":")[1])
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="sequences a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, metavar="N", help="tokens of each (default: %(default)s)")
    parser.add_argument("--anchors", type=int, default=512, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="timed, behind 3 others (default: 10, tiny 2)")
    parser.add_argument("--pure-bf16", action="store_true", help="weights and optimiser in bfloat16")
    parser.add_argument("--attention", choices=("auto", "flex", "plain"), default="auto")
    parser.add_argument("--compile-target", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="the drafter's layers computed twice, not kept")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument(
        "--logits-memory", type=float, default=2.0, metavar="GIB", help="for logits at one time (default: 2)"
    )
    parser.add_argument("--shard-target", action="store_true", help="the target's layers spread over the processes")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step (default: 1)")
    parser.add_argument("--processes", type=int, nargs="+", metavar="N", help="run so many at once, one after another")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("the shape of Qwen3-8B needs a CUDA device; use --tiny here.")
    args.steps = args.steps or (2 if args.tiny else 10)
    if args.processes:
        return compare(args, list(sys.argv[1:] if words is None else words))
    if args.tiny:
        args.length, args.anchors = 64, 4
    result = measure(args)
    if result is not None:
        result["environment"] = environment(torch.device("cpu" if args.tiny else "cuda"), ["python", "-m", *sys.argv])
        show(result)
        write_json(args.json, result)
    return 0


def show(result: dict[str, Any]) -> None:
    """A line for each number."""
    for name, value in result.items():
        if isinstance(value, (int, float)):
            print(f"{name:32} {value:,.4g}")


def compare(args: argparse.Namespace, words: list[str]) -> int:
    """The same steps in every number of processes, each launched by itself; speeds and losses beside each other."""
    own = [word for k, word in enumerate(words) if not _belongs(words, k, ("--processes", "--json"))]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.processes:
            file = Path(folder) / f"{number}.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
            rest = ["--accumulate", str(max(args.processes) // number), "--json", str(file)]
            print(f"{number} processes", flush=True)
            subprocess.run([*launch, __file__, *own, *rest], check=True)
            runs.append(json.loads(file.read_text()))
    first, last = runs[0], runs[-1]
    result = {
        "speed_up": last["tokens_per_second"] / first["tokens_per_second"],
        "largest_loss_difference": max(
            abs(theirs / ours - 1) for ours, theirs in zip(first["losses"], last["losses"], strict=True)
        ),
        "runs": {str(number): run for number, run in zip(args.processes, runs, strict=True)},
    }
    show(result)
    write_json(args.json, result)
    return 0


def _belongs(words: list[str], place: int, names: tuple[str, ...]) -> bool:
    """Whether a word is one of these options or a value of it."""
    while place and not words[place].startswith("--"):
        place -= 1
    return words[place].partition("=")[0] in names


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Figures of a run over random tokens; `None` on every process but the first."""
    dtype = torch.float32 if args.tiny else torch.bfloat16
    begun = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {what}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        arguments = DSparkTrainingArguments(
            folder, per_device_train_batch_size=args.rows, anchors=args.anchors, max_steps=args.steps + 3,
            gradient_accumulation_steps=args.accumulate, bf16=not args.tiny and not args.pure_bf16,
            pure_bf16=args.pure_bf16, block_attention=args.attention, compile_target=args.compile_target,
            shard_target=args.shard_target, activation_checkpointing=args.checkpointing,
            drafter_optimizer=args.optimizer, logits_memory=args.logits_memory,
            use_cpu=args.tiny, save_strategy="no", disable_tqdm=True,
            report_to="none", logging_steps=1000,
        )  # fmt: skip
        device = arguments.device
        torch.manual_seed(0)  # every process has the same target
        with device:
            target = AutoModelForCausalLM.from_config(Qwen3Config(**TINY if args.tiny else QWEN3_8B), dtype=dtype)
        rng, count = np.random.default_rng(0), args.rows * arguments.world_size * args.accumulate * (args.steps + 3)
        vocabulary = target.config.vocab_size
        ids = [rng.integers(0, vocabulary, args.length, dtype=np.int64) for _ in range(count)]
        answers = Sequences(ids, np.ones(count, dtype=np.int64), np.ones(count, dtype=bool))
        shape = DrafterShape(num_layers=1, markov_rank=8) if args.tiny else DrafterShape()
        with device:  # where weights are drawn in no time
            drafter = new_drafter(target, shape, answers, 0)
        say("target and drafter are there")
        trainer = Timed(drafter, arguments, target=target, train_dataset=AnswerDataset(answers))
        trainer.train()
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        ends = trainer.ends[args.accumulate - 1 :: args.accumulate]
        say(f"{len(ends)} steps, of which the first took {ends[0] - trainer.begun:.1f} s")
        every = [end - before for before, end in itertools.pairwise(ends[2:])]  # update and all
        seconds = statistics.median(every)
        tokens = arguments.world_size * args.accumulate * args.rows * args.length
        losses = torch.stack(trainer.losses).view(-1, args.accumulate).sum(dim=1)
        losses = trainer.accelerator.reduce(losses, "mean")  # each counts its share as often as there are processes
        rate = matrix_rate(device, dtype, 256 if args.tiny else 8192)
        estimate = estimate_training(
            target, drafter.config, rows=args.rows, length=args.length, anchors=args.anchors, pure_bf16=args.pure_bf16
        )
        if not trainer.is_world_process_zero():
            return None
        return {
            "processes": arguments.world_size,
            "drafter_parameters": estimate.parameters,
            "seconds_per_step": seconds,
            "seconds_of_slowest_step": max(every),
            "tokens_per_second": tokens / seconds,
            "flops_per_step": estimate.flops * args.accumulate,
            "matrix_flops_per_second": rate,
            "utilisation": estimate.flops * args.accumulate / seconds / rate,
            "peak_gib": peak,
            "estimated_gib": estimate.memory / 2**30,
            "losses": losses.tolist(),
            "settings": {name: value for name, value in vars(args).items() if name not in ("json", "processes")},
        }


class Timed(DSparkTrainer):
    """Notes when each step has ended on the device; the first one's compilation is not in the figures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.begun = time.perf_counter()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.losses.append(loss.detach())
        return loss


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of one large square product, the best of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


if __name__ == "__main__":
    sys.exit(main())
