"""Ragged batches, targets of many families, and drafters for batches that are right as often as a test wants."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.slot.conftest import SMALL, VOCAB, Lab
from transformers_dspark import DSparkDrafter, StepCostTable
from transformers_dspark.step_costs import DraftCost, StepCost


COMMON = {
    **SMALL,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
OWN_VALUES = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}
SHARED_VALUES = {"attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 2}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=6)),
    # its layers learn of their window by the mask alone
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **COMMON,
            **EXPERTS,
            num_experts=4,
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **EXPERTS, num_experts=4)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **MIXED, query_pre_attn_scalar=8)),
    # inputs of each layer's own, and a last layer that reads the keys and values of an earlier one
    "gemma4-small": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **COMMON, **OWN_VALUES, sliding_window=6, layer_types=[*MIXED["layer_types"][:2]] * 1 + ["full_attention"]
        )
    ),
    # full layers whose values are their keys
    "gemma4": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **COMMON | {"hidden_size_per_layer_input": 0},
            **SHARED_VALUES,
            sliding_window=6,
            layer_types=[*MIXED["layer_types"][:2], "full_attention"],
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **COMMON,
            **MIXED,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, pad_token_id=0, **GPT2)
    ),
}


class BatchDrafter(DSparkDrafter):
    """
    A real drafter, but for its logits: they favour the row's true continuation, with one wrong slot that moves from
    round to round. Rows are told apart by their anchors; where two texts look alike there, drafts may be wrong.
    """

    script: list[list[int]]
    rounds: int
    errs: bool = True

    def block_states(self, anchor_ids, position_ids, context):
        size, vocab = self.config.block_size, self.config.vocab_size
        base = torch.zeros(len(anchor_ids), size, vocab)
        for row, (anchor, place) in enumerate(zip(anchor_ids.tolist(), position_ids.tolist(), strict=True)):
            texts = [t for t in self.script if place < len(t) and t[place] == anchor]
            truth = [*texts[0][place + 1 :], *[0] * size] if texts else [0] * size
            for k in range(size):
                wrong = self.errs and (self.rounds + row) % (size + 1) == k
                base[row, k, (truth[k] + wrong) % vocab] = 5.0
        self.rounds += 1
        self.scripted_base = base
        return super().block_states(anchor_ids, position_ids, context)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scripted_base[:, : hidden.shape[1]]


class FixedTable(StepCostTable):
    """A table that learns nothing from the rounds, so that what is decided depends on no clock."""

    def refreshed(self, *args: Any) -> StepCostTable:
        return self

    def refreshed_draft(self, *args: Any) -> StepCostTable:
        return self


class BatchLab(Lab):
    def target(self, kind: str = "llama", **changes: Any) -> PreTrainedModel:
        if kind not in FAMILIES:
            return super().target(kind, **changes)
        if kind not in self.targets:
            torch.manual_seed(0)
            self.targets[kind] = FAMILIES[kind]().eval()
        return self.targets[kind]

    def knowing(self, texts: list[list[int]], **changes: Any) -> BatchDrafter:
        """`texts` are prompts and continuations without padding."""
        torch.manual_seed(1)
        drafter = BatchDrafter(self.config(**{"markov_rank": 8, "enable_confidence_head": True, **changes})).eval()
        torch.nn.init.zeros_(drafter.markov_head.markov_w2.weight)  # logits are those of the script
        drafter.script, drafter.rounds = texts, 0
        return drafter

    def table(
        self, per_token: float = 0.1, draft: float = 0.05, kind: type[StepCostTable] = FixedTable
    ) -> StepCostTable:
        """A step of one second and `per_token` for every packed token."""
        steps = tuple(StepCost(rows, n, 0, 1 + per_token * n) for rows in (1, 8) for n in (rows, 16 * rows))
        return kind(steps, (DraftCost(1, draft), DraftCost(8, draft)))


def ragged(rows: int, length: int = 9, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of `length`, `length - 1`, ... tokens, with their mask."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(length) >= torch.arange(rows)[:, None] % length).long()
    return ids * mask, mask


def texts_of(sequences: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Prompts and continuations without the padding on the left."""
    return [row[int((seen == 0).sum()) :].tolist() for row, seen in zip(sequences, mask, strict=True)]


def rebuilt(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call; what keeps state is made anew by the function that stands in its place."""
    fresh = ("logits_processor", "stopping_criteria", "streamer")
    return {name: value() if name in fresh else value for name, value in options.items()}


@pytest.fixture(scope="session")
def lab() -> BatchLab:
    return BatchLab()


@pytest.fixture
def both(lab: BatchLab) -> Callable[..., tuple[Any, Any]]:
    """Plain generate for ragged prompts, and the same with a drafter that knows the plain continuation and errs."""

    def run(target: PreTrainedModel, rows: int = 4, block: int = 4, **options: Any) -> tuple[Any, Any]:
        ids, mask = ragged(rows)
        options = {"do_sample": False, "max_new_tokens": 20, "attention_mask": mask, **options}
        plain = target.generate(ids, **rebuilt(options))
        sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
        drafter = lab.knowing(texts_of(sequences, mask), block_size=block)
        return plain, target.generate(ids, assistant_model=drafter, **rebuilt(options))

    return run
