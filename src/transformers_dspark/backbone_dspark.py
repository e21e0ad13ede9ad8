"""The backbone of a drafter: layers that mix a block, and the context whose keys and values they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration_dspark import DSparkConfig
from .masks_dspark import Mask, Masks


KeysValues = tuple[torch.Tensor, torch.Tensor]
Join = Callable[[torch.Tensor, torch.Tensor], KeysValues]  # a block's keys and values -> those of context and block


class DSparkContext:
    """
    Keys and values of committed tokens, one pair of `(rows, kv_heads, capacity, head_dim)` buffers a layer.

    A committed token's entry is computed once. The block's own entries are written behind the committed ones, where
    the next commit overwrites them, so attention reads one contiguous view and nothing is copied or cropped.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self.has_gaps = False  # whether some entry belongs to no token; such a one stands at position -1
        self._buffers: list[KeysValues | None] = [None] * num_layers
        self._positions: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        """`(rows, length)` absolute positions of the committed tokens."""
        if self._positions is None:
            raise RuntimeError("This context is empty: commit tokens with `extend_context` first.")
        return self._positions[:, : self.length]

    def append(
        self, keys_values: list[KeysValues], position_ids: torch.Tensor, keep: torch.Tensor | None = None
    ) -> None:
        """
        Commits `n` entries: a `(rows, kv_heads, n, head_dim)` pair for each layer, at `(rows, n)` positions. Where
        `keep` `(rows, n)` is False a row has no token: the entry only fills the rectangle.
        """
        for layer, (keys, values) in enumerate(keys_values):
            self.stage(layer, keys, values)
        if keep is not None:
            self.has_gaps = True
            position_ids = position_ids.masked_fill(~keep.to(position_ids.device), -1)
        position_ids = position_ids.expand(keys_values[0][0].shape[0], -1)
        end = self.length + position_ids.shape[1]
        if self._positions is None or self._positions.shape[1] < end:
            grown = position_ids.new_empty(position_ids.shape[0], 2 * end)
            if self._positions is not None:
                grown[:, : self.length] = self._positions[:, : self.length]
            self._positions = grown
        self._positions[:, self.length : end] = position_ids
        self.length = end

    def stage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Writes entries behind the committed ones of a layer and returns views of all of them."""
        end = self.length + keys.shape[2]
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self._buffers[layer] = self._grown(buffers, (keys, values), end)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:, :, self.length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def attention(self, config: DSparkConfig) -> Masks | None:
        """For each kind of layers a function that attends over what [`~DSparkContext.stage`] returns; `None` if masks
        have to say what is visible."""
        return None

    def tail(self, window: int | None) -> int:
        """The first entry that a block behind `window` tokens of context may look at."""
        return 0 if self.has_gaps or window is None else max(0, self.length - window)

    def _grown(self, old: KeysValues | None, like: KeysValues, end: int) -> KeysValues:
        keys, values = (new.new_empty(*new.shape[:2], 2 * end, new.shape[-1]) for new in like)
        if old is not None:
            for new, previous in zip((keys, values), old, strict=True):
                new[:, :, : self.length] = previous[:, :, : self.length]
        return keys, values


class DSparkAttention(nn.Module):
    """Queries from the block; keys and values from the context (projected and cached per token) and the block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        gemma4 = config.backbone_type == "gemma4"
        self.scaling = 1.0 if gemma4 else self.head_dim**-0.5
        width, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        inner, kv_inner = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.gated = config.backbone_type == "qwen3_5"  # behind its query each head has a gate on what it mixes
        self.q_proj = nn.Linear(width, 2 * inner if self.gated else inner, bias=bias)
        self.k_proj = nn.Linear(width, kv_inner, bias=bias)
        self.v_proj = None if gemma4 and config.attention_k_eq_v else nn.Linear(width, kv_inner, bias=bias)
        self.o_proj = nn.Linear(inner, width, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps)
        self.v_norm = nn.RMSNorm(self.head_dim, eps, elementwise_affine=False) if gemma4 else nn.Identity()
        sinks = config.has_attention_sinks
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if sinks else None

    def keys_values(self, states: torch.Tensor, cos_sin: KeysValues) -> KeysValues:
        """Projects `(rows, n, hidden)` states to rotated keys and values of shape `(rows, kv_heads, n, head_dim)`."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        raw = self.k_proj(states).view(shape)
        values = raw if self.v_proj is None else self.v_proj(states).view(shape)
        return _rotated(self.k_norm(raw), *cos_sin).transpose(1, 2), self.v_norm(values).transpose(1, 2)

    def forward(self, states: torch.Tensor, cos_sin: KeysValues, join: Join, mask: Mask) -> torch.Tensor:
        """
        Mixes `(rows, n, hidden)` block states; `mask` is True where a query may look, `None` shows all, and a function
        attends itself: of queries, keys, values and scale it makes what they mix to, all `(rows, heads, n, head_dim)`.
        """
        raw, *gates = self.q_proj(states).unflatten(-1, (self.num_heads, -1)).split(self.head_dim, dim=-1)
        queries = _rotated(self.q_norm(raw), *cos_sin).transpose(1, 2)
        keys, values = join(*self.keys_values(states, cos_sin))
        rows, heads, length, dim = queries.shape
        group, sinks = heads // keys.shape[1], self.attention_sink_bias
        if callable(mask):
            mixed = mask(queries, keys, values, self.scaling)
        elif sinks is None and (mask is None or length <= dim):
            # the heads of a group become more rows: only the mask, if there is one, is copied, and not the keys
            folded = queries.reshape(rows, keys.shape[1], group * length, dim)
            if mask is not None:
                mask = mask.expand(-1, -1, length, -1).repeat(1, 1, group, 1)
            mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self.scaling)
        else:
            keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
            if sinks is None:
                mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scaling)
            else:
                mixed = _attention_with_sinks(queries * self.scaling, keys, values, mask, sinks)
        mixed = mixed.reshape(rows, heads, length, dim).transpose(1, 2)
        for gate in gates:
            mixed = mixed * gate.sigmoid()
        return self.o_proj(mixed.reshape(rows, length, -1))


class DSparkRotaryEmbedding(nn.Module):
    """
    Angles of any kind of rotary embedding that Transformers knows.

    The frequencies stay in float32 when the drafter is cast: rounded to bfloat16, they would be wrong by whole turns
    after some hundred positions. Transformers recognises the class by its name when it fills in buffers on loading.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = (config.rope_parameters or {})["rope_type"]
        kinds = ROPE_INIT_FUNCTIONS | {"default": self.compute_default_rope_parameters}
        if self.rope_type not in kinds:
            raise ValueError(f"DSparkConfig: rope_type={self.rope_type!r} must be one of {sorted(kinds)}.")
        try:
            frequencies, self.attention_scaling = kinds[self.rope_type](config)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"DSparkConfig: rope_parameters={config.rope_parameters} do not fit their rope_type ({error!r})."
            ) from error
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: DSparkConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        size = config.rotary_size
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return 1.0 / ((config.rope_parameters or {})["rope_theta"] ** exponents), 1.0

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DSparkRotaryEmbedding:
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            if getattr(self, name).dtype != torch.float32:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @dynamic_rope_update
    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> KeysValues:
        """Cosines and sines `(rows, n, head_dim)` at `(rows, n)` positions, with the dtype and device of `like`."""
        angles = position_ids[..., None].to(like.device).float() * self.inv_freq.to(like.device)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(like.dtype), sin.to(like.dtype)


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"DSparkConfig: hidden_act={config.hidden_act!r} must be one of {sorted(ACT2FN)}.")
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class DSparkLayer(nn.Module):
    """A decoder layer: Qwen3's pre-norm form, or Gemma4's sandwich norms with a layer scalar."""

    layer_scalar: torch.Tensor
    # As the layers of Transformers have it, whose own base class for that would import every model.
    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., torch.Tensor]

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.sandwich = config.backbone_type == "gemma4"
        self.self_attn = DSparkAttention(config)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.sandwich:
            self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def keys_values(self, states: torch.Tensor, cos_sin: KeysValues) -> KeysValues:
        """What the context keeps of `(rows, n, hidden)` states, see [`DSparkAttention.keys_values`]."""
        return self.self_attn.keys_values(states, cos_sin)

    def forward(self, states: torch.Tensor, cos_sin: KeysValues, join: Join, mask: Mask) -> torch.Tensor:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(self._forward, states, cos_sin, join, mask)
        return self._forward(states, cos_sin, join, mask)

    def _forward(self, states: torch.Tensor, cos_sin: KeysValues, join: Join, mask: Mask) -> torch.Tensor:
        mixed = self.self_attn(self.input_layernorm(states), cos_sin, join, mask)
        if not self.sandwich:
            states = states + mixed
            return states + self.mlp(self.post_attention_layernorm(states))
        states = states + self.post_attention_layernorm(mixed)
        states = states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        return states * self.layer_scalar


