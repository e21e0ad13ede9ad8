"""The official DeepSpec release: `Qwen3DSparkModel` and `Gemma4DSparkModel`, with or without heads."""

from __future__ import annotations

from typing import Any

import torch

from ..configuration_dspark import DSparkConfig
from .files import OpenedCheckpoint


ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")
# fields that mean the same in both forms
_SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "attention_bias", "max_position_embeddings", "initializer_range", "block_size", "mask_token_id",
    "target_layer_ids", "num_target_layers", "markov_head_type", "tie_word_embeddings", "pad_token_id", "bos_token_id",
    "eos_token_id",
)  # fmt: skip
_NOT_YET = ("dflash_query_causal", "attention_sink_bias", "quantization_config")
_PREFIXES = ("model.", "draft_model.")


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a configuration is DeepSpec's: its architecture, and no other project's nested block."""
    named = any(name in ARCHITECTURES for name in raw.get("architectures") or ())
    return named and "dflash_config" not in raw and "speculators_model_type" not in raw


def convert(raw: dict[str, Any], tensors: dict[str, torch.Tensor], *, own_embeddings: bool) -> OpenedCheckpoint:
    """
    Args:
        raw (`dict`): The checkpoint's configuration.
        tensors (`dict`): Its tensors, by their names in the file.
        own_embeddings (`bool`): Keep the file's embedding and head.

    Raises:
        ValueError: a field or tensor contradicts another.
        NotImplementedError: an option that cannot run yet.
    """
    _refuse_what_cannot_run(raw)
    tensors = {_canonical(name): tensor for name, tensor in tensors.items() if not name.endswith("inv_freq")}
    gemma4 = raw.get("model_type") == "gemma4_text"
    if own_embeddings and "embed_tokens.weight" not in tensors:
        raise ValueError("own_embeddings=True, but the checkpoint holds no embed_tokens.weight; borrow the target's instead.")
    if not own_embeddings:
        tensors = {name: t for name, t in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    tied = bool(raw.get("tie_word_embeddings"))
    if own_embeddings and tied:
        tensors.pop("lm_head.weight", None)
    fields = {name: raw[name] for name in _SHARED_FIELDS if name in raw} | {
        "backbone_type": "gemma4" if gemma4 else "qwen3",
        "hidden_act": raw.get("hidden_activation" if gemma4 else "hidden_act"),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "embedding_scale": float(raw["hidden_size"] ** 0.5) if gemma4 else 1.0,
        "own_embeddings": own_embeddings,
        "tie_word_embeddings": own_embeddings and tied,
        "layout_source": "family (DeepSpec is anchor first)",
        **(_gemma4_attention(raw) if gemma4 else _qwen3_attention(raw)),
        **_heads(raw, tensors),
    }
    _check_context_projection(fields, tensors)
    return OpenedCheckpoint(DSparkConfig(**fields), tensors, tensors["fc.weight"].dtype)


def _canonical(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _refuse_what_cannot_run(raw: dict[str, Any]) -> None:
    asked = [name for name in _NOT_YET if raw.get(name)]
    if "sliding_attention" in (raw.get("layer_types") or ()):
        asked.append("layer_types with sliding_attention")
    if raw.get("enable_moe_block") or raw.get("hidden_size_per_layer_input") or raw.get("num_kv_shared_layers"):
        asked.append("experts, per-layer inputs or shared keys and values")
    if asked:
        raise NotImplementedError(f"This DeepSpec checkpoint needs {', '.join(asked)}, which this version cannot run yet.")


def _qwen3_attention(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    # Full rotary whatever the target's configuration left behind: the official code never reads partial or mrope fields.
    kept = {name: value for name, value in rope.items() if name not in ("partial_rotary_factor", "mrope_section", "type")}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kept |= {"rope_theta": theta, "rope_type": "default" if kind == "mrope" else kind}
    return {"head_dim": raw.get("head_dim"), "rope_parameters": kept}


def _gemma4_attention(raw: dict[str, Any]) -> dict[str, Any]:
    # every drafter layer is full attention, so Gemma4's "global" geometry and rotary parameters apply
    k_eq_v = bool(raw.get("attention_k_eq_v"))
    kv_heads = raw.get("num_global_key_value_heads") if k_eq_v else None
    return {
        "head_dim": raw.get("global_head_dim") or raw["head_dim"],
        "num_key_value_heads": kv_heads or raw["num_key_value_heads"],
        "attention_k_eq_v": k_eq_v,
        "rope_parameters": dict(raw["rope_parameters"]["full_attention"]),
    }


def _heads(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    # a head exists if its tensors do; a head that the configuration promises is then missed by name when loading
    markov = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    rank = int(raw.get("markov_rank") or 0) if markov is None else markov.shape[1]
    enabled = bool(raw.get("enable_confidence_head")) or confidence is not None
    with_markov = bool(raw.get("confidence_head_with_markov")) and enabled
    if confidence is not None and confidence.shape[1] != raw["hidden_size"] + (rank if with_markov else 0):
        raise ValueError(
            f"confidence_head.proj.weight has {confidence.shape[1]} inputs, but hidden_size={raw['hidden_size']}, "
            f"markov_rank={rank} and confidence_head_with_markov={with_markov} do not add up to that."
        )
    return {"markov_rank": rank, "enable_confidence_head": enabled, "confidence_head_with_markov": with_markov}


def _check_context_projection(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    if "fc.weight" not in tensors:
        raise ValueError("Tensors do not match the configuration: missing: fc.weight.")
    width, taps = tensors["fc.weight"].shape[1], len(fields["target_layer_ids"])
    if width != taps * fields["hidden_size"]:
        raise ValueError(
            f"fc.weight reads {width} features, but {taps} taps of hidden size {fields['hidden_size']} give "
            f"{taps * fields['hidden_size']}; target_layer_ids does not belong to these weights."
        )
