"""The families that keep their fields in a `dflash_config`: z-lab's DFlash, SpecForge's DSpark, LFM2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family


def _names(raw: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in raw.get("architectures") or ()]


def _is_specforge(raw: Mapping[str, Any]) -> str:
    nested = raw.get("dflash_config") or {}
    if nested.get("projector_type") == "dspark":
        return "dflash_config.projector_type dspark"
    return "architecture DSparkDraftModel with dflash_config" if nested and "DSparkDraftModel" in _names(raw) else ""


def _is_lfm2(raw: Mapping[str, Any]) -> str:
    if "Lfm2DSparkDraftModel" in _names(raw):
        return "architecture Lfm2DSparkDraftModel"
    return "dflash_config with rope_is_neox_style" if raw.get("dflash_config") and "rope_is_neox_style" in raw else ""


def _is_dflash(raw: Mapping[str, Any]) -> str:
    if raw.get("dflash_config"):
        return "dflash_config without a projector"
    return next((f"architecture {name}" for name in _names(raw) if name.startswith("DFlash")), "")


SPECFORGE = Family("SpecForge DSpark", _is_specforge, anchor_first=True)

# Liquid's form has no projector type; it turns neighbouring channels of a head, and says so.
LFM2 = Family("LFM2.5 DSpark", _is_lfm2, anchor_first=True)

# Source: z-lab's own loop reads the rows behind the anchor's; vLLM and SGLang run its sliding layers causally.
DFLASH = Family("z-lab DFlash", _is_dflash, anchor_first=False)


__all__ = ["DFLASH", "LFM2", "SPECFORGE"]
