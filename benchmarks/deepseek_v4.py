"""
One round of the drafter inside DeepSeek-V4, at the shape of Flash with random weights, against the bytes it must read.

    python benchmarks/deepseek_v4.py --json out.json                  # the shape of Flash, bfloat16, on CUDA
    python benchmarks/deepseek_v4.py --shape tiny --json out.json     # on the CPU, to see that it runs

A round commits five tokens of each row to the context and drafts a block of five behind them. The floor is what a
machine that does nothing but read would need: every weight once, of the experts those that were chosen, the second
Markov matrix once a drafted token, and the window of the context; at the bandwidth that copying a tensor reaches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

import transformers_dspark  # noqa: F401  (registers the drafter)
from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.cli import write_json
from transformers_dspark.environment import environment


BACKBONE = {"num_experts_per_tok": 6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "o_groups": 8}
BACKBONE |= {"swiglu_limit": 10.0, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}
SHAPES: dict[str, dict[str, Any]] = {
    "flash": {
        "vocab_size": 129280, "hidden_size": 4096, "intermediate_size": 2048, "num_attention_heads": 64,
        "head_dim": 512, "sliding_window": 128, "markov_rank": 256, "mask_token_id": 128799,
        "target_layer_ids": [40, 41, 42], "num_target_layers": 43, "max_position_embeddings": 1048576,
        "backbone_config": BACKBONE | {"n_routed_experts": 256, "q_lora_rank": 1024, "o_lora_rank": 1024},
    },
    "tiny": {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8,
        "head_dim": 32, "sliding_window": 8, "markov_rank": 6, "mask_token_id": 96,
        "target_layer_ids": [1, 2, 3], "num_target_layers": 4, "max_position_embeddings": 1024,
        "backbone_config": BACKBONE | {"n_routed_experts": 8, "q_lora_rank": 48, "o_lora_rank": 24},
    },
}  # fmt: skip
BLOCK, STAGES = 5, 3
ROTARY = {"flash": 64 / 512, "tiny": 8 / 32}


def build(shape: str, experts: int | None, device: torch.device, dtype: torch.dtype) -> DSparkDrafter:
    """A drafter with random weights, made on its device; with an embedding and a head of its own, so no target."""
    fields = dict(SHAPES[shape])
    backbone = dict(fields.pop("backbone_config"))
    backbone["n_routed_experts"] = fitting_experts(fields, backbone["n_routed_experts"], experts, device, dtype)
    config = DSparkConfig(
        **fields,
        backbone_type="deepseek_v4",
        backbone_config=backbone,
        num_hidden_layers=STAGES,
        num_key_value_heads=1,
        layer_types=["sliding_attention"] * STAGES,
        sliding_window_from="anchor",
        has_attention_sinks=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": ROTARY[shape]},
        block_size=BLOCK,
        sample_from_anchor=True,
        own_embeddings=True,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    torch.manual_seed(0)
    with device:
        return AutoModel.from_config(config, dtype=dtype).eval()


def fitting_experts(
    fields: dict[str, Any], most: int, asked: int | None, device: torch.device, dtype: torch.dtype
) -> int:
    """As many experts a stage as were asked for and fit the free memory, of which a tenth stays free."""
    wanted = min(most, asked or most)
    if device.type != "cuda":
        return wanted
    one = 3 * fields["hidden_size"] * fields["intermediate_size"] * dtype.itemsize * STAGES
    others = 6e9  # embedding, head, attention, and room to work in
    fit = int((0.9 * torch.cuda.mem_get_info(device)[0] - others) // one)
    if fit < wanted:
        print(f"{fit} of {wanted} experts a stage fit this GPU.")
    return min(fit, wanted)


class Rounds:
    """A drafter at work on rows of some context; every round begins from the same state."""

    def __init__(self, drafter: DSparkDrafter, rows: int, context: int) -> None:
        config, device = drafter.config, drafter.device
        noise = torch.Generator(device).manual_seed(rows)
        self._drafter, self._length, self._context = drafter, context, drafter.new_context()
        width = config.num_taps * config.target_hidden_size
        taps = torch.randn(rows, context + BLOCK, width, generator=noise, device=device, dtype=drafter.dtype)
        places = torch.arange(context + BLOCK, device=device).expand(rows, -1)
        drafter.extend_context(self._context, taps[:, :context], places[:, :context])
        self._new = taps[:, context:].contiguous(), places[:, context:].contiguous()
        self._anchors = torch.randint(config.vocab_size, (rows,), generator=noise, device=device)
        self._ends = places[:, -1] + 1
        self.commit()

    def commit(self) -> None:
        """Taps of five tokens a row become keys of every stage."""
        self._context.length = self._length
        self._drafter.extend_context(self._context, *self._new)

    def draft(self) -> torch.Tensor:
        """A block a row behind them."""
        return self._drafter.propose(self._anchors, self._ends, self._context).tokens


@contextmanager
def chosen_experts(drafter: DSparkDrafter):
    """Collects, for each stage, how many experts a forward in it chooses."""
    counts: list[int] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, args, out: counts.append(int(out[2].unique().numel())))
        for layer in drafter.layers
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def floor_bytes(drafter: DSparkDrafter, rows: int, context: int, experts: Sequence[int]) -> dict[str, float]:
    """Bytes that a round must read, by what they are. Of the embedding and the first Markov matrix: a line a token."""
    parts = dict.fromkeys(("experts", "other stage weights", "context projection", "head", "markov", "context"), 0.0)
    for name, weight in drafter.named_parameters():
        if ".experts." in name:
            continue
        kind = {"fc": "context projection", "hidden_norm": "context projection", "lm_head": "head"}
        start = name.partition(".")[0]
        if name == "markov_head.markov_w2.weight":
            parts["markov"] += BLOCK * weight.nbytes
        elif start not in ("embed_tokens", "markov_head"):
            parts[kind.get(start, "other stage weights")] += weight.nbytes
    for layer, count in zip(drafter.layers, experts, strict=True):
        parts["experts"] += sum(weight[:count].nbytes for weight in layer.mlp.experts.parameters())
    entry = drafter.config.head_dim * drafter.dtype.itemsize * STAGES
    parts["context"] = rows * min(context + BLOCK, drafter.config.sliding_window or context) * entry
    return parts


def seconds(work: Callable[[], object], device: torch.device, samples: int) -> float:
    """Median seconds of `work()` behind two that warm up, with the host's part of it."""
    taken = []
    for sample in range(2 + samples):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        if sample >= 2:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def captured(work: Callable[[], object]) -> Callable[[], None] | str:
    """The same work as a CUDA graph, which needs no host; or why it cannot be captured."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:  # an operation that waits for the device
        torch.cuda.synchronize()
        return " ".join(str(error).split())[:200]
    return graph.replay


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that copying a tensor reads and writes."""
    source = torch.ones(2**29 if device.type == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device, 10)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure(drafter: DSparkDrafter, rows: int, context: int, samples: int, bandwidth: float) -> dict[str, Any]:
    """Figures of a round with this number of rows."""
    device, rounds = drafter.device, Rounds(drafter, rows, context)
    with chosen_experts(drafter) as experts:
        rounds.draft()
    parts = floor_bytes(drafter, rows, context, experts)
    floor = sum(parts.values()) / bandwidth

    def both() -> None:
        rounds.commit()
        rounds.draft()

    figures: dict[str, Any] = {
        "rows": rows,
        "context": context,
        "experts_chosen_by_stage": experts,
        "floor_bytes": sum(parts.values()),
        "floor_bytes_by_part": parts,
        "floor_milliseconds": 1e3 * floor,
        "commit_milliseconds": 1e3 * seconds(rounds.commit, device, samples),
        "draft_milliseconds": 1e3 * seconds(rounds.draft, device, samples),
        "round_milliseconds": 1e3 * seconds(both, device, samples),
    }
    if device.type == "cuda":
        replay = captured(both)
        if isinstance(replay, str):
            figures["not_captured"] = replay
        else:
            figures["captured_round_milliseconds"] = 1e3 * seconds(replay, device, samples)
    best = figures.get("captured_round_milliseconds", figures["round_milliseconds"])
    return figures | {"times_the_floor": best / figures["floor_milliseconds"]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/deepseek_v4.py", description=__doc__.splitlines()[1])
    parser.add_argument("--shape", choices=SHAPES, default="flash")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="committed tokens (default: 512)")
    parser.add_argument("--experts", type=int, metavar="N", help="of a stage (default: all, or as many as fit)")
    parser.add_argument("--implementation", nargs="+", default=["grouped_mm"], metavar="NAME", help="of the experts")
    parser.add_argument("--samples", type=int, default=30, metavar="N", help="(default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if min(*args.rows, args.context, args.samples, args.experts or 6) < 1 or (args.experts or 6) < 6:
        parser.error("--rows, --context and --samples must be at least 1, and --experts at least 6.")
    if args.shape == "flash" and not torch.cuda.is_available():
        parser.error("--shape flash needs a CUDA device of 50 GB or more; use --shape tiny here.")
    device = torch.device("cuda" if args.shape == "flash" else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began = time.perf_counter()
    drafter = build(args.shape, args.experts, device, dtype)
    wait(device)
    result: dict[str, Any] = {
        "environment": environment(device, ["python", "benchmarks/deepseek_v4.py", *(words or sys.argv[1:])]),
        "shape": args.shape,
        "experts_by_stage": drafter.config.backbone_config["n_routed_experts"],
        "bytes_in_memory": sum(tensor.nbytes for tensor in drafter.parameters()),
        "seconds_to_build": time.perf_counter() - began,
        "copy_bytes_per_second": (bandwidth := copy_bandwidth(device)),
        "rounds": [],
    }
    size = f"{result['bytes_in_memory'] / 1e9:.1f} GB"
    print(
        f"{size} built in {result['seconds_to_build']:.1f} s; copying reaches {bandwidth / 1e12:.2f} TB/s", flush=True
    )
    for name in args.implementation:
        for layer in drafter.layers:
            layer.mlp.experts.config._experts_implementation = name
        for rows in args.rows:
            figures = {"experts_implementation": name} | measure(drafter, rows, args.context, args.samples, bandwidth)
            result["rounds"].append(figures)
            write_json(args.json, result)  # what is measured stays, whatever comes next
            graph = figures.get("captured_round_milliseconds")
            print(
                f"{name}, {rows} row{'s' * (rows > 1)}: a round takes {figures['round_milliseconds']:.2f} ms, "
                f"{'' if graph is None else f'captured {graph:.2f} ms, '}the floor is "
                f"{figures['floor_milliseconds']:.2f} ms for {figures['floor_bytes'] / 1e9:.2f} GB",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
