"""The DSpark drafter: a block backbone over cached context, and how a block is drafted with it.

This file knows tensors only: no decoding loop, no sampling rule, no schedule, no generation code of Transformers.
Together with the other `*_dspark.py` files it is copied into Hub repositories, so it imports nothing else of the
package at module level.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from .backbone_dspark import DENSE_PARTS, DSparkContext, DSparkLayer, DSparkRotaryEmbedding, KeysValues
from .borrowed_dspark import Borrowed, few_rows_linear, misfits, offloaded
from .configuration_dspark import DSparkConfig
from .heads_dspark import DSparkConfidenceHead, DSparkMarkovHead
from .masks_dspark import Masks, block_masks
from .proposal_dspark import KeepGoing, Proposal, Select


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
    generation_config: GenerationConfig | None = None  # options of drafting, saved beside the weights
    d2t: torch.Tensor
    layers: Sequence[DSparkLayer]  # an `nn.ModuleList`
    rotary_emb: DSparkRotaryEmbedding
    base_model_prefix = ""
    main_input_name = "taps"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkLayer", "DSparkSparseLayer"]  # noqa: RUF012 (Transformers declares it so)
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012
    _auto_class = "AutoModel"  # saved folders bring this code: `trust_remote_code` opens them without the package

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        parts = DENSE_PARTS
        if config.is_sparse:  # imported only here: it brings Transformers' model of DeepSeek-V4 along
            from .sparse_dspark import FLOAT32_MODULES, SPARSE_PARTS

            parts, self._keep_in_fp32_modules_strict = SPARSE_PARTS, FLOAT32_MODULES
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = parts.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            [parts.layer(config) for _ in range(config.num_hidden_layers)]
        )
        self.hc_head = None if parts.collapse is None else parts.collapse(config)
        self.norm = parts.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = parts.rotary(config)
        self.markov_head = DSparkMarkovHead(config) if config.markov_rank else None
        self.confidence_head = DSparkConfidenceHead(config) if config.enable_confidence_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_head else None
        if config.has_reduced_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self._borrowed: Borrowed | None = None
        self.captured: Any = None  # what the batched loop keeps between calls on a GPU; `None` frees it
        self.add_model_tags(["speculative-decoding", "dspark"])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if self.config.is_sparse:
            from .sparse_dspark import initialize

            initialize(module, self.config.initializer_range)

    def check_target(self, target: PreTrainedModel) -> None:
        """
        Raises:
            ValueError: the target's hidden size, vocabulary or depth is not what this drafter was made for, or its
                embedding or head is offloaded and cannot be borrowed.
        """
        if wrong := misfits(self.config, target):
            raise ValueError(
                f"This drafter does not fit {type(target).__name__}: {'; '.join(wrong)}. Load the drafter that was "
                "trained for this target, or train one with `dspark train`."
            )
        if away := offloaded(self.config, target):
            raise ValueError(
                f"{type(target).__name__} has its {' and its '.join(away)} offloaded, where no drafter can borrow: "
                "keep both on a device with `device_map`, or load the drafter with `own_embeddings=True` if its "
                "checkpoint holds its own."
            )

    def bind_target(self, target: PreTrainedModel) -> DSparkDrafter:
        """
        Borrows the target's embedding and head by reference, with its scales and softcap. Nothing is copied, except
        the head's rows for a reduced draft vocabulary, and these again whenever the head has changed. Binding the
        same target again is free.

        Raises:
            ValueError: see [`~DSparkDrafter.check_target`].
        """
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if self._borrowed is not None and self._borrowed.embedding is embedding and self._borrowed.head is head:
            return self
        self.check_target(target)
        self._borrowed = Borrowed.of(target)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the target's parts behind; they are bound anew."""
        return self.__dict__ | {"_borrowed": None, "captured": None}

    def _bound(self) -> Borrowed:
        if self._borrowed is None:
            raise RuntimeError(
                "This drafter borrows the target's embedding and head: call `drafter.bind_target(target)` first, or "
                "load it with `own_embeddings=True` if its checkpoint holds its own."
            )
        return self._borrowed

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds target ids `(...)` to `(..., hidden)` in the drafter's dtype and on its device."""
        if self.embed_tokens is not None:
            states = self.embed_tokens(ids.to(self.device))
            # rounded to the table's dtype first, as the official code (and Gemma) does
            return states * torch.tensor(self.config.embedding_scale, dtype=states.dtype).item()
        return self._bound().embed(ids, self.config.raw_embedding).to(self.device, self.dtype)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `(..., draft_vocab_size)` of block states `(..., hidden)`, with scale and softcap."""
        if self.hc_head is not None:
            hidden = self.norm(hidden)
        if self.lm_head is not None:
            return self._softcapped(self.lm_head(hidden), self.config.final_logit_softcapping)
        parts = self._bound()
        if parts.head_is_quantized:
            logits = parts.head_logits(hidden)
            if self.config.has_reduced_vocabulary:
                logits = logits[..., self.draft_vocabulary().to(logits.device)]
        else:
            if self.config.has_reduced_vocabulary:
                weight, bias = parts.head_rows(self.draft_vocabulary, self.d2t)
            else:
                weight, bias = parts.head_tensors()
            logits = few_rows_linear(hidden.to(weight.device, weight.dtype), weight, bias)
        logits = logits[..., : self.config.draft_vocab_size]
        logits = logits if parts.logit_factor == 1.0 else logits * parts.logit_factor
        return self._softcapped(logits, parts.softcap).to(hidden.device)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The bound target's logits `(..., vocab_size)` from its normed last states `(..., target_hidden_size)`."""
        parts = self._bound()
        logits = parts.head_logits(hidden)[..., : self.config.vocab_size]
        return self._softcapped(logits * parts.logit_factor, parts.softcap)

    @staticmethod
    def _softcapped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def draft_ids_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps draft vocabulary ids to target ids; the identity unless the vocabulary is reduced."""
        return ids + self.d2t[ids] if self.config.has_reduced_vocabulary else ids

    def draft_vocabulary(self) -> torch.Tensor:
        """Target ids `(draft_vocab_size,)` that can be proposed, in the order of the draft logits."""
        return self.draft_ids_to_target(torch.arange(self.config.draft_vocab_size, device=self.device))

    def logits_to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Spreads `(..., draft_vocab_size)` logits over the target's vocabulary, with `-inf` elsewhere."""
        if not self.config.has_reduced_vocabulary:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        spread[..., self.draft_vocabulary()] = logits
        return spread

    def context_keys_values(self, taps: torch.Tensor, position_ids: torch.Tensor) -> list[KeysValues]:
        """What each layer's context keeps of `(rows, n)` tokens: pairs of `(rows, kv_heads, n, head_dim)`."""
        states = self.hidden_norm(self.fc(taps.to(self.device, self.dtype)))
        cos_sin = self.rotary_emb(states, position_ids)
        return [layer.keys_values(states, cos_sin) for layer in self.layers]

    def _backbone(
        self,
        block_ids: torch.Tensor,
        position_ids: torch.Tensor,
        join: Callable[[int, torch.Tensor, torch.Tensor], KeysValues],
        masks: Masks,
    ) -> torch.Tensor:
        states = self.embed(block_ids)
        cos_sin = self.rotary_emb(states, position_ids)
        if self.hc_head is not None:  # each residual stream begins with the embedding
            states = states.unsqueeze(2).repeat(1, 1, (self.config.backbone_config or {})["hc_mult"], 1)
        for index, layer in enumerate(self.layers):
            mask = masks[self.config.layer_types[index]]
            states = layer(states, cos_sin, functools.partial(join, index), mask)
        return self.norm(states) if self.hc_head is None else self.hc_head(states)

    def _masks(self, context: torch.Tensor, block: torch.Tensor, visible: torch.Tensor | None) -> Masks:
        if not self.config.needs_masks:
            return dict.fromkeys(self.config.layer_types, visible)
        return block_masks(self.config, context.to(self.device), block.to(self.device), visible)

    def forward(
        self,
        taps: torch.Tensor,
        position_ids: torch.Tensor,
        block_ids: torch.Tensor,
        block_position_ids: torch.Tensor,
        attention_mask: torch.Tensor | Masks | None = None,
    ) -> torch.Tensor:
        """
        Block states for any number of packed blocks, without a cache (training and scoring).

        Args:
            taps (`torch.FloatTensor` of shape `(rows, length, num_taps * target_hidden_size)`): Context.
            position_ids (`torch.LongTensor` of shape `(rows, length)`): Absolute positions of the context.
            block_ids (`torch.LongTensor` of shape `(rows, queries)`): Anchors and mask tokens of the packed blocks,
                `block_size` for each.
            block_position_ids (`torch.LongTensor` of shape `(rows, queries)`): Their absolute positions.
            attention_mask (`torch.BoolTensor` of shape `(rows, 1, queries, length + queries)`, *optional*): True where
                a query may look: the context before its anchor, and its own block. Windows and causality of the layers
                come on top. `None` lets every query see everything that its layer shows.

        Returns:
            `torch.FloatTensor` of shape `(rows, queries, hidden)`, after the final norm; before it with the sparse
            backbone, whose confidence head reads them so.
        """
        context = self.context_keys_values(taps, position_ids)

        def join(index: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            return torch.cat((context[index][0], keys), dim=2), torch.cat((context[index][1], values), dim=2)

        if not isinstance(attention_mask, dict):
            attention_mask = self._masks(position_ids, block_position_ids, attention_mask)
        return self._backbone(block_ids, block_position_ids, join, attention_mask)

    def new_context(self) -> DSparkContext:
        """An empty context for one call of a decoding loop."""
        return DSparkContext(len(self.layers))

    def extend_context(
        self,
        context: DSparkContext,
        taps: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> None:
        """
        Commits tokens to the context.

        Args:
            taps (`torch.FloatTensor` of shape `(rows, n, num_taps * target_hidden_size)`): As in `target_layer_ids`.
            position_ids (`torch.LongTensor` of shape `(rows, n)`): Absolute positions, as the target counts them.
            keep (`torch.BoolTensor` of shape `(rows, n)`, *optional*): False where a row commits fewer tokens than
                others. Blocks never look at such an entry. `None` if all are tokens, which is quicker.
        """
        if taps.shape[1]:
            context.append(self.context_keys_values(taps, position_ids), position_ids, keep)

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """A padded head can emit ids beyond the vocabulary; the drafter has no rows for them and reads mask tokens."""
        return ids.masked_fill(ids >= self.config.vocab_size, self.config.mask_token_id)

    def block_states(
        self, anchor_ids: torch.Tensor, position_ids: torch.Tensor, context: DSparkContext
    ) -> torch.Tensor:
        """
        States `(rows, block_size, hidden)` of one block behind the context; `(rows,)` anchors at `(rows,)` positions.
        """
        size, visible = self.config.block_size, None
        block = anchor_ids.new_full((anchor_ids.shape[0], size), self.config.mask_token_id)
        block[:, 0] = self._known(anchor_ids)
        positions = position_ids[:, None] + torch.arange(size, device=position_ids.device)
        attention, first = context.attention(self.config), 0
        if attention is None:
            first = context.tail(self.config.sliding_window) if self.config.is_sparse else 0
            committed = context.positions[:, first:] if context.length else positions[:, :0]
            if context.has_gaps:
                places = torch.cat((committed, positions.to(committed.device)), dim=1)
                visible = (places >= 0)[:, None, None].to(self.device)
            attention = self._masks(committed, positions, visible)

        def join(layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            keys, values = context.stage(layer, keys, values)
            return keys[:, :, first:], values[:, :, first:]

        return self._backbone(block, positions, join, attention)

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
            width (`int`, *optional*): Tokens to draft, at most `num_draft_tokens`. The block is always fed whole.
            select (`Callable`, *optional*): `select(k, logits (rows, vocab_size), tokens (rows, k))` returns the ids
                `(rows,)` of position k and the logits they were chosen from. Default: argmax.
            keep_going (`Callable`, *optional*): `keep_going(k, confidence (rows,) or None, tokens (rows, k))`, asked
                before position k is chosen; False ends the block there, so a cut never depends on the token it drops.
        """
        hidden = self.block_states(anchor_ids, position_ids, context)
        return self.chain(anchor_ids, hidden, self.base_logits(hidden, width), select=select, keep_going=keep_going)

    def base_logits(self, hidden: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """What a block's states `(rows, block_size, hidden)` say of its first `width` drafts, or of all."""
        return self.unembed(hidden[:, self.config.first_draft_row :][:, :width])

    def chain(
        self,
        anchor_ids: torch.Tensor,
        hidden: torch.Tensor,
        base: torch.Tensor | None = None,
        *,
        select: Select | None = None,
        keep_going: KeepGoing | None = None,
    ) -> Proposal:
        """
        The sequential stage of [`~DSparkDrafter.propose`] over the first `(rows, n, hidden)` states of blocks, a token
        for each of their [`~DSparkDrafter.base_logits`]. The anchor's row comes first; in layout F it drafts nothing.
        """
        select = select or (lambda k, logits, tokens: (logits.argmax(dim=-1), logits))
        base = (self.base_logits(hidden) if base is None else base).float()
        previous, state = self._known(anchor_ids.to(self.device)), None
        if not self.config.sample_from_anchor:
            if self.markov_head is not None:  # a recurrent head reads the anchor's row as well
                _, state = self.markov_head.features(self.markov_head.embed(previous), hidden[:, 0], None)
            hidden = hidden[:, 1:]
        tokens, chosen, logits, confidences = anchor_ids.new_empty(anchor_ids.shape[0], 0), [], [], []
        for k in range(base.shape[1]):
            embedded = None if self.markov_head is None else self.markov_head.embed(previous)
            confidence = self._confidence_at(k, hidden[:, k], embedded)
            if keep_going is not None and not keep_going(k, confidence, tokens):
                break
            corrected = base[:, k]
            if self.markov_head is not None and embedded is not None:
                features, state = self.markov_head.features(embedded, hidden[:, k], state)
                corrected = corrected + self.markov_head.markov_w2(features).float()
            ids, used = select(k, self.logits_to_target(corrected), tokens)
            previous = self._known(ids.to(self.device))
            chosen.append(ids.to(tokens.device))
            tokens = torch.stack(chosen, dim=1)  # where nobody reads those on the way, a compiler leaves them out
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
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        own_embeddings: bool = False,
        sample_from_anchor: bool | None = None,
        block_size: int | None = None,
        **kwargs: Any,
    ) -> DSparkDrafter:
        """
        Opens a drafter of any supported family, recognised by its content, and accounts for every tensor.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub repository.
            own_embeddings (`bool`): Keep the checkpoint's own embedding and head instead of borrowing the target's.
            sample_from_anchor (`bool`, *optional*): The layout (see [`DSparkConfig`]) if the file does not tell it.
            block_size (`int`, *optional*): Rows of a block, at most the checkpoint's; fewer rows draft fewer tokens.
            kwargs: As for any model of Transformers. Without `dtype` the checkpoint's is kept.

        Raises:
            ValueError: a tensor is missing, unexpected or of the wrong shape; the message lists names.
            NotImplementedError: a known family that cannot run yet.
        """
        path = pretrained_model_name_or_path
        try:
            from transformers_dspark.checkpoints import open_checkpoint
            from transformers_dspark.packaging import options_beside
        except ImportError:  # a copy of this file in a Hub repository, without the package: the canonical form only
            opened = options = None
        else:
            opened = open_checkpoint(
                path, own_embeddings=own_embeddings, sample_from_anchor=sample_from_anchor, **kwargs
            )
            options = options_beside(path, **kwargs)
        source: str | os.PathLike[str] | None = path
        if opened is not None:
            dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
            kwargs["dtype"] = opened.dtype if dtype in (None, "auto") else dtype
            source, kwargs["config"], kwargs["state_dict"] = None, opened.config, opened.tensors
        elif sample_from_anchor is not None:
            kwargs |= {"sample_from_anchor": sample_from_anchor, "layout_source": "argument"}
        with_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with the others
        try:
            model, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"The weights in {path} are damaged or incomplete ({error}); fetch them again."
            ) from error
        model._account_for(info, path)
        if own_embeddings and not model.config.own_embeddings:
            raise ValueError(f"own_embeddings=True, but {path} holds no embedding of its own; borrow the target's.")
        if block_size is not None:
            model.config.shorten(block_size)
        model.name_or_path = model.config.name_or_path = str(path)
        model.generation_config = options
        return (model, info) if with_info else model  # type: ignore[return-value]

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> DSparkDrafter:
        """
        The drafter of a target that is in memory already, in its dtype and bound to it.

        Args:
            target (`PreTrainedModel`): The target.
            pretrained_model_name_or_path (`str` or `os.PathLike`, *optional*): Where the drafter is. Defaults to the
                target's own checkpoint, for a drafter that lies inside.
            kwargs: As for [`~DSparkDrafter.from_pretrained`].
        """
        path = target.name_or_path if pretrained_model_name_or_path is None else pretrained_model_name_or_path
        return cls.from_pretrained(path, **{"dtype": target.dtype} | kwargs).bind_target(target)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """
        As for any model of Transformers; the options of drafting, if there are any, and the door for
        `custom_generate=folder` go beside the weights.

        A pipeline that is given the folder's name also opens a tokenizer there: save the target's beside the drafter.
        """
        upload = {n: kwargs.pop(n) for n in ("commit_message", "private", "create_pr") if n in kwargs}
        repository = kwargs.pop("repo_id", None) or os.path.basename(os.path.abspath(save_directory))
        push_to_hub = kwargs.pop("push_to_hub", False)
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if not is_main_process:
            return
        if self.generation_config is not None:
            self.generation_config.save_pretrained(save_directory)
        try:
            from transformers_dspark.packaging import write_door
        except ImportError:  # a copy of this file in a Hub repository, without the package: the door leads to it
            pass
        else:
            write_door(save_directory)
        if push_to_hub:
            self.push_to_hub(repository, token=kwargs.get("token"), **upload)

    def _account_for(self, info: dict[str, Any], path: str | os.PathLike[str]) -> None:
        wrong = []
        if info["missing_keys"]:
            wrong.append(f"missing: {', '.join(sorted(info['missing_keys']))}")
        if info["unexpected_keys"]:
            wrong.append(f"unexpected: {', '.join(sorted(info['unexpected_keys']))}")
        for name, found, wanted in sorted(info["mismatched_keys"]):
            wrong.append(f"{name} has shape {tuple(found)} instead of {tuple(wanted)}")
        if not wrong and self.config.has_reduced_vocabulary:
            ids, size = self.draft_vocabulary(), self.config.vocab_size
            if ids[0] < 0 or ids[-1] >= size or not bool((ids.diff() > 0).all()):
                wrong.append(f"d2t does not lead to ascending target ids within 0..{size - 1}")
        if wrong:
            raise ValueError(f"Tensors of {path} do not match its configuration: {'; '.join(wrong)}.")


__all__ = ["DSparkContext", "DSparkDrafter", "Proposal"]
