"""A published family in general: how it is recognised, and how a checkpoint of it becomes a canonical one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..configuration_dspark import SLIDING, DSparkConfig
from .fields import attention, flattened, layout, partial_rotary, rotary
from .files import OpenedCheckpoint
from .tensors import (
    EMBEDDING,
    HEAD,
    body_dtype,
    canonical_names,
    check_kinds,
    head_dim_of,
    same_embeddings,
    split_fused,
    vocabulary,
    with_whole_norms,
    without_interleaving,
)
from .unsupported import other_tensors, other_weights


# fields without which nothing can be built
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "block_size",
    "mask_token_id", "target_layer_ids",
)  # fmt: skip
# fields that mean the same everywhere
_SHARED = (
    *_REQUIRED, "num_key_value_heads", "rms_norm_eps", "attention_bias", "max_position_embeddings",
    "initializer_range", "num_target_layers", "target_hidden_size", "markov_head_type", "pad_token_id", "bos_token_id",
    "eos_token_id", "final_logit_softcapping", "confidence_temperatures",
)  # fmt: skip
_SANDWICH = "layers.0.pre_feedforward_layernorm.weight"
_SINK = ".self_attn.attention_sink_bias"

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """
    Args:
        name (`str`): As messages call it.
        recognises (`Callable`): By what a configuration, as it stands in the file, is of this family; empty if it is
            not. Families are asked in order, so a later one may take for granted that the earlier ones said no.
        anchor_first (`bool`): The layout of files that do not say.
        doubtful (`bool`): Whether files of the other layout exist that do not say it either.
        window_from (`str`): See `DSparkConfig.sliding_window_from`.
        sliding_is_causal (`Callable`): Whether sliding layers are causal in the block, by the flattened configuration.
        complete (`Callable`): Completes the flattened configuration by what only this family knows.
        special (`dict`): Canonical fields that are the same in every file of this family.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], str]
    anchor_first: bool
    doubtful: bool = False
    window_from: str = "query"
    sliding_is_causal: Callable[[Fields], bool] = lambda flat: True
    complete: Callable[[Fields], Fields] = lambda flat: flat
    special: tuple[tuple[str, Any], ...] = ()


