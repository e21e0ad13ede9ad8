"""Where greedy texts of the real pair part from those of `generate`, and how near the scores of both tokens lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_dspark.divergence import NEAR_TIE_ULPS, Divergence, ulp

from .bench import Bench
from .pair import NO_PAIR, batches_of, first_turns, greedy_configs
from .report import Line, Task
from .summary import COMPILED


MOST_PROMPTS = 128
Texts = Sequence[Sequence[int]]


def divergence(bench: Bench) -> Iterator[Task]:
    """Rounds of the loop, and for comparison `generate` with a growing cache, against `generate` with a static one."""
    settings, loaded = bench.settings, bench.pair
    if loaded is None:
        yield {}, lambda: NO_PAIR
        return
    distinct = list(dict.fromkeys(first_turns(settings)))[:MOST_PROMPTS]
    rows = min(*settings.some_rows(64), len(distinct))
    batches = batches_of(loaded, distinct[: len(distinct) // rows * rows], rows)

    def measure() -> list[Line]:
        rounds, static = greedy_configs(bench, loaded)
        paths = {
            f"rounds, {settings.engine}": {"generation_config": rounds, "assistant_model": loaded.drafter},
            "generate": {"generation_config": loaded.config(settings.pair_tokens)},
            COMPILED: {"generation_config": static},
        }
        prompts = [
            row[mask.bool()]
            for batch in batches
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        texts: dict[str, list[list[int]]] = {}
        with bench.forced.paused():
            for name, options in paths.items():
                outputs = [loaded.target.generate(**batch, **options).sequences for batch in batches]
                texts[name] = [ids for out in outputs for ids in loaded.new_ids(out, batches[0]["input_ids"].shape[1])]
        plain = texts.pop(COMPILED)
        return [{"compared": name, **parted(loaded.target, prompts, these, plain)} for name, these in texts.items()]

    yield {"rows": rows, "new_tokens": settings.pair_tokens, "against": COMPILED}, measure


@torch.no_grad()
def parted(target: PreTrainedModel, prompts: Sequence[torch.Tensor], texts: Texts, plain: Texts) -> Line:
    """
    The first divergence of each row, judged by one forward of the target over all that came before it, and held
    against another in float32 with the same weights.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[torch.LongTensor]`): `(length,)` ids without padding, on the target's device.
        texts, plain (`Sequence[Sequence[int]]`): New tokens of each row, of the path in question and of the plain one.

    Raises:
        RuntimeError: a text stops where the other goes on, which no score explains.
    """
    exact: PreTrainedModel | None = None
    found: list[dict[str, Any]] = []
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, texts, plain, strict=True)):
        if list(ours) == list(theirs):
            continue
        place = next((k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            raise RuntimeError(f"Row {row} has {len(ours)} tokens and {len(theirs)} by the plain path, equal so far.")
        exact = exact or in_float32(target)
        before = torch.cat((prompt, prompt.new_tensor(theirs[:place])))[None]
        token, plain_token = ours[place], theirs[place]
        logits = target(before).logits[0, -1]
        unit, scores = ulp(logits, logits.dtype), logits.float()
        first, second = scores.topk(2).values.tolist()
        deficit = first - float(torch.minimum(scores[token], scores[plain_token]))  # neither may be far from the best
        one = Divergence(place, token, plain_token, first - second, deficit, NEAR_TIE_ULPS * unit)
        sure = exact(before).logits[0, -1]
        between = {"apart": float(scores[plain_token] - scores[token]), "ulp": unit}
        between["float32_apart"] = float(sure[plain_token] - sure[token])
        found.append({"row": row, **asdict(one), **between, "verdict": one.verdict})
    apart = [abs(line["apart"]) for line in found]
    return {
        "prompts": len(prompts),
        "tokens": sum(map(len, texts)),
        "divergences": len(found),
        "defects": sum(line["verdict"] == "defect" for line in found),
        "largest_margin": max(apart, default=0.0),
        "largest_margin_ulps": max((abs(line["apart"]) / line["ulp"] for line in found), default=0.0),
        "largest_float32_margin": max((abs(line["float32_apart"]) for line in found), default=0.0),
        "found": found,
    }


def in_float32(target: PreTrainedModel) -> PreTrainedModel:
    """Another model of the same weights, in float32."""
    with target.device:
        twin = AutoModelForCausalLM.from_config(target.config, dtype=torch.float32).eval()
    twin.load_state_dict(target.state_dict())
    return twin
