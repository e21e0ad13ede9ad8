"""
A target with recurrent state: tokens a second with a drafter against plain generate, and what is read again.

    python benchmarks/recurrent.py --json out.json                      # tiny, on the CPU
    python benchmarks/recurrent.py --shape 4b --rows 1 32 --tokens 256  # a Qwen3.5-like 4B shape on CUDA

Weights are random, and the drafter writes the target's own continuation with one wrong token where the next of
`--accepted` says so: acceptance is forced, while drafting and verification are paid in full.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from transformers_dspark import DSparkConfig, DSparkDrafter, DSparkGenerationConfig


SHAPES = {
    "tiny": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "initializer_range": 0.3},
    "4b": {"vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
    | {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_key_heads": 16}
    | {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}


class Forced(DSparkDrafter):
    """Its drafts are the continuation `texts[row]`, but for a wrong one behind the next accepted length."""

    texts: torch.Tensor
    accepted: list[int]
    rounds: int

    def propose(self, anchor_ids, position_ids, context, *, width=None, select=None, keep_going=None):
        places = position_ids[:, None] + torch.arange(1, self.config.block_size + 1, device=position_ids.device)
        truth = self.texts[: len(anchor_ids)].gather(1, places.clamp(max=self.texts.shape[1] - 1))
        slot = self.accepted[self.rounds % len(self.accepted)] - 1
        if slot < truth.shape[1]:
            truth[:, slot] = (truth[:, slot] + 1) % self.config.vocab_size
        self.rounds += 1
        self.base = torch.nn.functional.one_hot(truth, self.config.vocab_size).to(self.dtype) * 50
        return super().propose(anchor_ids, position_ids, context, width=width, select=select, keep_going=keep_going)

    def unembed(self, hidden):
        super().unembed(hidden)  # its price is paid
        return self.base[:, : hidden.shape[1]]


def timed(call, device):
    started = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--accepted", type=int, nargs="+", default=[6, 7, 5, 8, 6, 6, 5, 6], help="bonus included")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if args.shape != "tiny" else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    config = Qwen3_5TextConfig(**shape, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        target = Qwen3_5ForCausalLM._from_config(config, dtype=dtype).eval()
        layers = config.num_hidden_layers
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
        sizes = {name: shape[name] for name in (*sizes, "num_key_value_heads")}
        options = {"block_size": 7, "num_hidden_layers": min(5, layers), "mask_token_id": 2, "markov_rank": 0}
        taps = sorted({1, layers // 2, layers - 2})
        drafter = Forced(DSparkConfig(**sizes, **options, target_layer_ids=taps)).to(dtype).eval()
    results = []
    for rows in args.rows:
        ids = torch.randint(3, config.vocab_size, (rows, 32), device=device)
        greedy = {"do_sample": False, "max_new_tokens": args.tokens}
        target.generate(ids, do_sample=False, max_new_tokens=8)
        plain, plain_seconds = timed(lambda ids=ids, greedy=greedy: target.generate(ids, **greedy), device)
        drafter.texts, drafter.accepted = plain, args.accepted
        ours = DSparkGenerationConfig(**greedy, return_dict_in_generate=True)
        for _ in range(2):  # the first warms up
            drafter.rounds = 0
            call = lambda ids=ids, ours=ours: target.generate(ids, assistant_model=drafter, generation_config=ours)  # noqa: E731
            output, seconds = timed(call, device)
        stats = output.dspark
        read = sum(stats.reread_tokens)
        verified = sum(map(sum, stats.verify_lengths)) + sum(map(len, stats.verify_lengths))
        results.append(
            {
                "rows": rows,
                "same_tokens": bool(torch.equal(plain, output.sequences)),
                "plain_tokens_per_second": rows * args.tokens / plain_seconds,
                "tokens_per_second": rows * args.tokens / seconds,
                "mean_accepted_length": stats.mean_accepted_length,
                "reread_tokens_per_round": read / max(1, stats.rounds),
                "reread_share_of_mixer_tokens": read / max(1, read + verified),
            }
        )
        print(json.dumps(results[-1]))
    if args.json is not None:
        args.json.write_text(json.dumps({"shape": args.shape, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