def convert(
    family: Family,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    own_embeddings: bool = False,
    sample_from_anchor: bool | None = None,
) -> OpenedCheckpoint:
    """
    Args:
        family (`Family`): That of the checkpoint.
        raw (`Mapping`): The checkpoint's configuration.
        tensors (`Mapping`): Its tensors, by their names in the file.
        own_embeddings (`bool`): Keep the file's embedding and head.
        sample_from_anchor (`bool`, *optional*): The layout, if the caller knows better than the file.

    Raises:
        ValueError: a field or tensor is missing or contradicts another.
        NotImplementedError: an option that cannot run yet.
    """
    flat = family.complete(flattened(raw))
    if refusal := other_weights(flat) or other_tensors(tensors):
        raise NotImplementedError(
            f"This checkpoint of the family {family.name} is one of {refusal[0]}, which cannot run yet: {refusal[1]}."
        )
    named = canonical_names(tensors)
    check_kinds(named)
    gemma4 = _SANDWICH in named or "Gemma4DSparkModel" in (raw.get("architectures") or ())
    required = (*_REQUIRED, "head_dim", "rope_parameters") if gemma4 else _REQUIRED
    if missing := [name for name in required if name not in flat]:
        raise ValueError(f"The configuration of this {family.name} checkpoint lacks {', '.join(missing)}.")
    if small := [f"{name}={flat[name]}" for name in _REQUIRED[:6] if flat[name] < 1]:
        raise ValueError(f"The configuration says {', '.join(small)}, but these must be at least 1.")
    draft_vocab_size = vocabulary(flat, named)
    fields = {name: flat[name] for name in _SHARED if name in flat}
    fields |= _gemma4(flat) if gemma4 else _qwen3(flat, named)
    fields |= attention(flat, family.window_from, family.sliding_is_causal(flat))
    if gemma4 and SLIDING in fields["layer_types"]:
        raise NotImplementedError(f"layer_types={fields['layer_types']} of a Gemma4 drafter cannot run yet.")
    heads = flat["num_attention_heads"]
    named = split_fused(named, heads, fields.get("num_key_value_heads") or heads)
    if str(flat.get("model_type")).startswith("qwen3_5"):
        named = with_whole_norms(named)
    if flat.get("rope_is_neox_style") is False:
        named = without_interleaving(named, fields["head_dim"] or flat["hidden_size"] // heads)
    fields |= {
        "draft_vocab_size": draft_vocab_size,
        "has_attention_sinks": bool(flat.get("attention_sink_bias")) or any(name.endswith(_SINK) for name in named),
        **layout(flat, sample_from_anchor, family.name, family.anchor_first, family.doubtful),
        **_heads(flat, named),
        **_embeddings(flat, named, own_embeddings, draft_vocab_size < flat["vocab_size"]),
        **dict(family.special),
    }
    _check_context_projection(fields, named)
    return OpenedCheckpoint(DSparkConfig(**fields), named, body_dtype(named), family.name)


def _qwen3(flat: Fields, tensors: Mapping[str, torch.Tensor]) -> Fields:
    head_dim = flat.get("head_dim") or head_dim_of(tensors)
    queries = tensors.get("layers.0.self_attn.q_proj.weight")
    # Qwen3.5's own layers: a head's query and its gate are one projection
    gated = bool(flat.get("enable_qwen35_gated_q_proj")) or (
        queries is not None and head_dim is not None and len(queries) == 2 * flat["num_attention_heads"] * head_dim
    )
    return {
        "backbone_type": "qwen3_5" if gated else "qwen3",
        "hidden_act": flat.get("hidden_act", "silu"),
        "head_dim": head_dim,
        "rope_parameters": rotary(flat) | ({"partial_rotary_factor": partial_rotary(flat)} if gated else {}),
    }


def _gemma4(flat: Fields) -> Fields:
    # Every drafter layer is full attention, so Gemma4's "global" geometry and rotary parameters apply. Newer releases
    # of Transformers write that geometry layer by layer, and only where it differs.
    layer = (flat.get("per_layer_config") or {}).get("0") or {}
    if not isinstance(layer, dict):
        raise ValueError(f"per_layer_config={flat['per_layer_config']} must hold an object of fields for each layer.")
    k_eq_v = bool(flat.get("attention_k_eq_v"))
    kv_heads = layer.get("num_key_value_heads") or (flat.get("num_global_key_value_heads") if k_eq_v else None)
    rope = flat["rope_parameters"]
    return {
        "backbone_type": "gemma4",
        "hidden_act": flat.get("hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": float(flat["hidden_size"] ** 0.5),
        "head_dim": layer.get("head_dim") or flat.get("global_head_dim") or flat["head_dim"],
        "num_key_value_heads": kv_heads or flat.get("num_key_value_heads"),
        "attention_k_eq_v": k_eq_v,
        "rope_parameters": dict(rope.get("full_attention") or rope),
    }


def _heads(flat: Fields, tensors: Mapping[str, torch.Tensor]) -> Fields:
    # a head exists if its tensors do; a head that the configuration promises is then missed by name when loading
    markov = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    rank = int(flat.get("markov_rank") or 0) if markov is None else markov.shape[1]
    enabled = bool(flat.get("enable_confidence_head")) or confidence is not None
    inputs, width = None if confidence is None else confidence.shape[1], flat["hidden_size"]
    # projects differ in what silence means, so the tensor answers
    with_markov = flat.get("confidence_head_with_markov", bool(rank) and inputs == width + rank) and enabled
    if with_markov and not rank:
        raise ValueError(
            "confidence_head_with_markov=True needs a sequential head, but markov_rank is 0 and the checkpoint holds "
            "no markov_head tensors."
        )
    if inputs is not None and inputs != width + (rank if with_markov else 0):
        raise ValueError(
            f"confidence_head.proj.weight has {inputs} inputs, but hidden_size={width}, markov_rank={rank} and "
            f"confidence_head_with_markov={with_markov} do not add up to that."
        )
    return {"markov_rank": rank, "enable_confidence_head": enabled, "confidence_head_with_markov": bool(with_markov)}


def _embeddings(flat: Fields, tensors: dict[str, torch.Tensor], own: bool, reduced: bool) -> Fields:
    """What the drafter keeps of the file's embedding and head; the rest leaves the tensors."""
    own = own or bool(flat.get("train_embed_tokens"))
    if own and EMBEDDING not in tensors:
        raise ValueError("own_embeddings=True, but the checkpoint holds no embed_tokens.weight; borrow the target's.")
    tied = own and not reduced and bool(flat.get("tie_word_embeddings")) and same_embeddings(tensors)
    # the rows of a reduced head would have to be copied from the target's anyway
    head = (own or reduced) and HEAD in tensors and not tied
    if not own:
        tensors.pop(EMBEDDING, None)
    if not head:
        tensors.pop(HEAD, None)
    return {"own_embeddings": own, "own_head": head or tied, "tie_word_embeddings": tied}


def _check_context_projection(fields: Fields, tensors: Mapping[str, torch.Tensor]) -> None:
    if "fc.weight" not in tensors:
        raise ValueError("Tensors do not match the configuration: missing: fc.weight.")
    size = fields.get("target_hidden_size") or fields["hidden_size"]
    width, taps = tensors["fc.weight"].shape[1], len(fields["target_layer_ids"])
    if width != taps * size:
        raise ValueError(
            f"fc.weight reads {width} features, but {taps} taps of hidden size {size} give {taps * size}; "
            "target_layer_ids does not belong to these weights."
        )


__all__ = ["Family", "convert"]
