"""Kinds of drafters that this version recognises only to refuse them by name, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


# options that some projects added, each with the value that changes nothing
_NEUTRAL = {
    "quantization_config": None,
    "attention_value_scale": 1.0,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "log_snr_conditioning": False,
    "num_kv_shared_layers": 0,
}
_TENSORS = {
    "candidate_selector.": ("DFlash2", "it selects among candidates of each position with codebooks"),
    ".kv_a_proj": ("MLA drafters", "their keys and values are compressed to a latent vector"),
    ".kv_b_proj": ("MLA drafters", "their keys and values are compressed to a latent vector"),
    "mask_embedding": ("MiMo DFlash", "it has a mask embedding beside its vocabulary"),
    ".weight_scale": ("quantized drafters (NVFP4 or FP8 weights)", "its weights have to be unpacked first"),
    ".weight_packed": ("quantized drafters (NVFP4 or FP8 weights)", "its weights have to be unpacked first"),
}


def other_kind(raw: dict[str, Any]) -> tuple[str, str] | None:
    """Name and reason of refusal of a kind of drafter that works in another manner, or `None`."""
    architectures = " ".join(map(str, raw.get("architectures") or ())).lower()
    nested, speculators = raw.get("dflash_config") or {}, raw.get("speculators_config") or {}
    algorithm = str(raw.get("speculators_model_type") or speculators.get("algorithm") or "").lower()
    if "dflash2" in architectures or algorithm == "dflash2" or nested.get("selector_top_k"):
        return _TENSORS["candidate_selector."]
    if "eagle" in architectures or "eagle" in algorithm:
        return f"EAGLE ({algorithm or 'eagle3'})", "it drafts one token after another and has no block"
    if algorithm not in ("", "dspark", "dflash"):
        return f"speculators ({algorithm})", "only its dspark and dflash drafters have a block"
    if nested.get("projector_type") not in (None, "dspark", "dflash"):
        return f"SpecForge ({nested['projector_type']})", "only its dspark and dflash projectors are known"
    return None


def other_weights(flat: dict[str, Any]) -> tuple[str, str] | None:
    """Name and reason of refusal of a known family's variant, by its flattened configuration, or `None`."""
    if flat.get("kv_lora_rank") or flat.get("q_lora_rank") or flat.get("attention_mode") == "mla":
        return _TENSORS[".kv_a_proj"]
    if "nvfp4" in str(flat.get("quantization_config")).lower():
        return (
            "drafters with NVFP4 weights",
            f"quantization_config={flat['quantization_config']} is to be undone first",
        )
    asked = [f"{name}={flat[name]}" for name, neutral in _NEUTRAL.items() if flat.get(name) not in (neutral, None)]
    return ("drafters with further options", f"this one needs {', '.join(asked)}") if asked else None


def other_tensors(names: Iterable[str]) -> tuple[str, str] | None:
    """Name and reason of refusal by the tensors' names, or `None`."""
    names = tuple(names)
    for part, refusal in _TENSORS.items():
        if any(part in name for name in names):
            return refusal
    return None


__all__ = ["other_kind", "other_tensors", "other_weights"]
