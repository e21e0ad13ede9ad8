"""Targets and drafters of published shapes with random weights, made on the device, and the bytes they must read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, MuseGlimmerAssistantConfig, PreTrainedModel, Qwen3Config

from transformers_dspark import DSparkConfig, DSparkDrafter


COMMON = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "4b": COMMON
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": True},
    "8b": COMMON
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "14b": COMMON
    | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40}
    | {"tie_word_embeddings": False},
    "tiny": {"vocab_size": 128, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048}
    | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    | {"tie_word_embeddings": False},
}
TAPS = {36: [1, 9, 17, 25, 33], 40: [1, 10, 19, 28, 37], 3: [0, 1]}  # by layers of the target, as released
BLOCK = 7
LONGEST_BLOCK = 16
MASK_TOKEN = 0


@dataclass(frozen=True)
class Models:
    """A target and its drafter, bound to it."""

    shape: str
    target: PreTrainedModel
    drafter: DSparkDrafter

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def block(self) -> int:
        return self.drafter.config.block_size

    def shortened(self, block: int) -> Models:
        """The same with a drafter, of the same weights, that drafts fewer tokens."""
        config = DSparkConfig(**self.drafter.config.to_dict())
        config.shorten(block)
        with torch.device("meta"):
            drafter = DSparkDrafter(config)
        drafter.load_state_dict(self.drafter.state_dict(), assign=True)
        drafter.rotary_emb = self.drafter.rotary_emb
        return Models(self.shape, self.target, drafter.eval().bind_target(self.target))


def build(shape: str, device: torch.device, dtype: torch.dtype) -> Models:
    """A target of random weights from a fixed seed, and a drafter with a block of 7."""
    torch.manual_seed(0)
    with device:
        config = Qwen3Config(**SHAPES[shape], eos_token_id=None)
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return Models(shape, target, build_drafter(shape, target, BLOCK).bind_target(target))


def build_drafter(shape: str, target: PreTrainedModel, block: int) -> DSparkDrafter:
    """A drafter of five layers with a Markov head of rank 256 and a confidence head; smaller for the tiny shape."""
    sizes, tiny = dict(SHAPES[shape]), shape == "tiny"
    layers = sizes.pop("num_hidden_layers")
    config = DSparkConfig(
        **{name: value for name, value in sizes.items() if name != "tie_word_embeddings"},
        num_hidden_layers=1 if tiny else 5,
        block_size=block,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=TAPS[layers],
        num_target_layers=layers,
        markov_rank=8 if tiny else 256,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    torch.manual_seed(1)
    with target.device:
        return DSparkDrafter(config).to(target.dtype).eval()


def native_assistant(models: Models, block: int = BLOCK + 1) -> PreTrainedModel:
    """The assistant of Transformers' own DFlash, as deep and as wide as the drafter; its block counts the anchor."""
    ours = models.drafter.config
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(ours, name) for name in (*sizes, "head_dim", "max_position_embeddings")},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"] * ours.num_hidden_layers,
        block_size=block,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=ours.target_layer_ids,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with models.device:
        return AutoModel.from_config(config, dtype=models.target.dtype).eval()


def step_bytes(models: Models, rows: int, context: float) -> float:
    """Bytes that a step of the target must read: its weights but the embedding table, keys and values of all rows."""
    target = models.target
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    weights = sum(tensor.numel() for tensor in target.parameters()) - table.numel()
    if head is table:  # then it is counted once, and read as the head
        weights += head.numel()
    return (weights + rows * context * entry_numbers(target.config)) * target.dtype.itemsize


def draft_bytes(models: Models, rows: int, context: float) -> float:
    """
    Bytes that drafting a block must read: the drafter's weights, the head, the second Markov matrix once for each
    drafted token (it is larger than the last-level cache), and the context of all rows.
    """
    drafter, config = models.drafter, models.drafter.config
    head = models.target.get_output_embeddings().weight.numel()
    weights = sum(tensor.numel() for tensor in drafter.parameters()) + head
    if drafter.markov_head is not None:
        first, second = drafter.markov_head.markov_w1.weight.numel(), drafter.markov_head.markov_w2.weight.numel()
        weights += (config.block_size - 1) * second - first  # of the first, a line a row
    return (weights + rows * context * entry_numbers(config)) * drafter.dtype.itemsize


def entry_numbers(config: Any) -> int:
    """Keys and values that a token leaves in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def memory_bytes(models: Models, rows: int, capacity: int) -> float:
    """What a call of the batched loop needs beside the weights, roughly: both caches, and logits of all windows."""
    entries = entry_numbers(models.target.config) + entry_numbers(models.drafter.config)
    caches = (rows + 1) * capacity * entries * models.target.dtype.itemsize
    # scores in float32: of the target's window, their copy, and of the drafter's block
    logits = rows * (models.block + 1) * models.target.config.vocab_size * 4 * 4
    return caches + logits
