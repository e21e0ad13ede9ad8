"""What a drafter hands on: a drafted block, and the questions that it asks while it drafts one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


Select = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
KeepGoing = Callable[[int, "torch.Tensor | None", torch.Tensor], bool]


@dataclass(frozen=True)
class Proposal:
    """
    One drafted block of `width <= num_draft_tokens` tokens a row.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, width)`): Drafted ids in the target's vocabulary.
        logits (`torch.FloatTensor` of shape `(rows, width, vocab_size)`): float32 logits that each token was chosen
            from; `-inf` where the drafter cannot propose.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): Probability in 0..1 that the token
            passes verification given that those before it did. It depends on earlier tokens only.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


__all__ = ["KeepGoing", "Proposal", "Select"]
