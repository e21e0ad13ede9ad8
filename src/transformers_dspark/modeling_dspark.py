"""The DSpark drafter: a block backbone over cached context, and how a block is drafted with it.

This file knows tensors only. It does not know decoding loops, sampling rules, schedules or Transformers' generation code.
Together with `configuration_dspark.py` and `heads_dspark.py` it is copied into Hub repositories, so it imports nothing
else of the package at module level.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from .configuration_dspark import DSparkConfig
from .heads_dspark import DSparkConfidenceHead, DSparkMarkovHead


KeysValues = tuple[torch.Tensor, torch.Tensor]
Select = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
KeepGoing = Callable[[int, "torch.Tensor | None", torch.Tensor], bool]


@dataclass(frozen=True)
class Proposal:
    """
    One drafted block of `width <= gamma` tokens a row.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, width)`): Drafted ids in the target's vocabulary.
        logits (`torch.FloatTensor` of shape `(rows, width, vocab_size)`): float32 logits that each token was chosen from;
            `-inf` where the drafter cannot propose.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): Probability in 0..1 that the token passes
            verification given that those before it did. It depends on earlier tokens only.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


class DSparkContext:
    """
    Keys and values of committed tokens, one pair of `(rows, kv_heads, capacity, head_dim)` buffers a layer.

    A committed token's entry is computed once. The block's own entries are written behind the committed ones, where the
    next commit overwrites them, so attention reads one contiguous view and nothing is copied or cropped.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._buffers: list[KeysValues | None] = [None] * num_layers

    def append(self, keys_values: list[KeysValues]) -> None:
        """Commits `n` tokens: a `(rows, kv_heads, n, head_dim)` pair for each layer."""
        for layer, (keys, values) in enumerate(keys_values):
            self.stage(layer, keys, values)
        self.length += keys_values[0][0].shape[2]

    def stage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Writes entries behind the committed ones of a layer and returns views of all of them."""
        end = self.length + keys.shape[2]
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self._buffers[layer] = self._grown(buffers, keys, end)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:, :, self.length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def _grown(self, old: KeysValues | None, like: torch.Tensor, end: int) -> KeysValues:
        rows, heads, _, dim = like.shape
        fresh = (like.new_empty(rows, heads, 2 * end, dim), like.new_empty(rows, heads, 2 * end, dim))
        if old is not None:
            for new, previous in zip(fresh, old, strict=True):
                new[:, :, : self.length] = previous[:, :, : self.length]
        return fresh


class DSparkAttention(nn.Module):
    """Queries from the block; keys and values from the context (projected and cached per token) and the block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads, gemma4 = config.num_attention_heads, config.num_key_value_heads, config.backbone_type == "gemma4"
        self.scaling = 1.0 if gemma4 else self.head_dim**-0.5
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = None if gemma4 and config.attention_k_eq_v else nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.v_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps, elementwise_affine=False) if gemma4 else nn.Identity()

    def keys_values(self, states: torch.Tensor, cos_sin: KeysValues) -> KeysValues:
        """Projects `(rows, n, hidden)` states to rotated keys and values of shape `(rows, kv_heads, n, head_dim)`."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        raw = self.k_proj(states).view(shape)
        values = raw if self.v_proj is None else self.v_proj(states).view(shape)
        return _rotated(self.k_norm(raw), *cos_sin).transpose(1, 2), self.v_norm(values).transpose(1, 2)

    def queries(self, states: torch.Tensor, cos_sin: KeysValues) -> torch.Tensor:
        raw = self.q_norm(self.q_proj(states).view(*states.shape[:-1], -1, self.head_dim))
        return _rotated(raw, *cos_sin).transpose(1, 2)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, heads, length, dim = queries.shape
        group = heads // keys.shape[1]
        if mask is None:
            # every row of a block sees the same keys, so the heads of a group become more rows: no copy of the keys
            folded = queries.reshape(rows, keys.shape[1], group * length, dim)
            mixed = F.scaled_dot_product_attention(folded, keys, values, scale=self.scaling)
        else:
            keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scaling)
        return self.o_proj(mixed.reshape(rows, heads, length, dim).transpose(1, 2).reshape(rows, length, -1))


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class DSparkLayer(nn.Module):
    """A decoder layer: Qwen3's pre-norm form, or Gemma4's sandwich norms with a layer scalar."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.sandwich = config.backbone_type == "gemma4"
        self.self_attn = DSparkAttention(config)
        self.mlp = DSparkMLP(config)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            self.register_buffer("layer_scalar", torch.ones(1))
        for name in norms:
            setattr(self, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, states: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        mixed = attend(self.input_layernorm(states))
        if not self.sandwich:
            states = states + mixed
            return states + self.mlp(self.post_attention_layernorm(states))
        states = states + self.post_attention_layernorm(mixed)
        states = states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        return states * self.layer_scalar


@dataclass
class _Borrowed:
    """The target's embedding and head, by reference; a plain object so that they are neither submodules nor saved."""

    embedding: nn.Module
    embedding_scale: float
    head: nn.Linear
    head_weight: torch.Tensor
    head_bias: torch.Tensor | None
    logit_factor: float
    softcap: float | None


class DSparkDrafter(PreTrainedModel):
    r"""
    Drafts a block of tokens for a target model in one forward pass and a short sequential stage.

    ```python
    >>> drafter = DSparkDrafter.from_pretrained(path).bind_target(target)
    >>> context = drafter.new_context()
    >>> drafter.extend_context(context, taps, position_ids)
    >>> proposal = drafter.propose(anchor_ids, anchor_position_ids, context)
    ```

    Source: DSpark paper, drafter; tensor names of the official release.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    main_input_name = "taps"
    _supports_sdpa = True
    _no_split_modules = ["DSparkLayer"]
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        if not config.sample_from_anchor:
            raise NotImplementedError(
                "sample_from_anchor=False (filler layout) is not supported yet; only anchor-first drafters run."
            )
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = DSparkMarkovHead(config) if config.markov_rank else None
        self.confidence_head = DSparkConfidenceHead(config) if config.enable_confidence_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_embeddings else None
        )
        if config.has_reduced_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self._borrowed: _Borrowed | None = None
        self.post_init()

    def check_target(self, target: PreTrainedModel) -> None:
        """
        Raises:
            ValueError: the target's hidden size, vocabulary or depth is not what this drafter was made for.
        """
        text, ours = target.config.get_text_config(), self.config
        wrong = []
        if text.hidden_size != ours.target_hidden_size:
            wrong.append(f"it reads taps of hidden size {ours.target_hidden_size}, the target has {text.hidden_size}")
        if not ours.own_embeddings and text.hidden_size != ours.hidden_size:
            wrong.append(f"its hidden size {ours.hidden_size} cannot borrow an embedding of size {text.hidden_size}")
        if text.vocab_size != ours.vocab_size:
            wrong.append(f"its vocabulary has {ours.vocab_size} tokens, the target's {text.vocab_size}")
        if max(ours.target_layer_ids) >= text.num_hidden_layers:
            wrong.append(f"it taps layer {max(ours.target_layer_ids)}, the target's last is {text.num_hidden_layers - 1}")
        if wrong:
            raise ValueError(
                f"This drafter does not fit {type(target).__name__}: {'; '.join(wrong)}. Load the drafter that was trained for "
                "this target, or train one with `dspark train`."
            )

    def bind_target(self, target: PreTrainedModel) -> DSparkDrafter:
        """
        Borrows the target's embedding and head by reference, with its scales and softcap. Nothing is copied, except the
        head's rows for a reduced draft vocabulary. Binding the same target again is free.

        Raises:
            ValueError: see [`~DSparkDrafter.check_target`].
        """
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if self._borrowed is not None and self._borrowed.embedding is embedding and self._borrowed.head is head:
            return self
        self.check_target(target)
        text = target.config.get_text_config()
        scale = getattr(text, "embedding_multiplier", 1.0) or 1.0
        if text.model_type in ("gemma", "gemma2") and not hasattr(embedding, "embed_scale"):
            scale = text.hidden_size**0.5  # these two scale in their forward, not in the embedding module
        weight, bias = head.weight, getattr(head, "bias", None)
        if self.config.has_reduced_vocabulary:
            rows = self.draft_ids_to_target(torch.arange(self.config.draft_vocab_size, device=self.d2t.device)).to(weight.device)
            weight, bias = weight.detach()[rows], None if bias is None else bias.detach()[rows]
        self._borrowed = _Borrowed(
            embedding=embedding,
            embedding_scale=scale,
            head=head,
            head_weight=weight,
            head_bias=bias,
            logit_factor=(getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0),
            softcap=getattr(text, "final_logit_softcapping", None),
        )
        return self

    def _bound(self) -> _Borrowed:
        if self._borrowed is None:
            raise RuntimeError(
                "This drafter borrows the target's embedding and head: call `drafter.bind_target(target)` first, or load it "
                "with `own_embeddings=True` if its checkpoint holds its own."
            )
        return self._borrowed

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds target ids `(...)` to `(..., hidden)` in the drafter's dtype and on its device."""
        if self.embed_tokens is not None:
            return self.embed_tokens(ids.to(self.device)) * self.config.embedding_scale
        parts = self._bound()
        states = parts.embedding(ids.to(parts.embedding.weight.device))
        states = states if parts.embedding_scale == 1.0 else states * parts.embedding_scale
        return states.to(self.device, self.dtype)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `(..., draft_vocab_size)`, with the target's scale and softcap, of normed states `(..., hidden)`."""
        if self.lm_head is not None:
            return self._softcapped(self.lm_head(hidden), self.config.final_logit_softcapping)
        parts = self._bound()
        weight, size = parts.head_weight, self.config.draft_vocab_size
        logits = _few_rows_linear(hidden.to(weight.device, weight.dtype), weight, parts.head_bias)[..., :size]
        logits = logits if parts.logit_factor == 1.0 else logits * parts.logit_factor
        return self._softcapped(logits, parts.softcap).to(self.device)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The bound target's own logits `(..., vocab_size)` from its normed last states `(..., target_hidden_size)`."""
        parts = self._bound()
        logits = parts.head(hidden.to(parts.head.weight.dtype))[..., : self.config.vocab_size]
        return self._softcapped(logits * parts.logit_factor, parts.softcap)

    @staticmethod
    def _softcapped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def draft_ids_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps draft vocabulary ids to target ids; the identity unless the vocabulary is reduced."""
        return ids + self.d2t[ids] if self.config.has_reduced_vocabulary else ids

    def logits_to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Spreads `(..., draft_vocab_size)` logits over the target's vocabulary; `-inf` where the drafter has no token."""
        if not self.config.has_reduced_vocabulary:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        ids = self.draft_ids_to_target(torch.arange(self.config.draft_vocab_size, device=logits.device))
        spread[..., ids] = logits
        return spread

    def _context_keys_values(self, taps: torch.Tensor, position_ids: torch.Tensor) -> list[KeysValues]:
        states = self.hidden_norm(self.fc(taps.to(self.device, self.dtype)))
        cos_sin = self.rotary_emb(states, position_ids.to(self.device))
        return [layer.self_attn.keys_values(states, cos_sin) for layer in self.layers]

    def _backbone(
        self,
        block_ids: torch.Tensor,
        position_ids: torch.Tensor,
        joined: Callable[[int, torch.Tensor, torch.Tensor], KeysValues],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        states = self.embed(block_ids)
        cos_sin = self.rotary_emb(states, position_ids.to(self.device))
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn

            def attend(normed: torch.Tensor, index: int = index, attention: DSparkAttention = attention) -> torch.Tensor:
                keys, values = joined(index, *attention.keys_values(normed, cos_sin))
                return attention(attention.queries(normed, cos_sin), keys, values, mask)

            states = layer(states, attend)
        return self.norm(states)

    def forward(
        self,
        taps: torch.Tensor,
        position_ids: torch.Tensor,
        block_ids: torch.Tensor,
        block_position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Block states for any number of packed blocks, without a cache (training and scoring).

        Args:
            taps (`torch.FloatTensor` of shape `(rows, length, num_taps * target_hidden_size)`): Context.
            position_ids (`torch.LongTensor` of shape `(rows, length)`): Absolute positions of the context.
            block_ids (`torch.LongTensor` of shape `(rows, queries)`): Anchors and mask tokens of the packed blocks.
            block_position_ids (`torch.LongTensor` of shape `(rows, queries)`): Their absolute positions.
            attention_mask (`torch.BoolTensor` of shape `(rows, 1, queries, length + queries)`, *optional*): True where a
                query may look. `None` lets every query see everything.

        Returns:
            `torch.FloatTensor` of shape `(rows, queries, hidden)`, after the final norm.
        """
        context = self._context_keys_values(taps, position_ids)

        def joined(index: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            return torch.cat((context[index][0], keys), dim=2), torch.cat((context[index][1], values), dim=2)

        return self._backbone(block_ids, block_position_ids, joined, attention_mask)

    def new_context(self) -> DSparkContext:
        """An empty context for one call of a decoding loop."""
        return DSparkContext(len(self.layers))

    def extend_context(self, context: DSparkContext, taps: torch.Tensor, position_ids: torch.Tensor) -> None:
        """
        Commits tokens to the context.

        Args:
            taps (`torch.FloatTensor` of shape `(rows, n, num_taps * target_hidden_size)`): In `target_layer_ids` order.
            position_ids (`torch.LongTensor` of shape `(rows, n)`): Absolute positions, as the target counts them.
        """
        if taps.shape[1]:
            context.append(self._context_keys_values(taps, position_ids))

    def block_states(self, anchor_ids: torch.Tensor, position_ids: torch.Tensor, context: DSparkContext) -> torch.Tensor:
        """`(rows, gamma, hidden)` states of one block behind the context, from `(rows,)` anchors at `(rows,)` positions."""
        gamma = self.config.block_size
        block = anchor_ids.new_full((anchor_ids.shape[0], gamma), self.config.mask_token_id)
        block[:, 0] = anchor_ids
        positions = position_ids[:, None] + torch.arange(gamma, device=position_ids.device)
        return self._backbone(block, positions, context.stage)

    def propose(
        self,
        anchor_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: DSparkContext,
        *,
        width: int | None = None,
        select: Select | None = None,
        keep_going: KeepGoing | None = None,
    ) -> Proposal:
        """
        Drafts up to `width` tokens a row, left to right over one block.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(rows,)`): Last committed tokens; they are not in the context yet.
            position_ids (`torch.LongTensor` of shape `(rows,)`): Their absolute positions.
            context (`DSparkContext`): Committed tokens before the anchors.
            width (`int`, *optional*): Tokens to draft, at most `block_size`. The block is always fed at full width.
            select (`Callable`, *optional*): `select(k, logits (rows, vocab_size), tokens (rows, k))` returns the ids
                `(rows,)` of position k and the logits they were chosen from. Default: argmax.
            keep_going (`Callable`, *optional*): `keep_going(k, confidence (rows,) or None, tokens (rows, k))`, asked
                before position k is chosen; False ends the block there, so a cut never depends on the token it drops.
        """
        width = self.config.block_size if width is None else min(width, self.config.block_size)
        hidden = self.block_states(anchor_ids, position_ids, context)[:, :width]
        return self.chain(anchor_ids, hidden, select=select, keep_going=keep_going)

    def chain(
        self,
        anchor_ids: torch.Tensor,
        hidden: torch.Tensor,
        *,
        select: Select | None = None,
        keep_going: KeepGoing | None = None,
    ) -> Proposal:
        """The sequential stage of [`~DSparkDrafter.propose`] over `(rows, width, hidden)` block states."""
        select = select or (lambda k, logits, tokens: (logits.argmax(dim=-1), logits))
        base = self.unembed(hidden).float()
        previous, state = anchor_ids.to(self.device), None
        tokens, logits, confidences = anchor_ids.new_empty(anchor_ids.shape[0], 0), [], []
        for k in range(hidden.shape[1]):
            embedded = None if self.markov_head is None else self.markov_head.embed(previous)
            confidence = self._confidence_at(k, hidden[:, k], embedded)
            if keep_going is not None and not keep_going(k, confidence, tokens):
                break
            corrected = base[:, k]
            if self.markov_head is not None and embedded is not None:
                features, state = self.markov_head.features(embedded, hidden[:, k], state)
                corrected = corrected + self.markov_head.markov_w2(features).float()
            chosen, used = select(k, self.logits_to_target(corrected), tokens)
            previous = chosen.to(self.device)
            tokens = torch.cat((tokens, chosen.to(tokens.device)[:, None]), dim=1)
            logits.append(used)
            if confidence is not None:
                confidences.append(confidence)
        stacked = torch.stack(logits, dim=1) if logits else base.new_empty(base.shape[0], 0, self.config.vocab_size)
        return Proposal(tokens, stacked, torch.stack(confidences, dim=1) if confidences else None)

    def _confidence_at(self, k: int, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        temperatures = self.config.confidence_temperatures
        logit = self.confidence_head(hidden, previous)
        return torch.sigmoid(logit if temperatures is None else logit / temperatures[k])

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, own_embeddings: bool = False, **kwargs: Any
    ) -> DSparkDrafter:
        """
        Opens a drafter of any supported family, recognised by its content, and accounts for every tensor.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub repository.
            own_embeddings (`bool`): Keep the checkpoint's own embedding and head instead of borrowing the target's.

        Raises:
            ValueError: a tensor is missing, unexpected or of the wrong shape; the message lists names.
            NotImplementedError: a known family that cannot run yet.
        """
        try:
            from transformers_dspark.checkpoints import open_checkpoint
        except ImportError:  # a copy of this file in a Hub repository, without the package: the canonical form only
            opened = None
        else:
            opened = open_checkpoint(pretrained_model_name_or_path, own_embeddings=own_embeddings, **kwargs)
        with_info = kwargs.pop("output_loading_info", False)
        if opened is None:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        else:
            kwargs.pop("config", None)
            kwargs.setdefault("dtype", opened.dtype)
            model, info = super().from_pretrained(
                None, *args, config=opened.config, state_dict=opened.tensors, output_loading_info=True, **kwargs
            )
        wrong = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            listed = "; ".join(f"{name.replace('_keys', '')}: {', '.join(keys)}" for name, keys in wrong.items() if keys)
            raise ValueError(f"Tensors of {pretrained_model_name_or_path} do not match its configuration: {listed}.")
        return (model, info) if with_info else model


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies the rotary embedding to `(rows, n, heads, head_dim)` with `(rows, n, head_dim)` angles."""
    return states * cos.unsqueeze(2) + rotate_half(states) * sin.unsqueeze(2)


def _few_rows_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` for a very tall weight. On the CPU the product is formed the other way round, which its BLAS does faster."""
    if states.device.type != "cpu" or states.requires_grad or states.numel() == states.shape[-1]:
        return F.linear(states, weight, bias)
    logits = (weight @ states.reshape(-1, states.shape[-1]).t()).t().reshape(*states.shape[:-1], -1)
    return logits if bias is None else logits + bias


__all__ = ["DSparkContext", "DSparkDrafter", "Proposal"]
