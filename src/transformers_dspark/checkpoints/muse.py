"""The assistant of Muse Glimmer, the one DFlash drafter that Transformers has a class for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from .family import Family, Fields


_ARCHITECTURE, _MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"


def _recognises(raw: Mapping[str, Any]) -> str:
    if _ARCHITECTURE in (raw.get("architectures") or ()):
        return f"architecture {_ARCHITECTURE}"
    return f"model_type {_MODEL_TYPE}" if raw.get("model_type") == _MODEL_TYPE else ""


def _complete(flat: Fields) -> Fields:
    """What the file leaves out is as in Transformers' configuration, the vocabulary as in the target's."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerTextConfig

    try:
        full = MuseGlimmerAssistantConfig.from_dict(flat).to_dict()
    except (StrictDataclassError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"The configuration of this assistant cannot be read: {reason}.") from error
    flat = {name: value for name, value in full.items() if value is not None} | flat
    flat.setdefault("vocab_size", MuseGlimmerTextConfig.vocab_size)
    # Transformers counts the distance from the query, up to and with the window's size
    return flat | {"sliding_window": flat["sliding_window"] + 1}


MUSE = Family(
    "Muse assistant (DFlash)",
    _recognises,
    anchor_first=False,
    sliding_is_causal=lambda flat: False,
    complete=_complete,
    special=(("raw_embedding", True),),
)


__all__ = ["MUSE"]
