"""
Targets with recurrent state: a round against a step of `generate`, by rows, with forced acceptance.

    python -m benchmarks.recurrent --json out.json                                              # tiny, on the CPU
    python -m benchmarks.recurrent --shape 4b --rows 1 32 --tokens 256 --json recurrent.json    # on a CUDA machine

Shapes are those of Qwen3.5, weights are random, and the acceptance is that of a published profile: drafting and
verification are done in full, and what passes is decided by a table. The peers are `generate` with a static cache,
whose steps Transformers compiles on a GPU, and `generate` as it is. Where the static cache does not work the reason is
written in its place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from transformers_dspark import DSparkConfig, DSparkDrafter, DSparkGenerationConfig
from transformers_dspark.cli import write_json
from transformers_dspark.environment import environment

from .gpu.peers import step_seconds
from .gpu.profiles import ACCEPTED_LENGTH, JUDGED, ForcedAcceptance, RoundClock


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


def build(shape: str, device: torch.device, dtype: torch.dtype) -> tuple[Qwen3_5ForCausalLM, DSparkDrafter]:
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
    return target, drafter.to(dtype).eval().bind_target(target)


def drafted(
    target: Qwen3_5ForCausalLM, drafter: DSparkDrafter, ids: torch.Tensor, tokens: int, clock: RoundClock
) -> dict[str, float]:
    """Seconds of a round of our loop while no row has ended, and what its mixers read again."""
    config = DSparkGenerationConfig(
        do_sample=False, max_new_tokens=tokens, dspark_loop="batched", return_dict_in_generate=True
    )
    for _ in range(2):  # the first warms up
        clock.restart()
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, generation_config=config
        )
    stats, seconds = output.dspark, clock.seconds()[:, JUDGED]
    rounds = np.arange(2, min(map(len, stats.accepted_lengths)) - 1)
    if len(rounds) < 2:
        raise ValueError(f"--tokens {tokens} are over after {len(rounds)} rounds that could be timed: give more.")
    read = sum(stats.reread_tokens[rounds[0] : rounds[-1] + 1]) / len(rounds)
    window = sum(len(ids) + sum(row[number] for row in stats.verify_lengths) for number in rounds) / len(rounds)
    return {
        "round_seconds": float((seconds[rounds[-1]] - seconds[rounds[0] - 1]) / len(rounds)),
        "reread_tokens_per_round": read,
        "reread_share_of_mixer_tokens": read / (read + window),
        "rounds": len(rounds),
    }


def measure(
    target: Qwen3_5ForCausalLM,
    drafter: DSparkDrafter,
    rows: int,
    context: int,
    tokens: int,
    profile: str,
    forced: ForcedAcceptance,
    clock: RoundClock,
) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, target.config.vocab_size, (rows, context), generator=noise).to(target.device)
    peers: dict[str, Any] = {}
    for name, options in {"generate": {}, "static cache": {"cache_implementation": "static"}}.items():
        try:
            peers[name] = rows / step_seconds(target, ids, 64 if options else 24, **options)
        except Exception as error:  # a peer that does not run is a finding, and not ours to mend
            peers[name] = f"{type(error).__name__}: {error}"
    forced.use(profile, rows, BLOCK)
    result = drafted(target, drafter, ids, tokens, clock)
    length = ACCEPTED_LENGTH[profile]
    result |= {"rows": rows, "accepted_length": length, "peers_tokens_per_second": peers}
    result["tokens_per_second"] = rows * length / result["round_seconds"]
    rates = {name: rate for name, rate in peers.items() if isinstance(rate, float)}
    return result | {"speed_up": {name: result["tokens_per_second"] / rate for name, rate in rates.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], metavar="N", help="(default: 1 4)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="new tokens a row (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="of a prompt (default: %(default)s)")
    parser.add_argument("--profile", choices=ACCEPTED_LENGTH, default="math", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if min(*args.rows, args.context) < 1 or args.tokens < 48:
        parser.error("--rows and --context must be at least 1, and --tokens at least 48.")
    if args.shape != "tiny" and not torch.cuda.is_available():
        parser.error(f"--shape {args.shape} needs a CUDA machine: leave it at tiny.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, drafter = build(args.shape, device, dtype)
    clock, results = RoundClock(device), []
    forced = ForcedAcceptance(clock, max(args.rows), BLOCK)
    command = ["python", "-m", "benchmarks.recurrent", *(sys.argv[1:] if argv is None else argv)]
    with forced, clock:
        for rows in args.rows:
            results.append(measure(target, drafter, rows, args.context, args.tokens, args.profile, forced, clock))
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
    table = Table("rows", "round, ms", "tokens/s", "static cache", "generate", "read again a round")
    for line in results:
        peers = line["peers_tokens_per_second"]
        shown = [
            f"{peers[name]:.0f}" if isinstance(peers[name], float) else "-" for name in ("static cache", "generate")
        ]
        table.add_row(
            str(line["rows"]),
            f"{line['round_seconds'] * 1e3:.1f}",
            f"{line['tokens_per_second']:.0f}",
            *shown,
            f"{line['reread_tokens_per_round']:.1f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
