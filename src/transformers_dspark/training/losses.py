"""The three training losses. Pure: logits and labels in, sums out; no model, no optimiser, no choice of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class LossWeights:
    """
    Weights of the losses and decay of the positions.

    Source: DSpark paper, training objective: 0.1 cross-entropy, 0.9 total variation (L1), 1.0 confidence; the released
    recipe decays positions by `exp(-(k - 1) / 4)`.
    """

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def positions(self, gamma: int, device: torch.device | str | None = None) -> torch.Tensor:
        """`(gamma,)` weights of the block positions, the first being 1."""
        return torch.exp(-torch.arange(gamma, device=device, dtype=torch.float32) / self.decay)


class LossSums(NamedTuple):
    """Weighted sums over positions, each to be divided by the same summed weights; scalars."""

    cross_entropy: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor

    def total(self, weights: LossWeights, denominator: torch.Tensor) -> torch.Tensor:
        mixed = (
            weights.cross_entropy * self.cross_entropy + weights.l1 * self.l1 + weights.confidence * self.confidence
        )
        return mixed / denominator.clamp(min=1e-6)


def loss_sums(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    weights: torch.Tensor,
    draft_ids: torch.Tensor | None = None,
    label_in_draft: torch.Tensor | None = None,
) -> LossSums:
    """
    Sums of the three losses over `n` positions.

    Args:
        draft_logits (`torch.FloatTensor` of shape `(n, draft_vocab)`): Corrected logits under teacher forcing.
        target_logits (`torch.FloatTensor` of shape `(n, vocab)`): The target's, at the same positions.
        labels (`torch.LongTensor` of shape `(n,)`): True tokens as draft ids.
        confidence_logits (`torch.FloatTensor` of shape `(n,)`, *optional*): Of the confidence head.
        weights (`torch.FloatTensor` of shape `(n,)`): Position weights; 0 where nothing is learned.
        draft_ids (`torch.LongTensor` of shape `(draft_vocab,)`, *optional*): Target id of each draft id, for a reduced
            vocabulary: the target's mass outside it counts fully as distance.
        label_in_draft (`torch.BoolTensor` of shape `(n,)`, *optional*): False where the true token cannot be drafted;
            such a position has no cross-entropy.
    """
    draft_log_probs = F.log_softmax(draft_logits.float(), dim=-1)
    target_probs = F.softmax(target_logits.float(), dim=-1)
    outside: torch.Tensor | float = 0.0
    if draft_ids is not None:
        target_probs = target_probs[:, draft_ids]
        outside = 1.0 - target_probs.sum(dim=-1)
    distance = (draft_log_probs.exp() - target_probs).abs().sum(dim=-1) + outside
    surprise = -draft_log_probs.gather(1, labels[:, None]).squeeze(1)
    ce_weights = weights if label_in_draft is None else weights * label_in_draft
    confidence = draft_logits.new_zeros((), dtype=torch.float32)
    if confidence_logits is not None:
        acceptance = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
        per_position = F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
        confidence = (per_position * weights).sum()
    return LossSums((surprise * ce_weights).sum(), (distance * weights).sum(), confidence)
