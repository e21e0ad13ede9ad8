"""Families that this version recognises only to refuse them by name, rather than draft nonsense from their tensors."""

from __future__ import annotations

from typing import Any


def family_of(raw: dict[str, Any]) -> str | None:
    """Name of the family that a configuration belongs to, if it is one that cannot run yet."""
    architectures = raw.get("architectures") or ()
    nested = raw.get("dflash_config") or {}
    if "speculators_model_type" in raw or "speculators_config" in raw:
        algorithm = raw.get("speculators_model_type") or (raw.get("speculators_config") or {}).get("algorithm")
        return f"speculators ({algorithm})"
    if "dspark_block_size" in raw:
        return "DSpark embedded in a DeepSeek-V4 target"
    if "Lfm2DSparkDraftModel" in architectures:
        return "LFM2.5 DSpark"
    if "MuseGlimmerAssistantModel" in architectures:
        return "Muse assistant (DFlash)"
    if nested.get("projector_type") == "dspark" or "DSparkDraftModel" in architectures:
        return "SpecForge DSpark"
    if nested or "DFlashDraftModel" in architectures:
        return "z-lab DFlash"
    return None


__all__ = ["family_of"]
