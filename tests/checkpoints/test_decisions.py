"""What the loader decides about a configuration: family, layout and its source, taps, number of drafted tokens."""

from typing import Any

import pytest
import torch

from tests.checkpoints.families import FULL, HEADS, MIXED, ROPE, SHAPE, SLIDING, TAPS, TWINS, speculators
from transformers_dspark.checkpoints import family_of
from transformers_dspark.checkpoints.family import convert


A, F = True, False
BODY = SHAPE | ROPE
DEEPSPEC = BODY | TAPS | {"block_size": 7, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
NESTED = BODY | {"model_type": "qwen3", "block_size": 8, "layer_types": FULL}
ZLAB = NESTED | {"architectures": ["DFlashDraftModel"], "dflash_config": TAPS}
SPECFORGE = NESTED | {"architectures": ["DSparkDraftModel"], "dflash_config": TAPS | {"projector_type": "dspark"}}
LFM2 = NESTED | {
    "architectures": ["Lfm2DSparkDraftModel"],
    "block_size": 9,
    "rope_is_neox_style": False,
    "dflash_config": TAPS,
}
NEMOTRON = TWINS["Nemotron"].raw | {"block_size": 8}
MUSE = TWINS["Muse"].raw | {"block_size": 16}


def of_speculators(width: int | None, size: int = 8, algorithm: str = "dspark", **top: Any) -> dict[str, Any]:
    return speculators(algorithm, width, {"layer_types": FULL}, block_size=size, **top)


def inside(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return raw | {"dflash_config": raw["dflash_config"] | fields}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


BY_FAMILY = {
    "DeepSpec": "family (DeepSpec is anchor first)",
    "SpecForge DSpark": "family (SpecForge DSpark is anchor first)",
    "LFM2.5 DSpark": "family (LFM2.5 DSpark is anchor first)",
    "Nemotron DSpark": "family (Nemotron DSpark is anchor first)",
    "z-lab DFlash": "family (z-lab DFlash is filler first)",
    "speculators": "family (speculators is filler first)",
    "Muse assistant (DFlash)": "family (Muse assistant (DFlash) is filler first)",
}
S, WIDTH = "speculators", "proposal width"
# what it is: configuration, family, layout, source of the layout ("" for the family's), taps, drafted tokens
TABLE: dict[str, tuple[dict[str, Any], str, bool, str, list[int], int]] = {
    "DeepSpec": (DEEPSPEC | HEADS, "DeepSpec", A, "", [0, 2, 4], 7),
    "DeepSpec, rank 0": (DEEPSPEC | {"markov_rank": 0}, "DeepSpec", A, "", [0, 2, 4], 7),
    "DeepSpec, flag": (DEEPSPEC | {"sample_from_anchor": True}, "DeepSpec", A, "flag", [0, 2, 4], 7),
    "DeepSpec, filler": (DEEPSPEC | {"sample_from_anchor": False}, "DeepSpec", F, "flag", [0, 2, 4], 6),
    "DeepSpec, query zero": (DEEPSPEC | {"query_zero_predicts_next": True}, "DeepSpec", A, "flag", [0, 2, 4], 7),
    "DeepSpec, query zero not": (DEEPSPEC | {"query_zero_predicts_next": False}, "DeepSpec", F, "flag", [0, 2, 4], 6),
    "DeepSpec, bonus anchor": (DEEPSPEC | {"dspark_bonus_anchor": True}, "DeepSpec", F, "flag", [0, 2, 4], 6),
    "DeepSpec, no bonus anchor": (DEEPSPEC | {"dspark_bonus_anchor": False}, "DeepSpec", A, "flag", [0, 2, 4], 7),
    "DeepSpec, null flag": (DEEPSPEC | {"sample_from_anchor": None}, "DeepSpec", A, "", [0, 2, 4], 7),
    "DeepSpec, embedding tap": (
        DEEPSPEC | {"target_layer_ids": [-1, 1, 3]},
        "DeepSpec",
        A,
        "",
        [-1, 1, 3],
        7,
    ),
    "DeepSpec, no architecture": (without(DEEPSPEC, "architectures", "model_type"), "DeepSpec", A, "", [0, 2, 4], 7),
    "DeepSpec, its target's": (DEEPSPEC | {"architectures": ["Qwen3ForCausalLM"]}, "DeepSpec", A, "", [0, 2, 4], 7),
    "DeepSpec, SpecForge's name": (
        DEEPSPEC | {"architectures": ["DSparkDraftModel"]},
        "DeepSpec",
        A,
        "",
        [0, 2, 4],
        7,
    ),
    "DeepSpec, text_config": (
        {"architectures": ["Qwen3DSparkModel"], "text_config": without(DEEPSPEC, "architectures")},
        "DeepSpec",
        A,
        "",
        [0, 2, 4],
        7,
    ),
    "DeepSpec, dspark_config": (
        BODY | {"architectures": ["Qwen3DSparkModel"], "dspark_config": TAPS | HEADS | {"block_size": 7}},
        "DeepSpec",
        A,
        "",
        [0, 2, 4],
        7,
    ),
    "DeepSpec, prefixed names": (
        BODY
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "dspark_target_layer_ids": [0, 2, 4],
            "dspark_noise_token_id": 60,
        },
        "DeepSpec",
        A,
        "",
        [0, 2, 4],
        7,
    ),
    "SpecForge": (SPECFORGE, "SpecForge DSpark", A, "", [0, 2, 4], 8),
    "SpecForge, DeepSpec's name": (
        SPECFORGE | {"architectures": ["Qwen3DSparkModel"]},
        "SpecForge DSpark",
        A,
        "",
        [0, 2, 4],
        8,
    ),
    "SpecForge, z-lab's name": (
        SPECFORGE | {"architectures": ["DFlashDraftModel"]},
        "SpecForge DSpark",
        A,
        "",
        [0, 2, 4],
        8,
    ),
    "SpecForge, no architecture": (without(SPECFORGE, "architectures"), "SpecForge DSpark", A, "", [0, 2, 4], 8),
    "SpecForge, no projector": (
        SPECFORGE | {"dflash_config": TAPS},
        "SpecForge DSpark",
        A,
        "",
        [0, 2, 4],
        8,
    ),
    "SpecForge, filler": (inside(SPECFORGE, sample_from_anchor=False), "SpecForge DSpark", F, "flag", [0, 2, 4], 7),
    "SpecForge DFlash": (inside(ZLAB, projector_type="dflash"), "z-lab DFlash", F, "", [0, 2, 4], 7),
    "z-lab": (ZLAB, "z-lab DFlash", F, "", [0, 2, 4], 7),
    "z-lab, block inside": (
        inside(without(ZLAB, "block_size"), block_size=8),
        "z-lab DFlash",
        F,
        "",
        [0, 2, 4],
        7,
    ),
    "z-lab, block twice": (inside(ZLAB, block_size=8), "z-lab DFlash", F, "", [0, 2, 4], 7),
    "z-lab, no architecture": (without(ZLAB, "architectures"), "z-lab DFlash", F, "", [0, 2, 4], 7),
    "z-lab, flat": (without(ZLAB, "dflash_config") | TAPS, "z-lab DFlash", F, "", [0, 2, 4], 7),
    "z-lab, anchor first": (ZLAB | {"sample_from_anchor": True}, "z-lab DFlash", A, "flag", [0, 2, 4], 8),
    "z-lab, anchor first inside": (inside(ZLAB, sample_from_anchor=True), "z-lab DFlash", A, "flag", [0, 2, 4], 8),
    "z-lab, query zero inside": (
        inside(ZLAB, query_zero_predicts_next=True, sample_from_anchor=True),
        "z-lab DFlash",
        A,
        "flag",
        [0, 2, 4],
        8,
    ),
    "LFM2.5": (LFM2 | HEADS, "LFM2.5 DSpark", A, "", [0, 2, 4], 9),
    "LFM2.5, another name": (LFM2 | {"architectures": ["DraftModel"]}, "LFM2.5 DSpark", A, "", [0, 2, 4], 9),
    "Nemotron": (NEMOTRON, "Nemotron DSpark", F, "flag", [0, 2, 4], 7),
    "Nemotron, no flag": (
        without(NEMOTRON, "sample_from_anchor", "dspark_bonus_anchor")
        | {"dflash_config": TAPS | {"swa_window_size": 5}},
        "Nemotron DSpark",
        A,
        "",
        [0, 2, 4],
        8,
    ),
    "Nemotron, one flag": (
        without(NEMOTRON, "sample_from_anchor") | {"dflash_config": TAPS | {"swa_window_size": 5}},
        "Nemotron DSpark",
        F,
        "flag",
        [0, 2, 4],
        7,
    ),
    "Nemotron DFlash": (
        ZLAB | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "sample_from_anchor": False},
        "z-lab DFlash",
        F,
        "flag",
        [0, 2, 4],
        7,
    ),
    "Muse": (MUSE, "Muse assistant (DFlash)", F, "", [0, 2, 4], 15),
    "Muse, no architecture": (without(MUSE, "architectures"), "Muse assistant (DFlash)", F, "", [0, 2, 4], 15),
    "speculators A": (of_speculators(8, sample_from_anchor=True), S, A, "flag", [0, 2, 4], 8),
    "speculators F": (of_speculators(7, sample_from_anchor=False), S, F, "flag", [0, 2, 4], 7),
    "speculators, width A": (of_speculators(8), S, A, WIDTH, [0, 2, 4], 8),
    "speculators, width F": (of_speculators(7), S, F, WIDTH, [0, 2, 4], 7),
    "speculators, flag and another width": (
        of_speculators(7, sample_from_anchor=True),
        S,
        A,
        "flag",
        [0, 2, 4],
        8,
    ),
    "speculators, 15 of 16": (of_speculators(15, 16), S, F, WIDTH, [0, 2, 4], 15),
    "speculators, narrow": (of_speculators(3), S, F, "", [0, 2, 4], 7),
    "speculators, silent": (of_speculators(None), S, F, "", [0, 2, 4], 7),
    "speculators DFlash": (of_speculators(7, algorithm="dflash"), S, F, WIDTH, [0, 2, 4], 7),
    "speculators DFlash, A": (of_speculators(8, algorithm="dflash"), S, A, WIDTH, [0, 2, 4], 8),
    "speculators, no type": (without(of_speculators(8), "speculators_model_type"), S, A, WIDTH, [0, 2, 4], 8),
    "speculators, model type": (of_speculators(8, model_type="qwen3"), S, A, WIDTH, [0, 2, 4], 8),
    "speculators, embedding tap": (
        of_speculators(8, aux_hidden_state_layer_ids=[0, 3, 6]),
        S,
        A,
        WIDTH,
        [-1, 2, 5],
        8,
    ),
}


