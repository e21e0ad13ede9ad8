"""A fresh drafter beside a target: what it must share with it, and what a shape leaves open."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..generation_config import eos_ids
from ..modeling_dspark import DSparkDrafter
from .arguments import DrafterShape
from .data import Sequences, frequent_tokens


def geometry(text: PreTrainedConfig) -> dict[str, Any]:
    """
    Sizes of a backbone beside a target. Only the hidden size has to be the target's; the others follow it where they
    can. Attributes are read as a dictionary, since a configuration with other sizes in some layers refuses `getattr`.
    """
    values = text.to_dict()

    def size(name: str, default: int) -> int:
        value = values.get(text.attribute_map.get(name, name))
        return value if isinstance(value, int) and value > 0 else default

    hidden = text.hidden_size
    heads = size("num_attention_heads", max(1, hidden // 64))
    key_value_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", hidden // heads)
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope  # where kinds of layers have their own, as in Gemma3
    return {
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size", 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads if heads % key_value_heads == 0 else heads,
        "head_dim": max(2, head_dim - head_dim % 2),  # a rotary embedding needs pairs
        "rms_norm_eps": values.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": size("max_position_embeddings", 32768),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0},
    }


def drafter_config(target: PreTrainedModel, shape: DrafterShape) -> DSparkConfig:
    """The configuration of a drafter of a shape, with the target's geometry."""
    text = target.config.get_text_config()
    layers = text.num_hidden_layers
    # the released recipe's spacing: 1, 9, 17, 25, 33 of 36 layers; a target of two layers has only 0, of one only -1
    spread = (min(max(round(1 + i * (layers - 4) / 4), 1), layers - 2) for i in range(5))
    taps = shape.target_layer_ids or tuple(sorted(set(spread)))
    mask_token = shape.mask_token_id
    if mask_token is None:
        mask_token = text.vocab_size - 1 if text.pad_token_id in (None, *eos_ids(text)) else text.pad_token_id
    return DSparkConfig(
        vocab_size=text.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        num_hidden_layers=shape.num_layers,
        **geometry(text),
        block_size=shape.block_size,
        mask_token_id=mask_token,
        target_layer_ids=list(taps),
        num_target_layers=layers,
        sample_from_anchor=shape.sample_from_anchor,
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=shape.markov_rank > 0,
        pad_token_id=text.pad_token_id,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
    )


def new_drafter(target: PreTrainedModel, shape: DrafterShape, sequences: Sequences, seed: int) -> DSparkDrafter:
    """
    A fresh drafter of a shape, with the target's geometry, bound to it. Of `sequences` it proposes the most frequent
    tokens, if the shape reduces the vocabulary.
    """
    config = drafter_config(target, shape)
    torch.manual_seed(seed)
    drafter = DSparkDrafter(config)
    if config.has_reduced_vocabulary:
        kept = frequent_tokens(sequences, config.draft_vocab_size, config.vocab_size)
        drafter.d2t.copy_(kept - torch.arange(len(kept)))
    return drafter.to(target.device).bind_target(target)


def check_answers(target: PreTrainedModel, sequences: Sequences) -> None:
    """
    Raises:
        ValueError: the answers are not of the target's vocabulary, or exceed its context.
    """
    text = target.config.get_text_config()
    largest, size = max(int(ids.max()) for ids in sequences.ids), text.vocab_size
    if largest >= size:
        raise ValueError(f"The answers hold token {largest}, the target has {size}: another target wrote them.")
    longest, context = max(map(len, sequences.ids)), geometry(text)["max_position_embeddings"]
    if longest > context:
        raise ValueError(
            f"The longest answer has {longest} tokens, the target's context {context}: set max_length to that."
        )


__all__ = ["check_answers", "drafter_config", "geometry", "new_drafter"]
