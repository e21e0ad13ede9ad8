"""Tiny random targets of every family with recurrent or convolutional states."""

from collections.abc import Callable

import transformers
from transformers import PreTrainedModel

from tests.batch.conftest import COMMON, EXPERTS


BASE = {name: value for name, value in COMMON.items() if name not in ("head_dim",)}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "head_dim": 8,
    "layer_types": KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROUTED = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
NO_ATTENTION = {k: v for k, v in BASE.items() if k not in ("num_attention_heads", "num_key_value_heads")}


def _make(name: str, config: str, **options: object) -> Callable[[], PreTrainedModel]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


def _multimodal() -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = {**BASE, **DELTA}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(config)


RECURRENT = {
    "qwen3-next": _make("Qwen3NextForCausalLM", "Qwen3NextConfig", **BASE, **DELTA, **ROUTED),
    "qwen3.5": _make("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **BASE, **DELTA),
    "qwen3.5-moe": _make("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **BASE, **DELTA, **ROUTED),
    "qwen3.5-multimodal": _multimodal,
    "lfm2": _make("Lfm2ForCausalLM", "Lfm2Config", **BASE, layer_types=["conv", "full_attention", "conv"]),
    "mamba2": _make(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        **NO_ATTENTION,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        expand=2,
        chunk_size=8,
    ),
    "nemotron-h": _make(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        **COMMON,
        layers_block_type=["mamba", "attention", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
    "granite-hybrid": _make(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        **BASE,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_expand=2,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "falcon-h1": _make(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        **COMMON,
        **MAMBA,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_expand=2,
    ),
}
