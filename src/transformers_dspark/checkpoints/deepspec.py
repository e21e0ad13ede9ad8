"""The official DeepSpec release, `Qwen3DSparkModel` and `Gemma4DSparkModel`, and what others made of its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family


ARCHITECTURES = ("Qwen3DSparkModel", "Qwen3_5DSparkModel", "Gemma4DSparkModel")
_OWN_FIELDS = ("target_layer_ids", "mask_token_id", "block_size")
_NEMOTRON = ("dflash_query_causal", "attention_sink_bias")


def _architecture(raw: Mapping[str, Any]) -> str:
    return next((f"architecture {name}" for name in raw.get("architectures") or () if name in ARCHITECTURES), "")


def _is_nemotron(raw: Mapping[str, Any]) -> str:
    told = [name for name in ("dflash_config", *_NEMOTRON) if raw.get(name)]
    return f"{_architecture(raw)} with {told[0]}" if _architecture(raw) and told else ""


def _is_deepspec(raw: Mapping[str, Any]) -> str:
    given = (raw.get("text_config") or {}) | (raw.get("dspark_config") or {}) | dict(raw)
    has_fields = all(given.get(name) is not None for name in _OWN_FIELDS)
    return _architecture(raw) or (f"fields {', '.join(_OWN_FIELDS)}" if has_fields else "")


# The same architecture with a `dflash_config` beside the fields: causal blocks, windows and attention sinks.
NEMOTRON = Family("Nemotron DSpark", _is_nemotron, anchor_first=True, doubtful=True)

# The official "dflash" release has no heads and is anchor first like the others.
DEEPSPEC = Family("DeepSpec", _is_deepspec, anchor_first=True)


__all__ = ["DEEPSPEC", "NEMOTRON"]
