"""What a training run will take, from shapes alone: memory of a step, products it forms, time. Estimates all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter


@dataclass(frozen=True)
class TrainingEstimate:
    """
    One step on one device.

    Args:
        parameters (`int`): Of the drafter.
        target_bytes (`int`): Weights of the target.
        state_bytes (`int`): Weights, gradients and both moments of the drafter.
        activation_bytes (`int`): What the target's and the drafter's layers leave until they are needed again.
        logits_bytes (`int`): Logits of a chunk and what the losses make of them, with the heads' own gradients.
        flops (`int`): Operations of all matrix products, forward and backward, two for each multiplication.
        tokens (`int`): Tokens of context.
    """

    parameters: int
    target_bytes: int
    state_bytes: int
    activation_bytes: int
    logits_bytes: int
    flops: int
    tokens: int

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return self.target_bytes + self.state_bytes + self.activation_bytes + self.logits_bytes

    def seconds(self, steps: int, flops_per_second: float) -> float:
        """Time of so many steps on a machine that forms products at this rate while training."""
        return steps * self.flops / flops_per_second

    def describe(self, steps: int, flops_per_second: float) -> str:
        """Two lines for people."""
        parts = {"target": self.target_bytes, "drafter and optimiser": self.state_bytes}
        parts |= {"activations": self.activation_bytes, "logits": self.logits_bytes}
        listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        minutes = self.seconds(steps, flops_per_second) / 60
        return (
            f"Estimated memory: {self.memory / 2**30:.2f} GiB ({listed}).\n"
            f"Estimated time: {minutes:,.1f} minutes for {steps:,} steps at {flops_per_second / 1e12:,.3g} TFLOP/s."
        )


def estimate_training(
    target: PreTrainedModel,
    config: DSparkConfig,
    *,
    rows: int,
    length: int,
    anchors: int,
    pure_bf16: bool = False,
    chunk_bytes: int = 2**31,
) -> TrainingEstimate:
    """
    Estimates a step.

    Args:
        target (`PreTrainedModel`): The target; one on the meta device will do.
        config (`DSparkConfig`): Of the drafter.
        rows, length (`int`): Sequences of a batch and their padded length.
        anchors (`int`): Blocks a sequence.
        pure_bf16 (`bool`): Weights and optimiser in bfloat16 instead of float32.
        chunk_bytes (`int`): See [`Objective`](objective.py).
    """
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    heads = (drafter.markov_head, drafter.confidence_head, drafter.lm_head)
    head_size = sum(p.numel() for head in heads if head is not None for p in head.parameters())
    size, layer = drafter.num_parameters(), sum(p.numel() for p in drafter.layers[0].parameters())
    text, item = target.config.get_text_config(), target.dtype.itemsize
    tokens, queries = rows * length, rows * anchors * config.block_size
    hidden, taps = config.hidden_size, config.num_taps * config.target_hidden_size
    learned = rows * anchors * config.num_draft_tokens
    head_flops = learned * (
        4 * hidden * config.draft_vocab_size  # forward, and back to the states: the weights are frozen
        + 2 * config.target_hidden_size * config.vocab_size
        + 6 * config.markov_rank * config.draft_vocab_size
    )
    key_value = 2 * hidden * config.num_key_value_heads * config.head_dim
    seen = length // 2 + config.block_size  # keys that a query sees, on average
    attention = 4 * config.num_attention_heads * config.head_dim * seen
    drafter_flops = 2 * tokens * 2 * taps * hidden + 3 * (  # the taps are frozen
        tokens * 2 * config.num_hidden_layers * key_value
        + queries * config.num_hidden_layers * (2 * layer + attention)
    )
    # a layer keeps about ten states and three inner ones of each query, and keys and values of all
    kept = 2 if item == 2 or pure_bf16 else 4
    activations = (
        config.num_hidden_layers
        * kept
        * (
            queries * (10 * hidden + 3 * config.intermediate_size)
            + (tokens + queries) * 4 * config.num_key_value_heads * config.head_dim
        )
    )
    # taps as the target left them, packed, and in the drafter's dtype; the target's own working set of a layer
    activations += tokens * (taps * (2 * item + (2 if pure_bf16 else 4)) + 2 * hidden * item)
    activations += tokens * item * 3 * _inner_size(text)
    logits = min(chunk_bytes, 12 * config.block_size * rows * anchors * (config.vocab_size + config.draft_vocab_size))
    return TrainingEstimate(
        parameters=size,
        target_bytes=target.num_parameters() * item,
        state_bytes=size * (8 if pure_bf16 else 16),
        activation_bytes=activations,
        logits_bytes=logits + 2 * head_size * (2 if pure_bf16 else 4),
        flops=target_flops(target, tokens, length) + drafter_flops + head_flops,
        tokens=tokens,
    )


def target_flops(target: PreTrainedModel, tokens: int, length: int) -> int:
    """Operations of the target's forward without its head."""
    text = target.config.get_text_config()
    ends = {id(p): p.numel() for part in (target.get_input_embeddings(), target.get_output_embeddings())
            for p in part.parameters()}  # fmt: skip
    layers = target.num_parameters() - sum(ends.values())
    # PyTorch's causal kernels form half of the products of attention
    return tokens * (2 * layers + 2 * text.num_hidden_layers * text.hidden_size * length)


def _inner_size(text: PreTrainedConfig) -> int:
    inner = text.to_dict().get("intermediate_size")
    return inner if isinstance(inner, int) else 4 * text.hidden_size


__all__ = ["TrainingEstimate", "estimate_training", "target_flops"]
