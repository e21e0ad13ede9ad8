"""The official DeepSpec release: `Qwen3DSparkModel` and `Gemma4DSparkModel`, with or without heads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..configuration_dspark import DSparkConfig, mistyped
from .files import OpenedCheckpoint
from .unsupported import family_of


ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")
# fields without which nothing can be built; `head_dim` has a default in the Qwen3 form only
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "block_size",
    "mask_token_id", "target_layer_ids",
)  # fmt: skip
# fields that mean the same in both forms
_SHARED = (
    *_REQUIRED, "num_key_value_heads", "rms_norm_eps", "attention_bias", "max_position_embeddings",
    "initializer_range", "num_target_layers", "markov_head_type", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# options of other projects that kept the architecture's name, with the value that changes nothing
_FOREIGN = {
    "dflash_query_causal": False,
    "attention_sink_bias": False,
    "quantization_config": None,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sample_from_anchor": True,
    "query_zero_predicts_next": True,
    "dspark_bonus_anchor": False,
}
_PREFIXES = ("model.", "draft_model.", "logit_head.")
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a configuration is DeepSpec's: its architecture, and no sign of another project."""
    return any(name in ARCHITECTURES for name in raw.get("architectures") or ()) and family_of(raw) is None


def convert(raw: dict[str, Any], tensors: dict[str, torch.Tensor], *, own_embeddings: bool) -> OpenedCheckpoint:
    """
    Args:
        raw (`dict`): The checkpoint's configuration.
        tensors (`dict`): Its tensors, by their names in the file.
        own_embeddings (`bool`): Keep the file's embedding and head.

    Raises:
        ValueError: a field or tensor is missing or contradicts another.
        NotImplementedError: an option that cannot run yet.
    """
    raw = (raw.get("text_config") or {}) | (raw.get("dspark_config") or {}) | raw
    problems = mistyped(raw)
    if not problems and not isinstance((raw.get("per_layer_config") or {}).get("0") or {}, dict):
        problems.append(f"per_layer_config={raw['per_layer_config']} must hold an object of fields for each layer")
    if problems:
        raise ValueError(f"The configuration of this DeepSpec checkpoint cannot be read: {'; '.join(problems)}.")
    _refuse_what_cannot_run(raw)
    gemma4 = "Gemma4DSparkModel" in raw["architectures"]
    required = (*_REQUIRED, "head_dim", "rope_parameters") if gemma4 else _REQUIRED
    if missing := [name for name in required if raw.get(name) is None]:
        raise ValueError(f"The configuration of this DeepSpec checkpoint lacks {', '.join(missing)}.")
    tensors = _canonical_names(tensors)
    _check_kinds(tensors)
    tied = bool(raw.get("tie_word_embeddings")) and _same_embeddings(tensors)
    if not own_embeddings:
        dropped: tuple[str, ...] = _EMBEDDINGS
    elif "embed_tokens.weight" not in tensors:
        raise ValueError("own_embeddings=True, but the checkpoint holds no embed_tokens.weight; borrow the target's.")
    else:
        dropped = ("lm_head.weight",) if tied else ()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    fields = {name: raw[name] for name in _SHARED if name in raw} | {
        "backbone_type": "gemma4" if gemma4 else "qwen3",
        "hidden_act": (raw.get("hidden_activation") or "gelu_pytorch_tanh")
        if gemma4
        else (raw.get("hidden_act") or "silu"),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "embedding_scale": float(max(raw["hidden_size"], 0) ** 0.5) if gemma4 else 1.0,
        "own_embeddings": own_embeddings,
        "tie_word_embeddings": own_embeddings and tied,
        "layout_source": "flag" if "sample_from_anchor" in raw else "family (DeepSpec is anchor first)",
        **(_gemma4_attention(raw) if gemma4 else _qwen3_attention(raw)),
        **_heads(raw, tensors),
    }
    _check_context_projection(fields, tensors)
    return OpenedCheckpoint(DSparkConfig(**fields), tensors, _body_dtype(tensors))


def _canonical_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {}
    for name, tensor in tensors.items():
        short = name
        for prefix in _PREFIXES:
            short = short.removeprefix(prefix)
        if short.endswith("inv_freq"):  # rotary buffers follow from the configuration
            continue
        if short in named:
            raise ValueError(f"The checkpoint holds {short} twice, once as {name}; save it once.")
        named[short] = tensor
    return named