def decided(raw: dict[str, Any], **options: Any):
    taps = torch.zeros(SHAPE["hidden_size"], 3 * SHAPE["hidden_size"])
    return convert(family_of(raw), raw, {"fc.weight": taps}, **options)


@pytest.mark.parametrize("case", TABLE)
def test_decision(case):
    raw, family, anchor_first, source, taps, drafted = TABLE[case]
    opened = decided(raw)
    config = opened.config
    found = (opened.family, config.sample_from_anchor, config.layout_source)
    assert found == (family, anchor_first, source or BY_FAMILY[family])
    assert (config.target_layer_ids, config.num_draft_tokens) == (taps, drafted)


def test_the_table_is_large_enough():
    assert len(TABLE) >= 40
    assert {row[1] for row in TABLE.values()} == set(BY_FAMILY)


def test_the_callers_layout_goes_before_all():
    for case, (raw, _, anchor_first, *_) in TABLE.items():
        config = decided(raw, sample_from_anchor=not anchor_first).config
        assert (config.sample_from_anchor, config.layout_source) == (not anchor_first, "argument"), case


LIES = [-1, 0, True, "x", 2.5, [], [1], [[1]], [{}], {}, {"a": 1}, {"full_attention": 3}]
SOMEWHERE = [
    "dspark_markov_rank",
    "layer_types",
    "rope_scaling",
    "speculators_config",
    "swa_window_size",
    "text_config",
]


