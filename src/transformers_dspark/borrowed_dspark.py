"""What a drafter borrows from its target: the embedding and the head, by reference, with their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .configuration_dspark import DSparkConfig


@dataclass
class Borrowed:
    """The target's embedding and head; a plain object so that they are neither submodules of the drafter nor saved."""

    embedding: nn.Embedding
    embedding_scale: float
    head: nn.Linear
    logit_factor: float
    softcap: float | None
    rows: tuple[torch.Tensor, torch.Tensor | None] | None = None  # copied from the head for a reduced vocabulary
    rows_of: tuple[Any, ...] = ()  # the state of the tensors that they were copied from

    @classmethod
    def of(cls, target: PreTrainedModel) -> Borrowed:
        """The parts of a target, and the scales that its own forward applies to them."""
        embedding, text = target.get_input_embeddings(), target.config.get_text_config()
        scale = getattr(text, "embedding_multiplier", 1.0) or 1.0
        if text.model_type in ("gemma", "gemma2") and not hasattr(embedding, "embed_scale"):
            scale = text.hidden_size**0.5  # these two scale in their forward, not in the embedding module
        factor, divisor = getattr(text, "logit_scale", None), getattr(text, "logits_scaling", None)
        multiplier = getattr(text, "output_multiplier", None)
        return cls(
            embedding=embedding,
            embedding_scale=scale,
            head=target.get_output_embeddings(),
            logit_factor=(factor or 1.0) * (multiplier or 1.0) / (divisor or 1.0),
            softcap=getattr(text, "final_logit_softcapping", None),
        )

    def embed(self, ids: torch.Tensor, raw: bool) -> torch.Tensor:
        """Embeds `(...)` ids as the target does; `raw` looks only at the table, past a norm or scale behind it."""
        ids = ids.to(self.embedding.weight.device)
        if raw:
            return F.embedding(ids, self.embedding.weight)
        states = self.embedding(ids)
        return states if self.embedding_scale == 1.0 else states * self.embedding_scale

    def head_tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's weight and bias as they are now; they may have been moved, cast, replaced or trained."""
        return self.head.weight, getattr(self.head, "bias", None)

    @property
    def head_is_quantized(self) -> bool:
        """Whether the head's weight is no plain matrix, so that only its own module can multiply by it."""
        return not (_is_plain(self.head.weight) and self.head.weight.is_floating_point())

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's own outputs `(..., rows)` for states `(..., hidden)`, before scale and softcap."""
        weight = self.head.weight
        dtype = weight.dtype if weight.is_floating_point() else hidden.dtype
        return self.head(hidden.to(weight.device, dtype))

    def head_rows(
        self, draft_vocabulary: Callable[[], torch.Tensor], d2t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Those rows of [`head_tensors`] that the drafter can propose, copied again when the head has changed."""
        weight, bias = self.head_tensors()
        state = tuple(map(_state_of, (weight, bias, d2t)))
        if self.rows is None or state != self.rows_of:
            with torch.inference_mode(False):  # kept beyond this call, so it must serve training as well
                ids = draft_vocabulary().to(weight.device)
                self.rows = weight.detach()[ids], None if bias is None else bias.detach()[ids]
            self.rows_of = state
        return self.rows


def misfits(config: DSparkConfig, target: PreTrainedModel) -> list[str]:
    """Why a drafter of this configuration does not belong to a target, in words; empty if it does."""
    text, wrong = target.config.get_text_config(), []
    borrows = not (config.own_embeddings and config.own_head)
    if text.hidden_size != config.target_hidden_size:
        wrong.append(f"it reads taps of hidden size {config.target_hidden_size}, the target has {text.hidden_size}")
    if borrows and text.hidden_size != config.hidden_size:
        wrong.append(f"its hidden size {config.hidden_size} cannot borrow an embedding of size {text.hidden_size}")
    if text.vocab_size != config.vocab_size:
        wrong.append(f"its vocabulary has {config.vocab_size} tokens, the target's {text.vocab_size}")
    if max(config.target_layer_ids) >= text.num_hidden_layers:
        wrong.append(
            f"it taps layer {max(config.target_layer_ids)}, the target's last is {text.num_hidden_layers - 1}"
        )
    return wrong


def offloaded(config: DSparkConfig, target: PreTrainedModel) -> list[str]:
    """The parts of a target that this drafter would borrow and that lie where it cannot reach them."""
    parts = {
        "embedding": (config.own_embeddings, target.get_input_embeddings),
        "head": (config.own_head, target.get_output_embeddings),
    }
    return [name for name, (own, part) in parts.items() if not own and part().weight.is_meta]


def _state_of(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What differs once a tensor has been moved, cast, replaced or written to; read without a device sync."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else getattr(tensor, "_version", None)  # counts writes; autograd's own
    return tensor.data_ptr(), version, tensor.shape, tensor.device, tensor.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)  # quantized ones are of other classes


def few_rows_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `F.linear`. For 2 to 8 rows of float32 on the CPU the product is formed the other way round, which PyTorch's BLAS
    does up to twice as fast there; the sums are the same up to rounding. A quantized weight has its own kernels.
    """
    rows = states.numel() // states.shape[-1]
    if not _is_plain(weight):
        return F.linear(states, weight, bias)
    if states.device.type != "cpu" or states.dtype != torch.float32 or states.requires_grad or not 2 <= rows <= 8:
        return F.linear(states, weight, bias)
    flat = states.reshape(rows, -1)
    if rows == 3:  # four are quicker than three
        flat = F.pad(flat, (0, 0, 0, 1))
    product = (weight @ flat.t()).t()[:rows].contiguous().reshape(*states.shape[:-1], -1)
    return product if bias is None else product + bias


__all__ = ["Borrowed", "few_rows_linear", "misfits", "offloaded"]
