"""One drafter, written as each family publishes it: the same weights under other names, and their configuration."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from transformers_dspark import DSparkConfig, DSparkDrafter


SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
MIXED = ["sliding_attention", "full_attention"]
TAPS = {"mask_token_id": 60, "target_layer_ids": [0, 2, 4]}
HEADS = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
CAUSAL_SLIDING = {"causal_layer_types": ["sliding_attention"]}


def speculators(algorithm: str, width: int | None, backbone: dict[str, Any], **top: Any) -> dict[str, Any]:
    methods = [] if width is None else [{"proposal_type": "greedy", "speculative_tokens": width}]
    return {
        "architectures": ["DSparkDraftModel" if algorithm == "dspark" else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "mask_token_id": 60,
        "target_hidden_size": None,
        "speculators_config": {"algorithm": algorithm, "proposal_methods": methods},
        "speculators_model_type": algorithm,
        "transformer_layer_config": SHAPE | ROPE | {"model_type": "qwen3"} | backbone,
    } | top


@dataclass(frozen=True)
class Twin:
    """A family's configuration, and what of the canonical one differs from `SHAPE`, `ROPE` and `TAPS`."""

    family: str
    raw: dict[str, Any]
    canonical: dict[str, Any]
    rename: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False


TWINS = {
    "DeepSpec": Twin(
        "DeepSpec",
        SHAPE | ROPE | TAPS | HEADS | {"block_size": 4, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"},
        HEADS | {"block_size": 4},
    ),
    "DeepSpec without heads": Twin(
        "DeepSpec",
        SHAPE | TAPS | {"rope_theta": 1e4, "block_size": 4, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0},
        {"block_size": 4},
    ),
    "SpecForge": Twin(
        "SpecForge DSpark",
        SHAPE
        | {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            "block_size": 4,
            "draft_vocab_size": 61,
            "dtype": "bfloat16",
            "layer_types": MIXED,
            "sliding_window": 5,
            "rope_parameters": YARN,
            "rope_scaling": {name: value for name, value in YARN.items() if name != "rope_theta"},
            "rope_theta": 10000.0,
            "dflash_config": TAPS | HEADS | {"projector_type": "dspark", "attention_mode": "gqa"},
        },
        HEADS | CAUSAL_SLIDING | {"block_size": 4, "rope_parameters": YARN, "layer_types": MIXED, "sliding_window": 5},
    ),
    "speculators DSpark": Twin(
        "speculators",
        speculators("dspark", 4, {"layer_types": FULL}, **HEADS, sample_from_anchor=True, block_size=4),
        HEADS | {"block_size": 4},
    ),
    "speculators DSpark, reduced": Twin(
        "speculators",
        speculators(
            "dspark",
            3,
            {"layer_types": SLIDING, "sliding_window": 5, "use_sliding_window": True},
            **HEADS | {"markov_head_type": "rnn"},
            block_size=4,
            draft_vocab_size=30,
        ),
        HEADS
        | CAUSAL_SLIDING
        | {
            "markov_head_type": "rnn",
            "block_size": 4,
            "sample_from_anchor": False,
            "draft_vocab_size": 30,
            "own_head": True,
            "layer_types": SLIDING,
            "sliding_window": 5,
            "sliding_window_from": "anchor",
        },
    ),
    "speculators DFlash": Twin(
        "speculators",
        speculators(
            "dflash", 3, {"layer_types": SLIDING, "sliding_window": 5}, block_size=4, sliding_window_non_causal=True
        ),
        {
            "block_size": 4,
            "sample_from_anchor": False,
            "layer_types": SLIDING,
            "sliding_window": 5,
            "sliding_window_from": "anchor",
        },
    ),
    "z-lab DFlash": Twin(
        "z-lab DFlash",
        SHAPE
        | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "layer_types": MIXED,
            "sliding_window": 5,
            "dflash_config": TAPS | {"block_size": 4},
        },
        CAUSAL_SLIDING | {"block_size": 4, "sample_from_anchor": False, "layer_types": MIXED, "sliding_window": 5},
    ),
    "LFM2.5": Twin(
        "LFM2.5 DSpark",
        SHAPE
        | {
            "architectures": ["Lfm2DSparkDraftModel"],
            "model_type": "qwen3",
            "rope_theta": 10000.0,
            "rope_is_neox_style": False,
            "block_size": 4,
            "layer_types": FULL,
            "dflash_config": TAPS | {"num_target_layers": 6},
        }
        | HEADS,
        HEADS | {"block_size": 4, "num_target_layers": 6},
        interleaved=True,
    ),
    "Nemotron": Twin(
        "Nemotron DSpark",
        SHAPE
        | TAPS
        | {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "rope_theta": 10000,
            "block_size": 4,
            "attention_sink_bias": True,
            "dflash_query_causal": True,
            "dspark_bonus_anchor": True,
            "dspark_markov_rank": 6,
            "draft_vocab_size": None,
            "has_embed_tokens": True,
            "has_lm_head": False,
            "layer_types": SLIDING,
            "sample_from_anchor": False,
            "dflash_config": TAPS
            | {
                "attention_sink_bias": True,
                "causal": True,
                "sample_from_anchor": False,
                "swa_window_size": 5,
                "use_swa": True,
            },
        },
        CAUSAL_SLIDING
        | {
            "block_size": 4,
            "markov_rank": 6,
            "sample_from_anchor": False,
            "layer_types": SLIDING,
            "sliding_window": 5,
            "has_attention_sinks": True,
        },
    ),
    "Muse": Twin(
        "Muse assistant (DFlash)",
        SHAPE
        | TAPS
        | {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "block_size": 4,
            "sliding_window": 5,
        },
        {
            "block_size": 4,
            "sample_from_anchor": False,
            "layer_types": SLIDING,
            "sliding_window": 6,
            "raw_embedding": True,
            "bos_token_id": 200000,
            "eos_token_id": 200001,
            "pad_token_id": 200018,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        rename={"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
    ),
}


def canonical(twin: Twin) -> DSparkDrafter:
    """The canonical twin, with random weights of a size that shows every mistake."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(DSparkConfig(**SHAPE | ROPE | TAPS | twin.canonical)).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.3 + centre)
        if drafter.config.has_reduced_vocabulary:
            drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))  # every second token
    return drafter


def tensors_of(twin: Twin, drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """The drafter's tensors as the family saves them."""
    tensors = {twin.rename.get(name, name): tensor.clone() for name, tensor in drafter.state_dict().items()}
    if twin.interleaved:
        half = SHAPE["head_dim"] // 2
        for name, tensor in tensors.items():
            if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
                heads = tensor.unflatten(0, (-1, 2, half))
                tensors[name] = heads.transpose(1, 2).flatten(0, 2).contiguous()  # halves become neighbours
    return tensors


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder
