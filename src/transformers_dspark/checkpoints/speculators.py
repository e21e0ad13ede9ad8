"""Drafters of the speculators library, DSpark and DFlash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family, Fields


def _recognises(raw: Mapping[str, Any]) -> str:
    # the architectures it writes are those of SpecForge and z-lab, and it writes no model type
    return next((f"field {name}" for name in ("speculators_model_type", "speculators_config") if name in raw), "")


def _complete(flat: Fields) -> Fields:
    """Its taps count hidden states, of which the embedding output is number 0; ours count layers."""
    ids = flat.get("aux_hidden_state_layer_ids")
    if ids is None:
        return flat
    if not all(type(tap) is int and tap >= 0 for tap in ids):
        raise ValueError(f"aux_hidden_state_layer_ids={ids} must hold whole numbers from 0 (embedding output) up.")
    return flat | {"target_layer_ids": [tap - 1 for tap in ids]}


# Source: speculators, attention of its DFlash core: every row of a block sees the window before the anchor.
SPECULATORS = Family(
    "speculators",
    _recognises,
    anchor_first=False,
    doubtful=True,
    window_from="anchor",
    sliding_is_causal=lambda flat: not flat.get("sliding_window_non_causal"),
    complete=_complete,
)


__all__ = ["SPECULATORS"]
