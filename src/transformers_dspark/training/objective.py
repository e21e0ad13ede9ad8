"""The training objective of a batch: block states in one pass, then heads and losses in chunks of blocks.

Logits never exist for more than one chunk: each chunk runs forward and backward before the next, and what it leaves on
the block states and on the heads waits for the backward of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter
from .anchors import Blocks
from .losses import LossSums, LossWeights, loss_sums
from .packing import TILE, Packed, flex_masks


@dataclass(frozen=True)
class BatchLoss:
    """
    Mean losses of a batch, scalars. Only `total` has a graph; `positions` is the number of positions learned.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    positions: torch.Tensor


class Objective:
    """
    Args:
        drafter (`DSparkDrafter`): Bound to its target.
        weights (`LossWeights`): Loss weights and position decay.
        blocks_per_chunk (`int`, *optional*): Blocks whose logits exist at one time; by default as many as fit
            `chunk_bytes`.
        chunk_bytes (`int`): Memory for the logits of a chunk and what the losses make of them, an estimate.
        detach_confidence (`bool`): Keep the confidence loss from shaping the backbone and the sequential head.
        flex (`bool`, *optional*): Attend with flex attention, compiled. By default on CUDA, unless the drafter has
            attention sinks; elsewhere a plain mask serves.
        sums (`Callable`): [`loss_sums`] or a compiled form of it.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        weights: LossWeights | None = None,
        blocks_per_chunk: int | None = None,
        chunk_bytes: int = 2**31,
        detach_confidence: bool = False,
        flex: bool | None = None,
        sums: Callable[..., LossSums] = loss_sums,
    ) -> None:
        self.drafter, self.weights, self.sums = drafter, weights or LossWeights(), sums
        self.detach_confidence = detach_confidence
        config = drafter.config
        self.blocks_per_chunk = blocks_per_chunk or max(1, chunk_bytes // block_bytes(config))
        if flex and config.has_attention_sinks:
            raise NotImplementedError("Flex attention knows no attention sinks: leave flex=True out for this drafter.")
        flex = drafter.device.type == "cuda" and not config.has_attention_sinks if flex is None else flex
        self.kernel: Callable[..., torch.Tensor] | None = None
        if flex:
            self.kernel = (
                torch.compile(flex_attention, dynamic=True) if drafter.device.type == "cuda" else flex_attention
            )
        self.draft_ids: torch.Tensor | None = None
        if config.has_reduced_vocabulary:
            self.draft_ids = drafter.draft_vocabulary()
            self.draft_of_target = torch.full((config.vocab_size,), -1, device=drafter.device)
            self.draft_of_target[self.draft_ids] = torch.arange(config.draft_vocab_size, device=drafter.device)

    def position_weights(self, blocks: Blocks) -> torch.Tensor:
        """`(blocks, block_size)` weights of the positions of blocks; 0 where nothing is learned."""
        first_row, valid = self.drafter.config.first_draft_row, blocks.valid.flatten(0, 1)
        return valid * F.pad(self.weights.positions(valid.shape[1] - first_row, valid.device), (first_row, 0))

    def __call__(
        self,
        taps: torch.Tensor,
        last_hidden: torch.Tensor,
        blocks: Blocks,
        denominator: torch.Tensor | float | None = None,
        backbone: Callable[..., torch.Tensor] | None = None,
    ) -> BatchLoss:
        """
        The loss of a batch.

        Args:
            taps (`torch.FloatTensor` of shape `(rows, length, num_taps * target_hidden_size)`): Of the frozen target.
            last_hidden (`torch.FloatTensor` of shape `(rows, length, target_hidden_size)`): Its normed last states.
            blocks (`Blocks`): Blocks of these rows.
            denominator (`torch.Tensor` or `float`, *optional*): What the sums are divided by; by default the summed
                weights of this batch, and in a batch of batches those of all of them.
            backbone (`Callable`, *optional*): What runs the drafter's forward, such as a wrapper around it that
                averages gradients over processes.
        """
        packed, weights = Packed.of(blocks, taps.shape[1]), self.position_weights(blocks)
        divisor = (weights.sum() if denominator is None else torch.as_tensor(denominator, device=taps.device)).clamp(
            1e-6
        )
        weights = weights[packed.used]
        attends = self.kernel is not None and packed.seen.numel() and packed.block_ids.shape[1] >= TILE
        states = (backbone or self.drafter)(
            taps.flatten(0, 1)[packed.seen][None],
            packed.position_ids,
            packed.block_ids,
            packed.block_position_ids,
            flex_masks(packed, self.drafter.config, self.kernel) if attends and self.kernel else packed.visible(),
        )
        gamma = packed.block_size
        labels, previous = (t.flatten(0, 1)[packed.used] for t in (blocks.labels, blocks.previous))
        # the target's state one before what a row predicts
        places = (packed.block_position_ids.view(-1, gamma) - self.drafter.config.first_draft_row).clamp(
            0, taps.shape[1] - 1
        )
        places = places + (packed.used // blocks.anchors.shape[1] * taps.shape[1])[:, None]
        last_hidden = last_hidden.flatten(0, 1)
        heads = [
            parameter
            for head in (self.drafter.markov_head, self.drafter.confidence_head, self.drafter.lm_head)
            if head is not None
            for parameter in head.parameters()
            if parameter.requires_grad
        ]

        def chunk_sums(states: torch.Tensor, chunk: slice) -> LossSums:
            return self._chunk(states, last_hidden[places[chunk]], previous[chunk], labels[chunk], weights[chunk])

        total, sums = _ChunkedLoss.apply(
            states.reshape(-1, gamma, states.shape[-1]),
            chunk_sums,
            self.weights,
            divisor,
            self.blocks_per_chunk,
            *heads,
        )
        cross_entropy, l1, confidence = (sums / divisor).unbind()
        return BatchLoss(total, cross_entropy, l1, confidence, (weights > 0).sum())

    def _chunk(
        self,
        states: torch.Tensor,
        target_states: torch.Tensor,
        previous: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> LossSums:
        drafter = self.drafter
        logits, confidence, embedded = drafter.unembed(states), None, None
        if drafter.markov_head is not None:
            embedded = drafter.markov_head.embed(previous)
            logits = logits + drafter.markov_head.markov_w2(drafter.markov_head(previous, states))
        if drafter.confidence_head is not None:
            features = states, embedded
            if self.detach_confidence:
                features = states.detach(), None if embedded is None else embedded.detach()
            confidence = drafter.confidence_head(*features).flatten()
        in_draft = None
        if self.draft_ids is not None:
            labels = self.draft_of_target[labels]
            in_draft = labels.flatten() >= 0
            labels = labels.clamp(min=0)
        with torch.no_grad():
            target_logits = drafter.target_logits(target_states).flatten(0, 1)
        return self.sums(
            logits.flatten(0, 1),
            target_logits,
            labels.flatten(),
            confidence,
            weights.flatten(),
            self.draft_ids,
            in_draft,
        )


class _ChunkedLoss(torch.autograd.Function):
    """The loss over block states, whose gradients are formed chunk by chunk on the way forward and kept for later."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        chunk_sums: Callable[[torch.Tensor, slice], LossSums],
        weights: LossWeights,
        divisor: torch.Tensor,
        blocks_per_chunk: int,
        *heads: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradients = [torch.zeros_like(states), *(torch.zeros_like(head) for head in heads)]
        total, sums = torch.zeros((), device=states.device), torch.zeros(3, device=states.device)
        for start in range(0, len(states), blocks_per_chunk):
            chunk = slice(start, start + blocks_per_chunk)
            with torch.enable_grad():
                leaf = states[chunk].detach().requires_grad_()
                parts = chunk_sums(leaf, chunk)
                loss = parts.total(weights, divisor)
                found = torch.autograd.grad(loss, (leaf, *heads), allow_unused=True)
            for whole, part in zip((gradients[0][chunk], *gradients[1:]), found, strict=True):
                if part is not None:
                    whole += part
            total += loss.detach()
            sums += torch.stack([part.detach() for part in parts])
        ctx.gradients = gradients
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [gradient.mul_(total.to(gradient.dtype)) for gradient in ctx.gradients]
        del ctx.gradients
        return gradients[0], None, None, None, None, *gradients[1:]


def block_bytes(config: DSparkConfig) -> int:
    """
    Memory that the logits of one block take together with what the losses make of them, an estimate: in two bytes and
    in four, as probabilities of the target and as gradients.
    """
    return 12 * config.block_size * (config.vocab_size + config.draft_vocab_size)


__all__ = ["BatchLoss", "Objective", "block_bytes"]