class Parts(NamedTuple):
    """
    What a kind of backbone is made of.

    Args:
        layer, rotary (`Callable`): Of a drafter's configuration, a layer and the angles of its positions.
        norm (`Callable`): Of a width and `eps`, a norm of hidden states.
        collapse (`Callable`, *optional*): Of a configuration, the module that makes one state of a token's streams.
    """

    layer: Callable[[DSparkConfig], nn.Module]
    rotary: Callable[[DSparkConfig], DSparkRotaryEmbedding]
    norm: Callable[..., nn.Module]
    collapse: Callable[[DSparkConfig], nn.Module] | None = None


DENSE_PARTS = Parts(DSparkLayer, DSparkRotaryEmbedding, nn.RMSNorm)


def _attention_with_sinks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention whose softmax, in float32, has one more logit a head, `sinks` `(heads,)`, with a value of zero."""
    scores = (queries @ keys.transpose(2, 3)).float()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    extra = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    probs = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    return probs.to(values.dtype) @ values


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Applies the rotary embedding to `(rows, n, heads, head_dim)` with `(rows, n, size)` angles: the first `size`
    channels of a head turn.
    """
    states, still = states.split((cos.shape[-1], states.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = states.chunk(2, dim=-1)
    turned = states * cos.unsqueeze(2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(2)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


__all__ = [
    "DENSE_PARTS", "DSparkAttention", "DSparkContext", "DSparkLayer", "DSparkRotaryEmbedding", "Join", "KeysValues",
    "Parts",
]  # fmt: skip
