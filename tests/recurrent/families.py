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
MAMBA1 = {k: v for k, v in NO_ATTENTION.items() if k not in ("intermediate_size", "max_position_embeddings")}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": KINDS,
}


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
    "lfm2-moe": _make(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        **BASE,
        **EXPERTS,
        num_experts=4,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "lfm3": _make(
        "Lfm3ForCausalLM",
        "Lfm3Config",
        **BASE,
        head_dim=8,
        sliding_window=6,
        layer_types=["conv", "sliding_attention", "conv"],
    ),
    "bamba": _make(
        "BambaForCausalLM",
        "BambaConfig",
        **BASE,
        **MAMBA,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
    ),
    "olmo-hybrid": _make(
        "OlmoHybridForCausalLM", "OlmoHybridConfig", **BASE, **{k: v for k, v in DELTA.items() if k != "head_dim"}
    ),
    "lara-mini": _make("LaraMiniForCausalLM", "LaraMiniConfig", **BASE, **DELTA),
    "kimi-linear": _make("KimiLinearForCausalLM", "KimiLinearConfig", **LATENT, linear_head_dim=8, linear_num_heads=4),
    "bailing-hybrid": _make(
        "BailingHybridForCausalLM", "BailingHybridConfig", **LATENT, head_dim=8, first_k_dense_replace=1
    ),
    "zaya": _make("ZayaForCausalLM", "ZayaConfig", **BASE),
    "mamba": _make("MambaForCausalLM", "MambaConfig", **MAMBA1, state_size=8),
    "falcon-mamba": _make("FalconMambaForCausalLM", "FalconMambaConfig", **MAMBA1, state_size=8),
    "jamba": _make(
        "JambaForCausalLM",
        "JambaConfig",
        **BASE,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "zamba": _make(
        "ZambaForCausalLM",
        "ZambaConfig",
        **{**BASE, "num_key_value_heads": 4, "num_hidden_layers": 4},
        mamba_d_state=8,
        n_mamba_heads=2,
        layers_block_type=["linear_attention", "hybrid"] * 2,
    ),
    "zamba2": _make(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        **BASE,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=8,
        adapter_rank=4,
    ),
}
# their mixers have to be given one token at a time
ONE_BY_ONE = {"mamba", "falcon-mamba", "jamba", "zamba", "zamba2", "nemotron-h"}
LOCAL = {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"], "head_dim": 8}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
# families that stay out, and words of the reason
REFUSED = {
    "recurrent-gemma": (
        _make("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **BASE, **LOCAL),
        "outside the cache",
    ),
    "rwkv": (
        _make("RwkvForCausalLM", "RwkvConfig", vocab_size=64, hidden_size=32, num_hidden_layers=3),
        "outside the cache",
    ),
    "xlstm": (
        _make("xLSTMForCausalLM", "xLSTMConfig", vocab_size=64, hidden_size=32, num_hidden_layers=3, num_heads=4),
        "outside the cache",
    ),
    "inkling": (
        _make("InklingForCausalLM", "InklingTextConfig", **COMMON, **EXPERTS, n_routed_experts=4),
        "4 modules",
    ),
    "inkling2": (
        _make("Inkling2ForCausalLM", "Inkling2TextConfig", **COMMON, **EXPERTS, n_routed_experts=4),
        "4 modules",
    ),
    "qwen4-exp": (
        _make(
            "Qwen4ExpForCausalLM",
            "Qwen4ExpTextConfig",
            **{k: v for k, v in BASE.items() if k != "intermediate_size"},
            **DELTA,
            **ROUTED,
            **INDEXER,
            indexer_compress_ratio=4,
        ),
        "indexed_attention",
    ),
}
