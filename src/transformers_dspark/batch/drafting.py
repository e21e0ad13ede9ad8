"""Drafts for the rows of a round: one block for all that draft, walked token by token through their processors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..backbone_dspark import DSparkContext
from ..modeling_dspark import DSparkDrafter
from ..sampling import draw, pad_vocabulary
from .processors import RowProcessors


@dataclass(frozen=True)
class Drafts:
    """
    Drafts of some rows.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, width)`): Drafted ids; anything where a row drafted less.
        probs (`torch.FloatTensor` of shape `(rows, width, vocab)`, *optional*): Distributions that drew them, when
            sampling.
        usable (`torch.LongTensor` of shape `(rows,)`): Drafts of each row that may be verified at all.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): NaN for rows that did not draft.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    usable: torch.Tensor
    confidence: torch.Tensor | None

    @classmethod
    def none(cls, text: torch.Tensor, rows: int) -> Drafts:
        """A round of anchors alone."""
        return cls(text.new_empty(rows, 0), None, text.new_zeros(rows), None)

    def among(self, places: list[int], rows: int) -> Drafts:
        """These drafts as those of `places` among more rows, of which the others did not draft."""
        if len(places) == rows:
            return self

        def spread(values: torch.Tensor, fill: float) -> torch.Tensor:
            wider = values.new_full((rows, *values.shape[1:]), fill)
            wider[places] = values
            return wider

        return Drafts(
            spread(self.tokens, 0),
            None if self.probs is None else spread(self.probs, 0.0),
            spread(self.usable, 0),
            None if self.confidence is None else spread(self.confidence, float("nan")),
        )


class RowDrafting:
    """
    Drafts for rows of different lengths. With processors that all rows share, nothing waits for the device.

    Args:
        drafter (`DSparkDrafter`): Bound to its target.
        processors (`RowProcessors`): Of the call.
        threshold (`float`): A block is drafted on while any row's confidence has not fallen below it; 0 never asks.
        eos_ids (`Collection[int]`): A block ends with any of them.
        device (`torch.device`): Where texts are.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        processors: RowProcessors,
        threshold: float,
        eos_ids: Collection[int],
        device: torch.device,
    ) -> None:
        self._drafter, self._processors, self._threshold = drafter, processors, threshold
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)

    def __call__(
        self,
        text: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        positions: torch.Tensor,
        caps: torch.Tensor,
        *,
        width: int,
        context: DSparkContext,
        drawn: torch.Tensor | None,
        vocabulary: int,
    ) -> Drafts:
        """
        Up to `caps` drafts for each row, which are also written behind the texts.

        Args:
            text (`torch.LongTensor` of shape `(all rows, length)`): Committed tokens, with room behind them.
            rows, ends, positions, caps (`torch.LongTensor` of shape `(n,)`): For each row that drafts its row in
                `text`, the tokens committed there, the position of its anchor, and how many drafts it may get.
            width (`int`): The largest of the caps.
            context (`DSparkContext`): The drafter's context of these rows.
            drawn (`torch.DoubleTensor` of shape `(n, width or more)`, *optional*): Uniforms that draw the drafts;
                without them each is the most probable token.
            vocabulary (`int`): Of the target's logits.
        """
        last, processed = text.shape[1] - 1, not self._processors.are_none
        best: list[torch.Tensor] = []  # by position the greatest score; NaN and infinities show up there
        confident = torch.ones(len(rows), dtype=torch.bool)

        def ended(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Which of `(n, k)` drafts end their block, and which could be drawn at all."""
            drawable = torch.isfinite(torch.stack(best[: tokens.shape[1]], dim=1))
            return ~drawable | torch.isin(tokens.to(text.device), self._eos), drawable

        def going(k: int, tokens: torch.Tensor) -> list[int]:
            some = caps > k
            if k:
                some = some & ~ended(tokens)[0].any(dim=1)
            return some.nonzero().flatten().tolist()

        def select(k: int, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = pad_vocabulary(logits.to(text.device, torch.float32), vocabulary)
            if processed:
                room = (ends + k).clamp(max=last + 1)
                scores = self._processors.drafted(text, rows, room, scores.clone(), lambda: going(k, tokens))
            ids = scores.argmax(dim=-1)
            best.append(scores.gather(1, ids[:, None]).squeeze(1))
            if drawn is None:
                scores = scores[:, :0]  # nobody asks what they were, and it costs to keep them
            else:
                scores = scores.softmax(dim=-1)
                ids = torch.where(torch.isfinite(best[-1]), draw(scores, drawn[:, k]), 0)
            if processed:
                text[rows, (ends + k).clamp(max=last)] = ids  # the last place is no draft's
            return ids, scores

        def keep_going(k: int, confidence: torch.Tensor | None, tokens: torch.Tensor) -> bool:
            confident.logical_and_((confidence >= self._threshold).cpu() if confidence is not None else confident)
            return bool(confident.any())

        device = self._drafter.device
        proposal = self._drafter.propose(
            text[rows, ends - 1].to(device),
            positions.to(device),
            context,
            width=width,
            select=select,
            keep_going=keep_going if self._threshold > 0 else None,
        )
        tokens = proposal.tokens.to(text.device)
        usable = torch.zeros_like(caps)
        if best:
            places = (ends[:, None] + torch.arange(len(best), device=text.device)).clamp(max=last)
            text[rows[:, None], places] = tokens
            over, drawable = ended(tokens)  # a draft counts if it could be drawn, and the block had not ended before
            before = F.pad(over[:, :-1], (1, 0)).long().cumsum(dim=1)
            usable = (drawable & (before == 0)).sum(dim=1)
        probs = None if drawn is None or not best else proposal.logits  # `select` gave softmaxes
        confidence = None if proposal.confidence is None else proposal.confidence.float()
        return Drafts(tokens, probs, torch.minimum(usable, caps), confidence)


__all__ = ["Drafts", "RowDrafting"]
