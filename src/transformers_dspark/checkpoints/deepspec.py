"""The official DeepSpec release, `Qwen3DSparkModel` and `Gemma4DSparkModel`, and what others made of its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family


ARCHITECTURES = ("Qwen3DSparkModel", "Qwen3_5DSparkModel", "Gemma4DSparkModel")
_OWN_FIELDS = ("target_layer_ids", "mask_token_id", "block_size")
_NEMOTRON = ("dflash_query_causal", "attention_sink_bias")


def _has_architecture(raw: Mapping[str, Any]) -> bool:
    return any(name in ARCHITECTURES for name in raw.get("architectures") or ())


def _is_nemotron(raw: Mapping[str, Any]) -> bool:
    return _has_architecture(raw) and (bool(raw.get("dflash_config")) or any(raw.get(name) for name in _NEMOTRON))


def _is_deepspec(raw: Mapping[str, Any]) -> bool:
    given = (raw.get("text_config") or {}) | (raw.get("dspark_config") or {}) | dict(raw)
    return _has_architecture(raw) or all(given.get(name) is not None for name in _OWN_FIELDS)


# The same architecture with a `dflash_config` beside the fields: causal blocks, windows and attention sinks.
NEMOTRON = Family("Nemotron DSpark", _is_nemotron, anchor_first=True, doubtful=True)

# The official "dflash" release has no heads and is anchor first like the others.
DEEPSPEC = Family("DeepSpec", _is_deepspec, anchor_first=True)


__all__ = ["DEEPSPEC", "NEMOTRON"]
