"""Records of the rounds of the batched loop, for those who asked for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ceiling import CeilingEstimator
from ..generation_config import DraftingOptions
from ..step_costs import StepCostTable
from ..telemetry import BlockCeiling, RoundRecord, TraceFile
from .drafting import Drafts


class RowCounts(NamedTuple):
    """
    What a round did, with one entry for each live row.

    Args:
        rows, starts (`list[int]`): The rows, and tokens of each text before the round.
        usable, admitted, sent (`list[int]`): Drafts that may be verified, that were admitted, that were sent.
        accepted (`list[int]`): Drafts committed.
        passed (`list[int]`): Drafts accepted of those sent, whatever was admitted and wherever the text ended.
        kept (`list[list[int]]`): Tokens committed.
        ended (`list[bool]`): Whether the row's text has ended.
    """

    rows: list[int]
    starts: list[int]
    usable: list[int]
    admitted: list[int]
    sent: list[int]
    accepted: list[int]
    passed: list[int]
    kept: list[list[int]]
    ended: list[bool]


class RoundTrace:
    """
    Hands a record of every round of a call to a callable.

    Args:
        callback (`Callable`): Receives each [`RoundRecord`].
        mode (`str`): The call's `verify_mode`.
        samples (`bool`): Whether tokens are drawn; greedy ones are certain.
    """

    def __init__(self, callback: Callable[[RoundRecord], object], mode: str, samples: bool) -> None:
        self._callback, self._mode, self._samples = callback, mode, samples
        self._round = 0
        self._estimator = CeilingEstimator()

    @classmethod
    def asked_for(cls, options: DraftingOptions, samples: bool) -> RoundTrace | None:
        """The trace of a call, if its options name a callback."""
        given = options.round_callback
        if given is None:
            return None
        return cls(given if callable(given) else TraceFile(given), options.verify_mode, samples)

    def add(
        self,
        counts: RowCounts,
        drafts: Drafts,
        scores: torch.Tensor,
        context: float,
        seconds: tuple[float, float],
        table: StepCostTable | None,
    ) -> None:
        """
        Records a round.

        Args:
            counts (`RowCounts`): Of its rows.
            drafts (`Drafts`): Of these rows.
            scores (`torch.FloatTensor` of shape `(live, width + 1, vocab)`): The target's, processed.
            context (`float`): Entries of a row in the cache before the round, on average.
            seconds (`tuple[float, float]`): Of drafting, and of the target's step with acceptance.
            table (`StepCostTable`, *optional*): Before it learns from this round.
        """
        self._round += 1
        rows, tokens = counts.rows, len(counts.rows) + sum(counts.sent)
        known = [[]] * len(rows) if drafts.confidence is None else drafts.confidence.tolist()
        drafting = sum(map(bool, counts.usable))
        record = RoundRecord(
            round=self._round,
            mode=self._mode,
            rows=rows,
            drafted=counts.usable,
            admitted=counts.admitted,
            sent=counts.sent,
            accepted=counts.accepted,
            committed=list(map(len, counts.kept)),
            tokens=tokens,
            context=context,
            draft_seconds=seconds[0],
            verify_seconds=seconds[1],
            predicted_draft_seconds=None if table is None else float(table.draft_curve(len(rows))[drafting]),
            predicted_verify_seconds=None if table is None else float(table.predict(len(rows), tokens, context)),
            confidences=[values[:count] for values, count in zip(known, counts.usable, strict=True)],
            ceilings=self._ceilings(counts, drafts, scores),
        )
        self._callback(record)

    def _ceilings(self, counts: RowCounts, drafts: Drafts, scores: torch.Tensor) -> list[BlockCeiling]:
        settled, trimmed = [], []
        for place, (row, whole, sent, passed) in enumerate(
            zip(counts.rows, counts.usable, counts.sent, counts.passed, strict=True)
        ):
            if passed == sent < whole:
                trimmed.append(place)
            elif whole:
                settled.append(BlockCeiling(row, self._round, passed + 1.0, passed + 1.0))
        if trimmed:
            self._open(trimmed, counts, drafts)
        asked = [
            self._estimator.asks(row, start, kept)
            for row, start, kept in zip(counts.rows, counts.starts, counts.kept, strict=True)
        ]
        answers = iter(self._log_probs(scores, counts.kept, asked))
        for row, start, kept, ended in zip(counts.rows, counts.starts, counts.kept, counts.ended, strict=True):
            settled += self._estimator.settle(row, start, kept, answers, ended)
        return settled

    def _open(self, trimmed: list[int], counts: RowCounts, drafts: Drafts) -> None:
        ids = drafts.tokens[trimmed]
        logs = torch.zeros_like(ids, dtype=torch.float64)  # greedy drafts are certain
        if drafts.probs is not None:
            logs = drafts.probs[trimmed].gather(-1, ids[..., None]).squeeze(-1).double().log()
        for place, tokens, log_probs in zip(trimmed, ids.tolist(), logs.tolist(), strict=True):
            cut = slice(counts.sent[place], counts.usable[place])
            start, length = counts.starts[place] + counts.sent[place], counts.sent[place] + 1
            self._estimator.open(counts.rows[place], self._round, start, length, tokens[cut], log_probs[cut])

    def _log_probs(
        self, scores: torch.Tensor, kept: list[list[int]], asked: list[list[tuple[int, int]]]
    ) -> list[float]:
        """The target's log-probability of tokens at offsets of each row's window, row after row."""
        index = [(place, k, token) for place, pairs in enumerate(asked) for k, token in pairs]
        if not self._samples:
            return [0.0 if kept[place][k] == token else float("-inf") for place, k, token in index]
        if not index:
            return []
        places, offsets, tokens = torch.tensor(index, device=scores.device).T
        chosen = scores[places, offsets]  # [n, vocab]
        picked = chosen.gather(-1, tokens[:, None]).squeeze(-1)
        return (picked.double() - chosen.logsumexp(dim=-1).double()).tolist()


__all__ = ["RoundTrace", "RowCounts"]
