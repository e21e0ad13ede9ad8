"""The sparse backbone: DeepSeek-V4's own modules, as Transformers has them, over a drafter's block and context.

Nothing of a layer is computed here but what its attention keeps of a committed token. The context takes the place of
the cache in Transformers' attention, which asks it for the keys of everything before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV4Config, initialization
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4Experts,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4TopKRouter,
    apply_rotary_pos_emb,
)

from .backbone_dspark import DSparkRotaryEmbedding, Join, KeysValues, Parts
from .configuration_dspark import SLIDING, SPARSE_FIELDS, DSparkConfig
from .masks_dspark import Mask


# kept in float32 whatever the drafter's dtype, as Transformers does in the target
FLOAT32_MODULES = frozenset(
    {
        "attn_hc", "ffn_hc", "hc_head", "sinks", "e_score_correction_bias", "q_a_norm", "kv_norm", "input_layernorm",
        "post_attention_layernorm", "hidden_norm", "norm",
    }
)  # fmt: skip
_SHARED = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "hidden_act", "max_position_embeddings", "initializer_range",
)  # fmt: skip


def stage_config(config: DSparkConfig) -> DeepseekV4Config:
    """A drafter's configuration in Transformers' words, for one stage: a layer without compressed attention."""
    fields = {name: getattr(config, name) for name in _SHARED}
    fields |= {name: (config.backbone_config or {})[name] for name in SPARSE_FIELDS}
    rope = dict(config.rope_parameters or {})
    return DeepseekV4Config(
        **fields,
        moe_intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        layer_types=[SLIDING],
        mlp_layer_types=["moe"],
        sliding_window=config.sliding_window,
        rope_parameters={"main": rope, "compress": rope},
        pad_token_id=None,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
    )


class DSparkSparseLayer(DeepseekV4DecoderLayer):
    """One stage: a decoder layer of DeepSeek-V4 whose attention also reads the drafter's context."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(stage_config(config), layer_idx=0)

    def keys_values(self, states: torch.Tensor, cos_sin: KeysValues) -> KeysValues:
        """
        What the context keeps of `(rows, n, hidden)` states: rotated keys `(rows, 1, n, head_dim)`. They are the
        values too, so the second tensor has no channels.
        """
        attention = self.self_attn
        keys = apply_rotary_pos_emb(attention.kv_norm(attention.kv_proj(states))[:, None], *cos_sin)
        return keys, keys[..., :0]

    def forward(self, states: torch.Tensor, cos_sin: KeysValues, join: Join, mask: Mask) -> torch.Tensor:
        """
        Mixes the streams of a block.

        Args:
            states (`torch.FloatTensor` of shape `(rows, n, streams, hidden)`): The block's streams.
            cos_sin (`tuple`): Cosines and sines `(rows, n, rotary_size / 2)` of its positions.
            join (`Callable`): A block's keys and values to those of context and block.
            mask (`torch.BoolTensor`, *optional*): True where a query may look; `None` shows everything.

        Raises:
            NotImplementedError: a function is to attend: it knows nothing of sinks.
        """
        if callable(mask):
            raise NotImplementedError(
                "The sparse backbone attends with Transformers' own function for DeepSeek-V4; give it a mask."
            )
        if mask is not None:
            mask = torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, float("-inf"))
        return super().forward(
            states,
            position_embeddings={"main": cos_sin},
            position_ids=None,
            attention_mask=mask,
            cache=_JoinedKeys(join),
        )


class _JoinedKeys:
    """What Transformers' attention takes for its cache."""

    def __init__(self, join: Join) -> None:
        self._join = join

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **kwargs: Any) -> KeysValues:
        keys, _ = self._join(keys, values[..., :0])
        return keys, keys


class DSparkSparseRotaryEmbedding(DSparkRotaryEmbedding):
    """Angles of the channels that turn; neighbouring ones turn together, so there is one for each pair."""

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> KeysValues:
        """Cosines and sines `(rows, n, rotary_size / 2)` at `(rows, n)` positions."""
        cos, sin = super().forward(like, position_ids)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]


def _collapse(config: DSparkConfig) -> nn.Module:
    """The module that makes one state of a token's streams."""
    return DeepseekV4HyperHead(stage_config(config))


SPARSE_PARTS = Parts(DSparkSparseLayer, DSparkSparseRotaryEmbedding, DeepseekV4RMSNorm, _collapse)


def initialize(module: nn.Module, std: float) -> None:
    """Values of a fresh drafter for those parameters that Transformers' general rule does not know."""
    normal: dict[type, tuple[str, ...]] = {
        DeepseekV4TopKRouter: ("weight",),
        DeepseekV4Experts: ("gate_up_proj", "down_proj"),
        DeepseekV4HyperConnection: ("fn",),
        DeepseekV4HyperHead: ("hc_fn",),
    }
    zero: dict[type, tuple[str, ...]] = {
        DeepseekV4TopKRouter: ("e_score_correction_bias",),
        DeepseekV4Attention: ("sinks",),
        DeepseekV4HyperConnection: ("base",),
        DeepseekV4HyperHead: ("hc_base",),
    }
    one: dict[type, tuple[str, ...]] = {DeepseekV4HyperConnection: ("scale",), DeepseekV4HyperHead: ("hc_scale",)}
    for name in normal.get(type(module), ()):
        initialization.normal_(getattr(module, name), mean=0.0, std=std)
    for name in zero.get(type(module), ()):
        initialization.zeros_(getattr(module, name))
    for name in one.get(type(module), ()):
        initialization.ones_(getattr(module, name))


__all__ = [
    "FLOAT32_MODULES", "SPARSE_PARTS", "DSparkSparseLayer", "DSparkSparseRotaryEmbedding", "initialize",
    "stage_config",
]  # fmt: skip
