"""Tiny targets, and drafters that are right as often as a test wants."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from transformers_dspark import DSparkConfig, DSparkDrafter


VOCAB = 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class ScriptedDrafter(DSparkDrafter):
    """A real drafter, but for its logits: they favour the target's true continuation, except at chosen slots."""

    script: list[int]
    wrong_slots: list[int | None]
    rounds: int

    def block_states(self, anchor_ids, position_ids, context):
        wrong = self.wrong_slots[self.rounds % len(self.wrong_slots)]
        self.rounds += 1
        start = context.length + 1  # real tokens up to and including the anchor
        base = torch.zeros(1, self.config.block_size, self.config.vocab_size)
        for k in range(self.config.block_size):
            truth = self.script[start + k] if start + k < len(self.script) else 0
            base[0, k, (truth + 1) % self.config.vocab_size if k == wrong else truth] = 5.0
        self.scripted_base = base
        return super().block_states(anchor_ids, position_ids, context)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scripted_base[:, : hidden.shape[1]]


@dataclass
class Lab:
    """Builders, with the targets already made."""

    targets: dict[str, PreTrainedModel] = field(default_factory=dict)

    def target(self, kind: str = "llama", **changes: Any) -> PreTrainedModel:
        key = f"{kind}{sorted(changes.items())}"
        if key not in self.targets:
            torch.manual_seed(0)
            common = {**SMALL, "num_hidden_layers": 3, "initializer_range": 0.3, "max_position_embeddings": 512}
            # no token ends a text unless a test says so
            common |= {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1} | changes
            if kind == "llama":
                model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common))
            elif kind == "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**common, use_sliding_window=False))
            else:  # every other layer sees the last six tokens only; scaled embeddings, softcapped logits
                model = Gemma2ForCausalLM(Gemma2Config(**{"sliding_window": 6, "query_pre_attn_scalar": 8, **common}))
            self.targets[key] = model.eval()
        return self.targets[key]

    def config(self, **changes: Any) -> DSparkConfig:
        options = {"block_size": 4, "target_layer_ids": [0, 1], "num_hidden_layers": 1, "mask_token_id": 2}
        return DSparkConfig(**{**SMALL, **options, **changes})

    def drafter(self, **changes: Any) -> DSparkDrafter:
        torch.manual_seed(1)
        return DSparkDrafter(self.config(**{"markov_rank": 8, "enable_confidence_head": True, **changes})).eval()

    def scripted(self, script: torch.Tensor, wrong: list[int | None] | None = None, **changes: Any) -> ScriptedDrafter:
        """`script` holds prompt and continuation without padding; `wrong` cycles over the rounds."""
        torch.manual_seed(1)
        drafter = ScriptedDrafter(self.config(**changes)).eval()
        drafter.script, drafter.rounds = script.flatten().tolist(), 0
        drafter.wrong_slots = wrong or [*range(drafter.config.block_size), None]
        return drafter


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.tensor([[5, 17, 3, 42, 9, 60, 21]])


@pytest.fixture
def both(lab: Lab) -> Callable[..., tuple[Any, Any]]:
    """Plain generate, and the same with a drafter that knows the plain continuation but errs at every slot in turn."""

    def run(target: PreTrainedModel, prompt: torch.Tensor, block: int = 4, **options: Any) -> tuple[Any, Any]:
        options = {"do_sample": False, "max_new_tokens": 20, **options}
        rebuilt = {
            k: v() if callable(v) and k in ("cache", "logits_processor", "stopping_criteria") else v
            for k, v in options.items()
        }
        plain = target.generate(prompt, **rebuilt)
        sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
        mask = options.get("attention_mask")
        real = sequences if mask is None else sequences[:, int((mask == 0).sum()) :]
        drafter = lab.scripted(real, block_size=block)
        rebuilt = {
            k: v() if callable(v) and k in ("cache", "logits_processor", "stopping_criteria") else v
            for k, v in options.items()
        }
        return plain, target.generate(prompt, assistant_model=drafter, **rebuilt)

    return run
