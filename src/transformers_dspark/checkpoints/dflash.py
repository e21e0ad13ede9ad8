"""The families that keep their fields in a `dflash_config`: z-lab's DFlash, SpecForge's DSpark, LFM2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family


def _names(raw: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in raw.get("architectures") or ()]


def _is_specforge(raw: Mapping[str, Any]) -> bool:
    nested = raw.get("dflash_config") or {}
    return nested.get("projector_type") == "dspark" or (bool(nested) and "DSparkDraftModel" in _names(raw))


def _is_lfm2(raw: Mapping[str, Any]) -> bool:
    return "Lfm2DSparkDraftModel" in _names(raw) or (bool(raw.get("dflash_config")) and "rope_is_neox_style" in raw)


def _is_dflash(raw: Mapping[str, Any]) -> bool:
    return bool(raw.get("dflash_config")) or any(name.startswith("DFlash") for name in _names(raw))


SPECFORGE = Family("SpecForge DSpark", _is_specforge, anchor_first=True)

# Liquid's form has no projector type; it turns neighbouring channels of a head, and says so.
LFM2 = Family("LFM2.5 DSpark", _is_lfm2, anchor_first=True)

# Source: z-lab's own loop reads the rows behind the anchor's; vLLM and SGLang run its sliding layers causally.
DFLASH = Family("z-lab DFlash", _is_dflash, anchor_first=False)


__all__ = ["DFLASH", "LFM2", "SPECFORGE"]
