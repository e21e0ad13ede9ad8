"""
A round of the batched loop as one function of tensors whose shapes never change: the form that a captured graph can
replay.

Rows, drafted tokens of a block, packed tokens of the window, capacity of the caches: all are fixed when a round is
made. What changes from round to round, lengths and texts and which rows are alive, lies in tensors, and nothing is
read back. A window that is not full is filled up with tokens of a spare row, which is the last of the caches and
nobody's text. Rejected tokens stay where they were written: their row's number of entries does not count them, and the
next window overwrites them.

The number of drafted tokens that all rows may send together, the budget, is part of the shape, so it has to be known
before the round starts, as the lagged scheduler knows it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from .batch.drafting import Drafts, RowDrafting
from .batch.processors import RowProcessors
from .cache import RaggedCache
from .modeling_dspark import DSparkDrafter
from .ragged_context import RaggedContext
from .sampling import Verdict, accept, accept_greedy
from .scheduling import survival, top_k_lengths
from .target import TargetTaps
from .windows import WINDOW_KEYWORD, VerifyWindow


class RoundResult(NamedTuple):
    """
    What a round did; every tensor is on the device.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, width + 1)`): New tokens; the first `kept` of each row count.
        kept (`torch.LongTensor` of shape `(rows,)`): Tokens committed, 0 for a row that had ended before.
        accepted (`torch.LongTensor` of shape `(rows,)`): Drafts among them.
        sent (`torch.LongTensor` of shape `(rows,)`): Drafts that the target checked.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): Of the drafts.
        failed (`torch.BoolTensor` of shape `(rows,)`): The target's scores left no token to choose.
    """

    tokens: torch.Tensor
    kept: torch.Tensor
    accepted: torch.Tensor
    sent: torch.Tensor
    confidence: torch.Tensor | None
    failed: torch.Tensor


class StaticContext(RaggedContext):
    """What a [`RaggedContext`] holds, shared with it; blocks are staged behind its capacity, not behind its rows."""

    def __init__(self, context: RaggedContext, entries: torch.Tensor) -> None:
        vars(self).update(vars(context))
        self.live, self._entries = len(entries), entries

    @property  # type: ignore[misc]  # there is nothing to set
    def length(self) -> int:  # type: ignore[override]
        """All entries that a row can have."""
        return self.capacity

    @property  # type: ignore[misc]
    def has_gaps(self) -> bool:  # type: ignore[override]
        """Rows end somewhere in front of a block."""
        return True

    @property
    def positions(self) -> torch.Tensor:
        """`(live, capacity)` absolute positions of the committed tokens; -1 behind a row's last."""
        behind = torch.arange(self.capacity, device=self._entries.device) >= self._entries[:, None]
        return self._places[: self.live].masked_fill(behind.to(self._places.device), -1)


class StaticRound:
    """
    Rounds of fixed shape, and their state.

    Args:
        drafter (`DSparkDrafter`): Bound to its target.
        taps (`TargetTaps`): Of the call.
        cache (`RaggedCache`): The prompts', with one row more than there are texts; each text has `capacity` room.
        text (`torch.LongTensor` of shape `(rows, max_length + 1)`): Prompts and first tokens; the last column is
            nobody's.
        ends, shifts (`torch.LongTensor` of shape `(rows,)`): Tokens of each text; what a token's position is ahead of
            the number of entries before it.
        processors (`RowProcessors`): Of the call; all rows must share them.
        eos_ids (`Collection[int]`): Any of them ends a text.
        width (`int`): Drafted tokens of a block.
        vocabulary (`int`): Of the target's logits.
        sampling (`bool`): Whether tokens are drawn; then `uniforms` `(rows, 2 * width + 1)` is the noise of the coming
            round: drafts, their tests, the bonus.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        taps: TargetTaps,
        cache: RaggedCache,
        text: torch.Tensor,
        ends: torch.Tensor,
        shifts: torch.Tensor,
        processors: RowProcessors,
        eos_ids: Collection[int],
        *,
        width: int,
        vocabulary: int,
        sampling: bool,
    ) -> None:
        rows, device = len(ends), text.device
        self.text, self.ends, self.width = text, ends, width
        self.entries = torch.tensor(cache.lengths[:rows], device=device)
        self.live = torch.ones(rows, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(rows, 2 * width + 1, dtype=torch.float64, device=device) if sampling else None
        self._drafter, self._taps, self._cache, self._processors = drafter, taps, cache, processors
        self._context = StaticContext(cache.context, self.entries)
        self._drafting = RowDrafting(drafter, processors, 0.0, eos_ids, device)
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
        self._rows, self._vocabulary = torch.arange(rows, device=device), vocabulary
        self._shifts = torch.cat((shifts, shifts.new_zeros(1)))  # of the spare row, too
        self._offsets = torch.arange(width + 1, device=device)

    def __call__(self, budget: int) -> RoundResult:
        """One round in which all rows together send at most `budget` drafted tokens."""
        drafts = self._draft()
        certain = torch.ones_like(drafts.tokens) if drafts.confidence is None else drafts.confidence
        sent = top_k_lengths(survival(certain.to(self.text.device)), budget, drafts.usable)
        counts = torch.where(self.live, 1 + sent, 0)
        starts = counts.cumsum(dim=0) - counts
        window = self._window(counts, starts, len(self._rows) + budget)
        blocks = torch.cat((self.text[self._rows, self.ends - 1][:, None], drafts.tokens), dim=1)
        ids = torch.cat((blocks, torch.zeros_like(blocks[:1])))[window.rows, window.offsets]
        positions = window.columns + self._shifts[window.rows]
        outputs = self._taps.run(
            input_ids=ids[None],
            position_ids=positions[None],
            cache=self._cache,
            use_cache=True,
            **{WINDOW_KEYWORD: window},
            **self._taps.forward_kwargs,
        )
        logits = outputs.logits[0].to(self.text.device, torch.float32)
        owners = window.rows.clamp(max=len(self._rows) - 1)
        scores = self._processors(self.text, owners, self.ends[owners] + window.offsets, logits)
        verdict = self._judge(scores, (starts[:, None] + self._offsets).clamp(max=len(ids) - 1), drafts, sent)
        taps = self._taps.read(outputs, self._drafter.device, self._drafter.dtype)
        self._cache.context.extend(self._drafter, taps, positions[None], window)
        return self._commit(drafts, sent, verdict)

    def _draft(self) -> Drafts:
        room = (self.text.shape[1] - 2 - self.ends).clamp(min=0)  # behind the drafts the bonus has its place
        return self._drafting(
            self.text,
            self._rows,
            self.ends,
            self.entries + self._shifts[:-1],
            torch.where(self.live, room.clamp(max=self.width), 0),
            width=self.width,
            context=self._context,
            drawn=self.uniforms,
            vocabulary=self._vocabulary,
        )

    def _window(self, counts: torch.Tensor, starts: torch.Tensor, total: int) -> VerifyWindow:
        """The windows of `counts` tokens, packed, and tokens of the spare row up to `total`."""
        tokens = torch.arange(total, device=counts.device)
        rows = torch.searchsorted(starts + counts, tokens, right=True)
        spare = rows == len(counts)
        offsets = torch.where(spare, 0, tokens - starts[rows.clamp(max=len(counts) - 1)])
        columns = torch.where(spare, 0, self.entries[rows.clamp(max=len(counts) - 1)] + offsets)
        places = torch.stack((rows, columns, offsets))
        return VerifyWindow(places, len(counts) + 1, self.width + 1, self._cache.context.capacity)

    def _judge(self, scores: torch.Tensor, index: torch.Tensor, drafts: Drafts, sent: torch.Tensor) -> Verdict:
        """Accepts or replaces drafts by packed `(total, vocab)` scores; `index` has the place of each row's tokens."""
        if self.uniforms is None or drafts.probs is None:
            verdict = accept_greedy(scores.argmax(dim=-1)[index], drafts.tokens, sent)
            best = scores.amax(dim=-1)[index].gather(1, verdict.accepted[:, None]).squeeze(1)
            return verdict._replace(bonus=torch.where(best > float("-inf"), verdict.bonus, self._vocabulary))
        tests, bonus = self.uniforms[:, self.width : -1], self.uniforms[:, -1]
        return accept(scores.softmax(dim=-1)[index], drafts.probs, drafts.tokens, tests, bonus, sent)

    def _commit(self, drafts: Drafts, sent: torch.Tensor, verdict: Verdict) -> RoundResult:
        failed = self.live & (verdict.bonus >= self._vocabulary)
        drafted = torch.cat((drafts.tokens, drafts.tokens[:, -1:]), dim=1)
        tokens = torch.where(self._offsets < verdict.accepted[:, None], drafted, verdict.bonus[:, None])
        ended = torch.isin(tokens, self._eos) & (self._offsets <= verdict.accepted[:, None])
        before = torch.cat((torch.zeros_like(ended[:, :1]), ended[:, :-1]), dim=1).long().cumsum(dim=1)
        counts = (before == 0) & (self._offsets <= verdict.accepted[:, None]) & self.live[:, None]
        kept = counts.sum(dim=1)
        places = torch.where(counts, self.ends[:, None] + self._offsets, self.text.shape[1] - 1)
        self.text.scatter_(1, places, tokens)
        self.ends += kept
        self.entries += kept
        self.live &= ~(ended & counts).any(dim=1) & (self.ends < self.text.shape[1] - 1)
        return RoundResult(tokens, kept, torch.minimum(verdict.accepted, kept), sent, drafts.confidence, failed)


__all__ = ["RoundResult", "StaticContext", "StaticRound"]
