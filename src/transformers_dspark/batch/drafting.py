"""Drafts for the rows of a round: one block for all that draft, walked token by token through their processors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ..modeling_dspark import DSparkDrafter, Proposal
from ..ragged_context import RaggedContext
from ..sampling import draw, pad_vocabulary
from .processors import RowProcessors


@dataclass(frozen=True)
class Drafts:
    """
    Drafts of a round by place; `width` 0 if nothing was drafted.

    Args:
        tokens (`torch.LongTensor` of shape `(live, width)`): Drafted ids; anything where a row drafted less.
        probs (`torch.FloatTensor` of shape `(live, width, vocab)`, *optional*): Distributions that drew them, when
            sampling.
        usable (`list[int]`): Drafts of each row that may be verified at all.
        confidence (`torch.FloatTensor` of shape `(live, width)`, *optional*): NaN for rows that did not draft.
        drafted (`list[bool]`): Rows that drafted.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    usable: list[int]
    confidence: torch.Tensor | None
    drafted: list[bool]

    @classmethod
    def none(cls, text: torch.Tensor, live: int) -> Drafts:
        """A round of anchors alone."""
        return cls(text.new_empty(live, 0), None, [0] * live, None, [False] * live)


class RowDrafting:
    """
    Drafts for rows of different lengths.

    Args:
        drafter (`DSparkDrafter`): Bound to its target.
        processors (`RowProcessors`): Of the call.
        threshold (`float`): A block is drafted on while any row's confidence has not fallen below it.
        eos_ids (`Collection[int]`): A block ends with any of them.
    """

    def __init__(
        self, drafter: DSparkDrafter, processors: RowProcessors, threshold: float, eos_ids: Collection[int]
    ) -> None:
        self._drafter, self._processors, self._threshold = drafter, processors, threshold
        self._eos_ids = sorted(eos_ids)

    def __call__(
        self,
        text: torch.Tensor,
        rows: Sequence[int],
        ends: Sequence[int],
        positions: Sequence[int],
        caps: Sequence[int],
        context: RaggedContext,
        drawn: torch.Tensor | None,
        vocabulary: int,
    ) -> Drafts:
        """
        Up to `caps` drafts for each place, which are also written behind the texts.

        Args:
            text (`torch.LongTensor` of shape `(all rows, length)`): Committed tokens, with room behind them.
            rows, ends, positions, caps (`Sequence[int]`): For each place its row in `text`, the tokens committed
                there, the position of its anchor, and how many drafts it may get.
            context (`RaggedContext`): The drafter's context by place.
            drawn (`torch.FloatTensor` of shape `(live, width or more)`, *optional*): Uniforms that draw the drafts;
                without them each is the most probable token.
            vocabulary (`int`): Of the target's logits.
        """
        chosen = [place for place, cap in enumerate(caps) if cap]
        if not chosen or not self._processors.can_speculate:
            return Drafts.none(text, len(rows))
        drafting = context if len(chosen) == len(rows) else context.picked(chosen)
        rows, ends = [rows[place] for place in chosen], [ends[place] for place in chosen]
        index, behind = torch.tensor((rows, ends), device=text.device)
        eos = torch.tensor(self._eos_ids, dtype=torch.long, device=text.device)
        drawable: list[torch.Tensor] = []
        confident = torch.ones(len(rows), dtype=torch.bool)
        over = [torch.zeros(len(rows), dtype=torch.bool, device=text.device)]  # drafts that have ended

        def going(k: int) -> list[int]:
            ended = over[k].tolist()
            return [i for i, place in enumerate(chosen) if k < caps[place] and not ended[i]]

        def select(k: int, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = pad_vocabulary(logits.to(text.device, torch.float32), vocabulary)
            room = [min(end + k, text.shape[1]) for end in ends]
            scores = self._processors.drafted(text, rows, room, scores.clone(), lambda: going(k))
            some = torch.isfinite(scores.amax(dim=-1))  # NaN and +inf show up there as well
            drawable.append(some)
            if drawn is None:
                ids = scores.argmax(dim=-1)
            else:
                scores = scores.softmax(dim=-1)
                ids = draw(scores, drawn[chosen, k])
            ids = torch.where(some, ids, 0)
            over.append(over[-1] | ~some | torch.isin(ids, eos))
            text[index, (behind + k).clamp(max=text.shape[1] - 1)] = ids  # the last place is no draft's
            return ids, scores

        def keep_going(k: int, confidence: torch.Tensor | None, tokens: torch.Tensor) -> bool:
            confident.logical_and_((confidence >= self._threshold).cpu() if confidence is not None else confident)
            return bool(confident.any())

        device = self._drafter.device
        proposal = self._drafter.propose(
            text[index, behind - 1].to(device),
            torch.tensor([positions[place] for place in chosen], device=device),
            drafting,
            width=max(caps),
            select=select,
            keep_going=keep_going if self._threshold > 0 else None,
        )
        # a draft counts if it could be drawn, and the block had not ended before it
        counted = [some & ~ended for some, ended in zip(drawable, over, strict=False)]
        counts = torch.stack(counted).sum(dim=0).tolist() if counted else [0] * len(chosen)
        usable = [0] * len(caps)
        for place, count in zip(chosen, counts, strict=True):
            usable[place] = min(count, caps[place])
        return _by_place(proposal, text, chosen, caps, usable, sampled=drawn is not None)


def _by_place(
    proposal: Proposal, text: torch.Tensor, chosen: list[int], caps: Sequence[int], usable: list[int], sampled: bool
) -> Drafts:
    """A proposal of some places as drafts of all live ones."""
    live, width = len(caps), proposal.tokens.shape[1]
    tokens = text.new_zeros(live, width)
    tokens[chosen] = proposal.tokens.to(text.device)
    probs = confidence = None
    if sampled and width:
        probs = proposal.logits.new_zeros(live, width, proposal.logits.shape[-1])  # `select` gave softmaxes
        probs[chosen] = proposal.logits
    if proposal.confidence is not None:
        confidence = torch.full((live, width), float("nan"))
        confidence[chosen] = proposal.confidence.float().cpu()
    return Drafts(tokens, probs, usable, confidence, [cap > 0 for cap in caps])


__all__ = ["Drafts", "RowDrafting"]
