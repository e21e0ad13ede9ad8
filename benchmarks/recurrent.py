"""
Targets with recurrent state: a round against a step of `generate`, by rows, with forced acceptance.

    python -m benchmarks.recurrent --json out.json                                 # tiny, on the CPU
    python -m benchmarks.recurrent --shape 4b --rows 1 32 --json recurrent.json    # on a CUDA machine

Shapes are those of Qwen3.5, weights are random, and the acceptance is that of a published profile: drafting and
verification are done in full, and what passes is decided by a table. On a GPU rounds are played as the host drives
them, and compiled and captured. The peers are `generate` with a static cache, whose steps Transformers compiles on a
GPU, and `generate` as it is. Where an engine or a peer does not run the reason is written in its place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.cli import write_json
from transformers_dspark.environment import environment

from .gpu.peers import step_seconds
from .gpu.profiles import ACCEPTED_LENGTH, ForcedAcceptance, RoundClock
from .gpu.rounds import ENGINES, FIRST_ROUNDS, Batch
from .gpu.shapes import Models


BLOCK = 7
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "tie_word_embeddings": True},
    "4b": {"vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
    | {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_key_heads": 16}
    | {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"tie_word_embeddings": True},
}


def build(shape: str, device: torch.device, dtype: torch.dtype) -> Models:
    """A target of random weights, made on the device, and a drafter of five layers with a Markov head."""
    torch.manual_seed(0)
    sizes, tiny = SHAPES[shape], shape == "tiny"
    config = Qwen3_5TextConfig(**sizes, eos_token_id=None, pad_token_id=0)
    layers, names = config.num_hidden_layers, ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    with device:
        target = Qwen3_5ForCausalLM._from_config(config, dtype=dtype).eval()
        drafter = DSparkDrafter(
            DSparkConfig(
                **{name: sizes[name] for name in (*names, "num_attention_heads", "num_key_value_heads")},
                num_hidden_layers=1 if tiny else 5,
                block_size=BLOCK,
                mask_token_id=2,
                markov_rank=8 if tiny else 256,
                target_layer_ids=sorted({1, layers // 2, layers - 2}),
            )
        )
    return Models(shape, target, drafter.to(dtype).eval().bind_target(target))


def drafted(batch: Batch, clock: RoundClock, profile: str, engine: str) -> dict[str, Any]:
    """Rounds of our loop, and what its mixers read again; or why there are none."""
    try:
        for _ in range(2):  # the first warms up, compiles and captures
            found = batch.run(profile, engine)
    except Exception as error:  # what cannot be captured says why
        return {"failure": f"{type(error).__name__}: {error}".split("\n")[0]}
    finally:
        batch.models.drafter.captured = None  # room for the next
    stats = clock.stats
    read = sum(stats.reread_tokens[FIRST_ROUNDS:]) / len(stats.reread_tokens[FIRST_ROUNDS:])
    window = batch.rows * (1 + found.sent)
    return found.to_dict() | {"reread_tokens_per_round": read, "reread_share_of_mixer_tokens": read / (read + window)}


def peers_of(batch: Batch) -> dict[str, float | str]:
    """Tokens per second without a drafter, or why there are none."""
    rates: dict[str, float | str] = {}
    for name, options in {"generate": {}, "static cache": {"cache_implementation": "static"}}.items():
        try:
            seconds = step_seconds(batch.models.target, batch.ids, 64 if options else 24, **options)
        except Exception as error:  # a peer that does not run is a finding, and not ours to mend
            rates[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            rates[name] = batch.rows / seconds
    return rates


def measure(batch: Batch, clock: RoundClock, profile: str, engines: list[str]) -> dict[str, Any]:
    peers = peers_of(batch)
    found = {engine: drafted(batch, clock, profile, engine) for engine in engines}
    for line in found.values():
        if "failure" not in line:
            rates = {name: rate for name, rate in peers.items() if isinstance(rate, float)}
            line["speed_up"] = {name: line["tokens_per_second"] / rate for name, rate in rates.items()}
    return {"rows": batch.rows, "peers_tokens_per_second": peers, "engines": found}


def main(argv: list[str] | None = None) -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], metavar="N", help="(default: 1 4)")
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="that are timed (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="of a prompt (default: %(default)s)")
    parser.add_argument("--profile", choices=ACCEPTED_LENGTH, default="math", help="(default: %(default)s)")
    parser.add_argument(
        "--engines",
        choices=ENGINES,
        nargs="+",
        default=["eager", "compiled"] if cuda else ["eager"],
        help="of our rounds (default: eager, on CUDA also compiled)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if min(*args.rows, args.context, args.rounds) < 1:
        parser.error("--rows, --context and --rounds must be at least 1.")
    if args.shape != "tiny" and not cuda:
        parser.error(f"--shape {args.shape} needs a CUDA machine: leave it at tiny.")
    device = torch.device("cuda" if cuda else "cpu")
    models = build(args.shape, device, torch.bfloat16 if cuda else torch.float32)
    clock, results = RoundClock(device), []
    forced = ForcedAcceptance(clock, max(args.rows), BLOCK)
    command = ["python", "-m", "benchmarks.recurrent", *(sys.argv[1:] if argv is None else argv)]
    with forced, clock:
        for rows in args.rows:
            batch = Batch(models, rows, args.context, args.rounds, clock, forced)
            results.append(measure(batch, clock, args.profile, args.engines))
            if args.json is not None:  # after each, so that what was measured stays if a later one fails
                write_json(
                    args.json,
                    {
                        "environment": environment(device, command),
                        "shape": args.shape,
                        "context": args.context,
                        "acceptance": f"forced, the profile {args.profile}",
                        "results": results,
                    },
                )
    show(results, Console())
    return 0


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table("rows", "engine", "round, ms", "step, ms", "tokens/s", "static cache", "generate", "read again")
    reasons = []
    for result in results:
        peers = result["peers_tokens_per_second"]
        rates = [
            f"{peers[name]:.0f}" if isinstance(peers[name], float) else "-" for name in ("static cache", "generate")
        ]
        for engine, line in result["engines"].items():
            if "failure" in line:
                table.add_row(str(result["rows"]), engine, "-", "-", "-", *rates, "-")
                reasons.append(f"{result['rows']} rows, {engine}: {line['failure']}")
                continue
            step = line["step_seconds"]
            table.add_row(
                str(result["rows"]),
                engine,
                f"{line['seconds'] * 1e3:.1f}",
                "-" if step is None else f"{step * 1e3:.1f}",
                f"{line['tokens_per_second']:.0f}",
                *rates,
                f"{line['reread_tokens_per_round']:.1f}",
            )
    console.print(table)
    for reason in reasons:
        console.print(reason, markup=False)


if __name__ == "__main__":
    sys.exit(main())