@pytest.mark.parametrize("case", ["DeepSpec", "SpecForge", "z-lab", "LFM2.5", "Nemotron", "Muse", "speculators A"])
def test_no_lie_is_worse_than_an_error_in_words(case):
    raw, messages = TABLE[case][0], []
    for name in [*raw, *SOMEWHERE]:
        for lie in LIES:
            try:
                decided(raw | {name: lie})
            except (ValueError, NotImplementedError) as error:
                messages.append(str(error))
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message or not message.endswith(".")]


# ---- windows, causality and rotation


WINDOW = {"sliding_window": 5}
BOTH = ["full_attention", "sliding_attention"]
CAUSAL = ["sliding_attention"]
# what it is: configuration, layer types, window, where it starts, layer types that are causal in the block
WINDOWS: dict[str, tuple[dict[str, Any], list[str], int | None, str, list[str]]] = {
    "full": (ZLAB, FULL, None, "query", []),
    "full, unused window": (ZLAB | WINDOW, FULL, None, "query", []),
    "mixed": (ZLAB | WINDOW | {"layer_types": MIXED}, MIXED, 5, "query", CAUSAL),
    "mixed, causal": (inside(ZLAB | WINDOW | {"layer_types": MIXED}, causal=True), MIXED, 5, "query", BOTH),
    "mixed, not causal": (inside(ZLAB | WINDOW | {"layer_types": MIXED}, causal=False), MIXED, 5, "query", []),
    "mixed, is_causal": (ZLAB | WINDOW | {"layer_types": MIXED, "is_causal": False}, MIXED, 5, "query", []),
    "use_swa": (inside(ZLAB, use_swa=True, swa_window_size=5, causal=False), SLIDING, 5, "query", []),
    "before layer types": (
        without(ZLAB, "layer_types") | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        ["full_attention", "sliding_attention"],
        5,
        "query",
        CAUSAL,
    ),
    "before layer types, unused": (
        without(ZLAB, "layer_types") | WINDOW | {"use_sliding_window": False, "max_window_layers": 0},
        FULL,
        None,
        "query",
        [],
    ),
    "SpecForge": (SPECFORGE | WINDOW | {"layer_types": SLIDING}, SLIDING, 5, "query", CAUSAL),
    "DeepSpec": (DEEPSPEC | WINDOW | {"layer_types": MIXED}, MIXED, 5, "query", CAUSAL),
    "Nemotron": (NEMOTRON, SLIDING, 5, "query", CAUSAL),
    "Muse": (MUSE, SLIDING, 6, "query", []),
    "Muse, silent": (without(MUSE, "sliding_window"), SLIDING, 2049, "query", []),
    "speculators": (
        speculators("dspark", 8, WINDOW | {"layer_types": SLIDING}, block_size=8),
        SLIDING,
        5,
        "anchor",
        CAUSAL,
    ),
    "speculators, not causal": (
        speculators("dspark", 8, WINDOW | {"layer_types": MIXED}, block_size=8, sliding_window_non_causal=True),
        MIXED,
        5,
        "anchor",
        [],
    ),
    "speculators, full": (of_speculators(8), FULL, None, "query", []),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_window(case):
    raw, kinds, window, start, causal = WINDOWS[case]
    config = decided(raw).config
    found = (config.layer_types, config.sliding_window, config.sliding_window_from, config.causal_layer_types)
    assert found == (kinds, window, start, causal)
    assert config.needs_masks == (config.layer_types != FULL)


def test_muse_without_a_vocabulary_has_its_targets():
    assert decided(without(MUSE, "vocab_size")).config.vocab_size == 202048


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
ROTATIONS = {
    "parameters": ({"rope_parameters": PLAIN}, PLAIN),
    "theta only": ({"rope_theta": 5e5}, PLAIN),
    "nothing": ({}, PLAIN | {"rope_theta": 10000.0}),
    "old scaling": (
        {"rope_theta": 5e5, "rope_scaling": YARN | {"type": "yarn"}},
        YARN | {"rope_theta": 5e5},
    ),
    "very old scaling": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    ),
    "all at once": (
        {"rope_theta": 5e5, "rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 5e5}},
        YARN | {"rope_theta": 5e5},
    ),
    "by layer": ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}}, PLAIN),
    "leftovers": (
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}},
        PLAIN,
    ),
    "mrope": ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 5e5, "mrope_section": [2, 1, 1]}}, PLAIN),
}


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotation(case):
    given, expected = ROTATIONS[case]
    assert decided(without(ZLAB, "rope_parameters") | given).config.rope_parameters == expected
