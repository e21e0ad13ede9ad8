"""What the published configurations have in common: where fields stand, and what they mean in canonical terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..configuration_dspark import FULL, SLIDING, mistyped


logger = logging.get_logger(__name__)

_NESTED = ("text_config", "transformer_layer_config", "dspark_config", "dflash_config")
_ALIASES = {
    "dspark_markov_rank": "markov_rank",
    "dspark_markov_head_type": "markov_head_type",
    "dspark_target_layer_ids": "target_layer_ids",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_confidence_head": "enable_confidence_head",
}
# what a configuration may not say twice in different ways
_ONCE = (
    "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "sample_from_anchor",
    "query_zero_predicts_next", "attention_sink_bias", "confidence_head_with_markov",
)  # fmt: skip
_LAYOUT_FLAGS = {"sample_from_anchor": True, "query_zero_predicts_next": True, "dspark_bonus_anchor": False}


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    All fields on one level, those that are null left out; the outer ones win.

    Raises:
        ValueError: a field has the wrong type, or says two things in two places.
    """
    levels: list[Mapping[str, Any]] = [raw.get(name) or {} for name in _NESTED]
    flat: dict[str, Any] = {}
    for level in (*levels, raw):
        flat |= {name: value for name, value in level.items() if value is not None}
    for alias, name in _ALIASES.items():
        if alias in flat:
            flat.setdefault(name, flat[alias])
    problems = mistyped(flat) + mistyped(flat.get("speculators_config") or {})
    problems += [
        f"{name} is {raw[name]} at the top and {nested[name]} inside"
        for nested in levels[2:]
        for name in _ONCE
        if None not in (raw.get(name), nested.get(name)) and raw[name] != nested[name]
    ]
    if problems:
        raise ValueError(f"The configuration of this drafter cannot be read: {'; '.join(problems)}.")
    return flat


def layout(
    flat: Mapping[str, Any], argument: bool | None, family: str, anchor_first: bool, doubtful: bool
) -> dict[str, Any]:
    """
    Whether the anchor's row drafts a token, and how that was decided: argument, flag, proposal width, family.

    Args:
        flat (`Mapping`): See [`flattened`].
        argument (`bool`, *optional*): The caller's word, which goes before everything else.
        family (`str`): Name of the family, `anchor_first` (`bool`) its layout.
        doubtful (`bool`): Whether files of both layouts exist without a flag; then a warning says so.

    Raises:
        ValueError: flags contradict each other.
    """
    flags = {name: flat[name] == anchor for name, anchor in _LAYOUT_FLAGS.items() if name in flat}
    if argument is not None:
        return {"sample_from_anchor": argument, "layout_source": "argument"}
    if len(set(flags.values())) > 1:
        said = ", ".join(f"{name}={flat[name]}" for name in flags)
        raise ValueError(
            f"The configuration contradicts itself about its layout ({said}): say which with sample_from_anchor=."
        )
    if flags:
        return {"sample_from_anchor": next(iter(flags.values())), "layout_source": "flag"}
    width, size = _proposal_width(flat), flat["block_size"]
    if width in (size, size - 1):
        return {"sample_from_anchor": width == size, "layout_source": "proposal width"}
    order = "anchor first" if anchor_first else "filler first"
    if doubtful:
        logger.warning(
            f"This {family} drafter does not say which row of its block drafts first; {order} is assumed, and if that "
            f"is wrong hardly any draft is accepted. Compare with sample_from_anchor={not anchor_first}, or let "
            "`probe_layout` do so."
        )
    return {"sample_from_anchor": anchor_first, "layout_source": f"family ({family} is {order})"}


def _proposal_width(flat: Mapping[str, Any]) -> int | None:
    methods = (flat.get("speculators_config") or {}).get("proposal_methods") or ()
    widths = [method.get("speculative_tokens") for method in methods if isinstance(method, dict)]
    widths.append(flat.get("speculative_tokens"))
    return max((width for width in widths if type(width) is int), default=None)


def attention(flat: Mapping[str, Any], window_from: str, sliding_is_causal: bool) -> dict[str, Any]:
    """
    Layer types, window and causality.

    Args:
        window_from (`str`): See `DSparkConfig.sliding_window_from`.
        sliding_is_causal (`bool`): Whether sliding layers are causal in the block unless the configuration says so for
            all layers.
    """
    count, kinds = flat["num_hidden_layers"], flat.get("layer_types")
    window = flat.get("swa_window_size") or flat.get("sliding_window")
    if kinds is None:  # before there were layer types, Qwen3 counted the full layers at the bottom
        full = flat.get("max_window_layers", 28) if flat.get("use_sliding_window") and window else count
        kinds = [FULL] * min(full, count) + [SLIDING] * (count - full)
    if flat.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * count
    said = [flat[name] for name in ("causal", "dflash_query_causal", "is_causal") if name in flat]
    causal = {FULL, SLIDING} if said and said[0] else {SLIDING} if not said and sliding_is_causal else set()
    slides = SLIDING in kinds
    return {
        "layer_types": list(kinds),
        "sliding_window": window if slides else None,
        "sliding_window_from": window_from if slides else "query",
        "causal_layer_types": [kind for kind in sorted(causal) if kind in kinds],
    }


def rotary(flat: Mapping[str, Any]) -> dict[str, Any]:
    """
    Rotary parameters of a Qwen3 backbone, from any of the places where they have stood.

    Raises:
        NotImplementedError: rotations that differ between layers.
    """
    rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    if kinds := [rope[kind] for kind in (FULL, SLIDING) if isinstance(rope.get(kind), dict)]:
        if any(kind != kinds[0] for kind in kinds):
            raise NotImplementedError(f"rope_parameters={rope} differ between layers, which this version cannot run.")
        rope = kinds[0]
    theta = rope.get("rope_theta") or flat.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "default" if kind == "mrope" else kind
    # Full rotary, whatever the target's configuration left behind: Qwen3's backbone turns whole heads.
    unread = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")
    kept = {name: value for name, value in rope.items() if name not in unread}
    return kept | {"rope_theta": theta, "rope_type": kind}


def partial_rotary(flat: Mapping[str, Any]) -> float:
    """The part of a head's channels that turn in layers of Qwen3.5; without a word about it, as in its models."""
    rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    return rope.get("partial_rotary_factor") or flat.get("partial_rotary_factor") or 0.25


__all__ = ["attention", "flattened", "layout", "partial_rotary", "rotary"]
