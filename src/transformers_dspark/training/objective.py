"""The training objective of a batch: block states in one pass, then heads and losses in chunks of blocks.

Logits never exist for more than one chunk: each chunk runs forward and backward before the next, and what it leaves on
the block states is sent through the backbone once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..modeling_dspark import DSparkDrafter
from .anchors import Blocks, block_mask
from .losses import LossSums, LossWeights, loss_sums


@dataclass(frozen=True)
class BatchLoss:
    """Mean losses of a batch, detached scalars; `positions` is the number of positions learned."""

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
        blocks_per_chunk (`int`, *optional*): Blocks whose logits exist at one time; by default as many as a quarter of
            the free memory holds on CUDA, where few large chunks are much quicker.
        sums (`Callable`): [`loss_sums`] or a compiled form of it.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        weights: LossWeights | None = None,
        blocks_per_chunk: int | None = None,
        sums: Callable[..., LossSums] = loss_sums,
    ) -> None:
        self.drafter, self.weights, self.sums = drafter, weights or LossWeights(), sums
        config = drafter.config
        logits = config.block_size * (config.vocab_size + config.draft_vocab_size)
        self.blocks_per_chunk = blocks_per_chunk or _blocks_per_chunk(drafter.device, logits)
        self.draft_ids: torch.Tensor | None = None
        if config.has_reduced_vocabulary:
            self.draft_ids = drafter.draft_vocabulary()
            self.draft_of_target = torch.full((config.vocab_size,), -1, device=drafter.device)
            self.draft_of_target[self.draft_ids] = torch.arange(config.draft_vocab_size, device=drafter.device)

    def backward(self, taps: torch.Tensor, last_hidden: torch.Tensor, blocks: Blocks) -> BatchLoss:
        """
        Adds the gradients of a batch's loss to the drafter's parameters.

        Args:
            taps (`torch.FloatTensor` of shape `(rows, length, num_taps * target_hidden_size)`): Of the frozen target.
            last_hidden (`torch.FloatTensor` of shape `(rows, length, target_hidden_size)`): Its normed last states.
            blocks (`Blocks`): Blocks of these rows.
        """
        rows, length, _ = taps.shape
        gamma = blocks.labels.shape[-1]
        positions = torch.arange(length, device=taps.device).expand(rows, -1)
        mask = block_mask(blocks, length)
        states = self.drafter(taps, positions, blocks.ids, blocks.position_ids, mask)
        leaf = states.detach().requires_grad_()
        by_block = leaf.view(-1, gamma, leaf.shape[-1])
        valid, labels, previous = (t.flatten(0, 1) for t in (blocks.valid, blocks.labels, blocks.previous))
        used = valid.any(dim=-1).nonzero().squeeze(1)
        first_row = self.drafter.config.first_draft_row
        weights = valid * F.pad(self.weights.positions(gamma - first_row, valid.device), (first_row, 0))
        denominator = weights.sum()
        sums = torch.zeros(4, device=taps.device)
        # the target's state one before what a row predicts
        index = (blocks.position_ids - first_row).clamp(0, length - 1).view(rows, -1, 1)
        aligned = last_hidden.gather(1, index.expand(-1, -1, last_hidden.shape[-1])).view(
            -1, gamma, last_hidden.shape[-1]
        )
        for chunk in used.split(self.blocks_per_chunk) if len(used) else ():
            parts = self._chunk(by_block[chunk], aligned[chunk], previous[chunk], labels[chunk], weights[chunk])
            total = parts.total(self.weights, denominator)
            total.backward()
            sums += torch.stack(
                [t.detach() for t in (total * denominator, parts.cross_entropy, parts.l1, parts.confidence)]
            )
        if leaf.grad is not None:
            states.backward(leaf.grad)
        total, cross_entropy, l1, confidence = (sums / denominator.clamp(min=1e-6)).unbind()
        return BatchLoss(total, cross_entropy, l1, confidence, valid.sum())

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
            confidence = drafter.confidence_head(states, embedded).flatten()
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


def _blocks_per_chunk(device: torch.device, logits: int) -> int:
    """How many blocks of so many logits to work on at a time."""
    if device.type != "cuda":
        return 1024
    free, _ = torch.cuda.mem_get_info(device)
    # a logit takes two bytes and lives on in float32 and as gradient
    return max(64, min(4096, free // 4 // (12 * logits)))