def _check_kinds(tensors: dict[str, torch.Tensor]) -> None:
    wrong = [
        f"{name} holds {tensor.dtype}, but weights must be floating point of 16 bits or more"
        for name, tensor in tensors.items()
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2
    ]
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)}, but must have two dimensions"
        for name in ("fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight")
        if name in tensors and tensors[name].dim() != 2
    ]
    if wrong:
        raise ValueError(f"Tensors do not match the configuration: {'; '.join(wrong)}.")


def _refuse_what_cannot_run(raw: dict[str, Any]) -> None:
    asked = [f"{name}={raw[name]}" for name, neutral in _FOREIGN.items() if raw.get(name) not in (neutral, None)]
    if "sliding_attention" in (raw.get("layer_types") or ()):
        asked.append("sliding_attention in layer_types")
    if asked:
        raise NotImplementedError(
            f"This checkpoint names a DeepSpec architecture, but needs {', '.join(asked)}, which this version cannot "
            "run yet; it runs anchor-first drafters with full attention."
        )


def _qwen3_attention(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    # Full rotary, whatever the target's configuration left behind: the official code reads no partial or mrope field.
    unread = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")
    kept = {name: value for name, value in rope.items() if name not in unread}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kept |= {"rope_theta": theta, "rope_type": "default" if kind == "mrope" else kind}
    return {"head_dim": raw.get("head_dim"), "rope_parameters": kept}


def _gemma4_attention(raw: dict[str, Any]) -> dict[str, Any]:
    # Every drafter layer is full attention, so Gemma4's "global" geometry and rotary parameters apply. Newer releases
    # of Transformers write that geometry layer by layer, and only where it differs.
    layer = (raw.get("per_layer_config") or {}).get("0") or {}
    k_eq_v = bool(raw.get("attention_k_eq_v"))
    kv_heads = layer.get("num_key_value_heads") or (raw.get("num_global_key_value_heads") if k_eq_v else None)
    rope = raw["rope_parameters"]
    return {
        "head_dim": layer.get("head_dim") or raw.get("global_head_dim") or raw["head_dim"],
        "num_key_value_heads": kv_heads or raw.get("num_key_value_heads"),
        "attention_k_eq_v": k_eq_v,
        "rope_parameters": dict(rope.get("full_attention") or rope),
    }


def _heads(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    # a head exists if its tensors do; a head that the configuration promises is then missed by name when loading
    markov = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    rank = int(raw.get("markov_rank") or 0) if markov is None else markov.shape[1]
    enabled = bool(raw.get("enable_confidence_head")) or confidence is not None
    with_markov = bool(raw.get("confidence_head_with_markov")) and enabled
    if with_markov and not rank:
        raise ValueError(
            "confidence_head_with_markov=True needs a sequential head, but markov_rank is 0 and the checkpoint holds "
            "no markov_head tensors."
        )
    if confidence is not None and confidence.shape[1] != raw["hidden_size"] + (rank if with_markov else 0):
        raise ValueError(
            f"confidence_head.proj.weight has {confidence.shape[1]} inputs, but hidden_size={raw['hidden_size']}, "
            f"markov_rank={rank} and confidence_head_with_markov={with_markov} do not add up to that."
        )
    return {"markov_rank": rank, "enable_confidence_head": enabled, "confidence_head_with_markov": with_markov}


def _same_embeddings(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether one table serves as both: the file has no head, or a copy of its embedding."""
    embedding, head = (tensors.get(name) for name in _EMBEDDINGS)
    return head is None or (embedding is not None and torch.equal(embedding, head))


def _check_context_projection(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    if "fc.weight" not in tensors:
        raise ValueError("Tensors do not match the configuration: missing: fc.weight.")
    width, taps = tensors["fc.weight"].shape[1], len(fields["target_layer_ids"])
    if width != taps * fields["hidden_size"]:
        raise ValueError(
            f"fc.weight reads {width} features, but {taps} taps of hidden size {fields['hidden_size']} give "
            f"{taps * fields['hidden_size']}; target_layer_ids does not belong to these weights."
        )


def _body_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """The widest dtype among the body's matrices. Heads and norms may differ; they follow the body when loaded."""
    body = [t.dtype for name, t in tensors.items() if name.startswith(("fc.", "layers.")) and t.dim() > 1]
    return functools.reduce(torch.promote_types, body)


__all__ = ["ARCHITECTURES", "convert", "recognises"]
