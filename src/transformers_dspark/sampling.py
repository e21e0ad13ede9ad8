"""Probabilities, draws and the rule that accepts or replaces drafted tokens.

Pure functions of tensors: noise comes in as uniforms, so a test can inject it and a captured graph can replay it.
Nothing here knows models, caches or generation options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import library
from torch.nn import functional as F


class Verdict(NamedTuple):
    """
    What verification decided for each row.

    Args:
        accepted (`torch.LongTensor` of shape `(rows,)`): Drafted tokens that passed, from the left.
        bonus (`torch.LongTensor` of shape `(rows,)`): The token after them; equals the vocabulary size where the
            target's distribution has no mass at all.
    """

    accepted: torch.Tensor
    bonus: torch.Tensor


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The greatest of `(..., n)` scores and the first index that has it, each `(...,)`; NaN is greater than any number.
    """
    return _best(scores) if torch.compiler.is_compiling() else tuple(scores.max(dim=-1))  # type: ignore[return-value]


def cumulative(weights: torch.Tensor) -> torch.Tensor:
    """Sums of `(..., n)` weights up to each, in float64."""
    return _cumulative(weights) if torch.compiler.is_compiling() else weights.double().cumsum(dim=-1)


# Operators of their own for compilers, which would leave all the scores of a row to one block of threads.
@library.custom_op("transformers_dspark::best", mutates_args=())
def _best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    greatest, ids = scores.max(dim=-1)
    return greatest, ids


@_best.register_fake
def _(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.new_empty(scores.shape[:-1]), scores.new_empty(scores.shape[:-1], dtype=torch.long)


@library.custom_op("transformers_dspark::cumulative", mutates_args=())
def _cumulative(weights: torch.Tensor) -> torch.Tensor:
    return weights.double().cumsum(dim=-1)


@_cumulative.register_fake
def _(weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weights, dtype=torch.float64)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """
    Draws one token a row by inverting the cumulative distribution.

    The sum runs in float64: in float32 the tail of a large vocabulary would drown in rounding. A token of probability
    zero is never drawn.

    Args:
        probs (`torch.FloatTensor` of shape `(..., vocab)`): Weights, not negative; they need not sum to one.
        uniforms (`torch.DoubleTensor` of shape `(...,)`): Noise in [0, 1).

    Returns:
        `torch.LongTensor` of shape `(...,)`; `vocab` where the weights are NaN or sum to nothing.
    """
    sums = cumulative(probs)
    total = sums[..., -1:]
    below = torch.minimum(uniforms.double()[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(sums, below, right=True).squeeze(-1)
    return torch.where(total.squeeze(-1) > 0, drawn, probs.shape[-1])


def pad_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """
    Widens `(..., vocab)` logits to `(..., size)` with `-inf`: a target's head may have more rows than its vocabulary.
    """
    return F.pad(logits, (0, size - logits.shape[-1]), value=float("-inf")) if logits.shape[-1] < size else logits


def accept(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> Verdict:
    """
    Rejection sampling that leaves the target's distribution unchanged.

    Token k passes with probability `min(1, target_probs[x] / draft_probs[x])`. At the first failure the replacement is
    drawn from the positive part of `target_probs - draft_probs`, or from `target_probs` where that part has no mass;
    if all pass, the bonus is drawn from the target's next distribution.

    Args:
        target_probs (`torch.FloatTensor` of shape `(rows, width + 1, vocab)`): The target's distributions, after
            processors.
        draft_probs (`torch.FloatTensor` of shape `(rows, width, draft_vocab)`): The distributions that drew the
            tokens; missing tokens at the end of the vocabulary count as zero.
        tokens (`torch.LongTensor` of shape `(rows, width)`): Drafted ids.
        uniforms (`torch.DoubleTensor` of shape `(rows, width)`): Noise in [0, 1) for the acceptance tests.
        bonus_uniforms (`torch.DoubleTensor` of shape `(rows,)`): Noise in [0, 1) for the replacement or bonus.
        lengths (`torch.LongTensor` of shape `(rows,)`, *optional*): Admitted tokens of each row; the bonus after them
            is drawn as if the block had ended there. Defaults to all.

    Source: Leviathan et al. (2211.17192), algorithm 1; DSpark paper, verification.
    """
    width = tokens.shape[1]
    if draft_probs.shape[-1] < target_probs.shape[-1]:
        draft_probs = F.pad(draft_probs, (0, target_probs.shape[-1] - draft_probs.shape[-1]))
    within = torch.ones_like(tokens, dtype=torch.bool)
    if lengths is not None:
        within = torch.arange(width, device=tokens.device) < lengths[:, None]
    target_of = target_probs[:, :width].gather(-1, tokens[..., None]).squeeze(-1)
    draft_of = draft_probs.gather(-1, tokens[..., None]).squeeze(-1)
    # the strict form of u < target / draft: no division, and a token the target forbids never passes
    passed = (uniforms * draft_of < target_of) & within
    accepted = passed.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(tokens.shape[0], device=tokens.device)
    target_next = target_probs[rows, accepted]
    # behind the last admitted token the draft has no mass, so the residual is the target itself
    # (filled rather than multiplied: where nothing could be drafted, the distribution is NaN)
    draft_next = F.pad(draft_probs.masked_fill(~within[..., None], 0.0), (0, 0, 0, 1))[rows, accepted]
    residual = (target_next - draft_next).clamp(min=0)
    empty = residual.sum(dim=-1, keepdim=True) <= 0
    return Verdict(accepted, draw(torch.where(empty, target_next, residual), bonus_uniforms))


def accept_greedy(target_ids: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor | None = None) -> Verdict:
    """
    The same rule where both distributions are one-hot: keep drafts while they equal the target's choice.

    Args:
        target_ids (`torch.LongTensor` of shape `(rows, width + 1)`): The target's argmax at each position.
        tokens (`torch.LongTensor` of shape `(rows, width)`): Drafted ids.
        lengths (`torch.LongTensor` of shape `(rows,)`, *optional*): Admitted tokens of each row.
    """
    passed = target_ids[:, :-1] == tokens
    if lengths is not None:
        passed &= torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    accepted = passed.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, target_ids.gather(1, accepted[:, None]).squeeze(1))


class Noise:
    """
    Uniforms of one call.

    Args:
        seed (`int`, *optional*): Seeds a generator of the call's own, on the CPU so that every device sees the same
            numbers. Without it the device's global generator serves, which `torch.manual_seed` controls.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, device: torch.device) -> torch.Tensor:
        """float64 uniforms in [0, 1)."""
        if self._generator is None:
            return torch.rand(shape, dtype=torch.float64, device=device)
        return torch.rand(shape, dtype=torch.float64, generator=self._generator).to(device)


class RowNoise:
    """
    Uniforms of the rows of a batch, a stream for each, so that a row's draws do not depend on the others.

    Args:
        seeds (`Sequence[int]`): Seed of each row.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, rows: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
        """The next `(len(rows), count)` float64 uniforms in [0, 1) of some rows."""
        drawn = [torch.rand(count, dtype=torch.float64, generator=self._generators[row]) for row in rows]
        return torch.stack(drawn).to(device)


__all__ = ["Noise", "RowNoise", "Verdict", "accept", "accept_greedy", "best", "draw", "pad_vocabulary"]
