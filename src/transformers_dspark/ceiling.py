"""Acceptance ceilings: how far blocks would have been accepted, had they been verified whole.

A schedule that trims a block removes the evidence of what its tail would have done. It comes back where the text goes
on as the tail did: there the target's probability of each trimmed token is known, until the first that differs.
Plain numbers only; the loop looks the probabilities up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .telemetry import BlockCeiling, RoundRecord


@dataclass
class _Tail:
    """Trimmed tokens of a block; `expected` tokens are expected so far, and all pass with probability `product`."""

    round: int
    start: int
    tokens: list[int]
    log_probs: list[float]
    expected: float
    product: float = 1.0

    def seen(self, start: int, committed: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Offsets among committed tokens where the target's probability of a trimmed token counts, and that token."""
        for offset, token in zip(range(self.start - start, len(committed)), self.tokens, strict=False):
            yield offset, token
            if committed[offset] != token:
                return


class CeilingEstimator:
    """
    Bounds on the ceilings of trimmed blocks whose admitted part was accepted.

    With a_j = min(1, target_prob / draft_prob) of the j-th trimmed token, the expected ceiling is the accepted length
    and the sum of the running products of a_j. An a_j is known while the committed text equals the trimmed tokens
    before it. The lower bound leaves out those that are not; the upper bound takes each for 1.
    """

    def __init__(self) -> None:
        self._tails: dict[int, list[_Tail]] = {}

    def open(
        self,
        row: int,
        round: int,
        start: int,
        accepted_length: int,
        tokens: Sequence[int],
        log_probs: Sequence[float],
    ) -> None:
        """
        Remembers a trimmed block, before the same round is settled.

        Args:
            row, round (`int`): Of the block.
            start (`int`): Place of the first trimmed token in the row's text.
            accepted_length (`int`): Admitted drafts, which all passed, and the bonus.
            tokens (`Sequence[int]`): The trimmed tokens.
            log_probs (`Sequence[float]`): Of each under the distribution that drew it; 0.0 for greedy drafts.
        """
        tail = _Tail(round, start, list(tokens), list(log_probs), float(accepted_length))
        self._tails.setdefault(row, []).append(tail)

    def asks(self, row: int, start: int, committed: Sequence[int]) -> list[tuple[int, int]]:
        """
        What [`~CeilingEstimator.settle`] needs to know of a round: pairs of an offset among the `committed` tokens,
        which begin at place `start` of the text, and a token whose log-probability there is asked for.
        """
        return [pair for tail in self._tails.get(row, ()) for pair in tail.seen(start, committed)]

    def settle(
        self, row: int, start: int, committed: Sequence[int], log_probs: Iterable[float], ended: bool
    ) -> list[BlockCeiling]:
        """
        Takes notice of a row's round, and returns the blocks of which no more can be known.

        Args:
            row, start, committed: As for [`~CeilingEstimator.asks`].
            log_probs (`Iterable[float]`): The target's, of what was asked for, in that order; -inf for no mass.
            ended (`bool`): Whether the row's text has ended.
        """
        answers, settled, open_ = iter(log_probs), [], []
        for tail in self._tails.pop(row, ()):
            agrees, pairs = True, list(tail.seen(start, committed))
            for (offset, token), draft in zip(pairs, tail.log_probs, strict=False):
                tail.product *= math.exp(min(0.0, next(answers) - draft))
                tail.expected += tail.product
                agrees = committed[offset] == token
            passed = len(pairs)
            tail.tokens, tail.log_probs = tail.tokens[passed:], tail.log_probs[passed:]
            tail.start += passed
            if tail.tokens and tail.product > 0 and agrees and not ended:
                open_.append(tail)
                continue
            rest = tail.product * len(tail.tokens)
            settled.append(BlockCeiling(row, tail.round, tail.expected, tail.expected + rest))
        if open_:
            self._tails[row] = open_
        return settled


class CeilingWindow:
    """
    Mean ceiling of the latest blocks.

    Args:
        blocks (`int`): How many.
    """

    def __init__(self, blocks: int = 256) -> None:
        if blocks < 1:
            raise ValueError(f"blocks={blocks} must be at least 1.")
        self._blocks: deque[BlockCeiling] = deque(maxlen=blocks)

    def add(self, record: RoundRecord) -> None:
        """Takes the blocks that a round settled."""
        self._blocks.extend(record.ceilings)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lower and upper bound of the mean ceiling in tokens, bonus included; `None` before the first block."""
        count = len(self._blocks)
        if not count:
            return None
        return math.fsum(b.lower for b in self._blocks) / count, math.fsum(b.upper for b in self._blocks) / count


def acceptance_ceiling(records: Iterable[RoundRecord], blocks: int = 256) -> tuple[float, float] | None:
    """
    The bounds that a [`CeilingWindow`] shows after some rounds, as of a trace that
    [`~transformers_dspark.telemetry.read_trace`] reads.
    """
    window = CeilingWindow(blocks)
    for record in records:
        window.add(record)
    return window.bounds


__all__ = ["CeilingEstimator", "CeilingWindow", "acceptance_ceiling"]
