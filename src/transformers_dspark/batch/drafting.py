"""Drafts for the rows of a round: one block for all that draft, walked token by token through their processors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..backbone_dspark import DSparkContext
from ..modeling_dspark import DSparkDrafter
from ..sampling import best, draw, pad_vocabulary
from .processors import RowProcessors


Quick = Callable[[Callable[..., Any]], Callable[..., Any]]  # from a function of tensors to one that does the same


def plain(part: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, compiled by nobody."""
    return part


def ends_text(tokens: torch.Tensor, eos: torch.Tensor) -> torch.Tensor:
    """Which of the tokens are among the `(n,)` that end a text."""
    return (tokens[..., None] == eos).any(dim=-1)  # `isin` would choose its way by the number of tokens


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
        quick (`Callable`): What makes a function of tensors quicker. The block's walk stays as it is with processors,
            whose code is not ours, and with a threshold, which asks the host.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        processors: RowProcessors,
        threshold: float,
        eos_ids: Collection[int],
        device: torch.device,
        quick: Quick = plain,
    ) -> None:
        self._drafter, self._processors, self._threshold = drafter, processors, threshold
        self._quick = quick
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
        device = self._drafter.device
        anchors = text[rows, ends - 1].to(device)
        hidden = self._drafter.block_states(anchors, positions.to(device), context)
        base = self._drafter.base_logits(hidden, width)
        alone = self._processors.are_none and self._threshold == 0
        walk = self._quick(RowDrafting._walk) if alone else RowDrafting._walk
        return Drafts(*walk(self, anchors, hidden, base, text, rows, ends, caps, drawn, vocabulary))

    def _walk(
        self,
        anchors: torch.Tensor,
        hidden: torch.Tensor,
        base: torch.Tensor,
        text: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        caps: torch.Tensor,
        drawn: torch.Tensor | None,
        vocabulary: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """What [`Drafts`] hold, from a block's states and base logits."""
        last, processed = text.shape[1] - 1, not self._processors.are_none
        drawable: list[torch.Tensor] = []  # by position the rows whose scores leave a token: neither NaN nor infinite

        def ended(tokens: torch.Tensor) -> torch.Tensor:
            """Which of `(n, k)` drafts end their block."""
            return ends_text(tokens.to(text.device), self._eos) | ~torch.stack(drawable[: tokens.shape[1]], dim=1)

        def going(k: int, tokens: torch.Tensor) -> list[int]:
            some = caps > k
            if k:
                some = some & ~ended(tokens).any(dim=1)
            return some.nonzero().flatten().tolist()

        def select(k: int, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = pad_vocabulary(logits.to(text.device, torch.float32), vocabulary)
            if processed:
                room = (ends + k).clamp(max=last + 1)
                scores = self._processors.drafted(text, rows, room, scores.clone(), lambda: going(k, tokens))
            if drawn is None:
                greatest, ids = best(scores)
                drawable.append(torch.isfinite(greatest))
                scores = scores[:, :0]  # nobody asks what they were, and it costs to keep them
            else:
                scores = scores.softmax(dim=-1)
                ids = draw(scores, drawn[:, k])
                drawable.append(ids < scores.shape[-1])
                ids = torch.where(drawable[-1], ids, 0)
            if processed:
                text[rows, (ends + k).clamp(max=last)] = ids  # the last place is no draft's
            return ids, scores

        going_on: Callable[..., bool] | None = None
        if self._threshold > 0:
            confident = torch.ones(len(rows), dtype=torch.bool)

            def going_on(k: int, confidence: torch.Tensor | None, tokens: torch.Tensor) -> bool:
                confident.logical_and_((confidence >= self._threshold).cpu() if confidence is not None else confident)
                return bool(confident.any())

        proposal = self._drafter.chain(anchors, hidden, base, select=select, keep_going=going_on)
        tokens = proposal.tokens.to(text.device)
        usable = torch.zeros_like(caps)
        if drawable:
            places = (ends[:, None] + torch.arange(len(drawable), device=text.device)).clamp(max=last)
            text[rows[:, None], places] = tokens
            before = F.pad(ended(tokens)[:, :-1], (1, 0)).long().cumsum(dim=1)
            # a draft counts if it could be drawn, and the block had not ended before
            usable = (torch.stack(drawable, dim=1) & (before == 0)).sum(dim=1)
        probs = None if drawn is None or not drawable else proposal.logits  # `select` gave softmaxes
        confidence = None if proposal.confidence is None else proposal.confidence.float()
        return tokens, probs, torch.minimum(usable, caps), confidence


__all__ = ["Drafts", "Quick", "RowDrafting", "ends_text", "plain"]
