"""
How many tokens a round sends whose size is fixed before it starts, as that of a captured graph is.

In such a round all rows draft together or none does, so one decision is made for the whole batch: among the totals
that there are, and the plain step. It knows seconds, confidences and counts, all of earlier rounds.
"""

from __future__ import annotations

import numpy as np


GRID = 8  # points per drafted token at which an outlook is kept
PRIOR = 0.8  # acceptance of a draft of which nothing is known: about half of a block of seven


def tiers(rows: int, width: int) -> list[int]:
    """
    Totals of packed tokens that rounds are captured for: from the anchors alone to whole windows of all rows, in steps
    of about an eighth.

    Args:
        rows (`int`): Rows of the round.
        width (`int`): Drafted tokens of a block.
    """
    found, most = [rows], rows * (width + 1)
    while found[-1] < most:
        step = max(1, 1 << max(0, found[-1].bit_length() - 3))
        found.append(min(most, (found[-1] // step + 1) * step))
    return found


class Outlook:
    """
    How many drafts of a row will be accepted if the surest `x` a row are sent, on average over the rows of a batch.

    Confidences say so before anything was verified: the mean of a block's ranked survivals, faded over rounds. What
    was accepted of what was sent corrects them by one factor. Without confidences, acceptance by position takes their
    place. A batch of many rows knows after one round what a single row learns in as many rounds as there are rows:
    all that is imagined beforehand weighs as much as one row in one round.

    Args:
        width (`int`): Drafted tokens of a block.
        decay (`float`): Weight that a round keeps after one more round that drafted, in 0..1.
    """

    def __init__(self, width: int, decay: float = 0.9) -> None:
        self._width, self._decay = width, decay
        self._grid = np.linspace(0.0, width, GRID * width + 1)  # drafts of a row
        self._passed = PRIOR ** np.arange(1.0, width + 1)  # row-rounds, by position; with `_tested` the acceptance
        self._tested = PRIOR ** np.arange(0.0, width)
        self._weight = 1.0  # row-rounds
        self._curve = self._by_position()  # accepted of a row, by the grid
        self._accepted = self._promised = float(self._curve[-1])

    def accepted(self, drafts: np.ndarray) -> np.ndarray:
        """
        Drafts of a row that will be accepted.

        Args:
            drafts (`np.ndarray`): Drafts of a row that are sent, on average over the rows, in 0..`width`.
        """
        promised = np.interp(drafts, self._grid, self._curve)
        return np.minimum(drafts, promised * (self._accepted / max(self._promised, 1e-9)))

    def learn(self, sent: np.ndarray, accepted: np.ndarray, confidence: np.ndarray | None, rare: bool = False) -> None:
        """
        Takes in a round that drafted.

        Args:
            sent, accepted (`np.ndarray` of shape `(rows,)`): Drafts that the target checked, and those that passed.
            confidence (`np.ndarray` of shape `(rows, width)`, *optional*): Of the drafts.
            rare (`bool`): Nothing was drafted in a while: what was known before counts half.
        """
        rows, decay = len(sent), min(self._decay, 0.5) if rare else self._decay
        if confidence is None:
            offsets = np.arange(self._width)
            tested = (offsets < sent[:, None]) & (offsets <= accepted[:, None])
            self._tested = decay * self._tested + tested.sum(axis=0)
            self._passed = decay * self._passed + (offsets < accepted[:, None]).sum(axis=0)
            self._curve = self._by_position()
            return
        survival = np.where(confidence >= 0, confidence, 1.0).cumprod(axis=1)  # what is no number counts as 1
        ranked = np.concatenate(([0.0], np.sort(survival, axis=None)[::-1])).cumsum()
        curve = np.interp(self._grid * rows, np.arange(len(ranked)), ranked) / rows
        kept = decay * self._weight
        self._weight = kept + rows
        self._curve = (kept * self._curve + rows * curve) / self._weight
        promised = survival[np.arange(survival.shape[1]) < sent[:, None]].sum()
        self._accepted = decay * self._accepted + float(accepted.sum())
        self._promised = decay * self._promised + float(promised)

    def _by_position(self) -> np.ndarray:
        """The curve when rows send the first of their drafts, as those without confidences do."""
        acceptance = np.minimum(1.0, self._passed / np.maximum(self._tested, 1e-9))
        sums = np.concatenate(([0.0], acceptance.cumprod().cumsum()))
        return np.interp(self._grid, np.arange(self._width + 1), sums)


class SizeChoice:
    """
    Chooses the total of each round, the plain step among them.

    Rounds begin with whole windows if drafting is expected to pay. Another total is taken once it is expected to be
    faster by `margin`: what a cut saves is often less than what is known about it. While drafting does not pay, it is
    tried in single rounds: first of all, and then so rarely that the time they are expected to lose stays below a
    share `tuition` of the time that has passed without drafts. It is not tried if it would not pay even if every draft
    were accepted.

    Args:
        margin (`float`): Least gain in throughput for which the total changes.
        tuition (`float`): Share of the time without drafts that may be lost to find out whether they pay by now.
    """

    def __init__(self, margin: float = 0.02, tuition: float = 0.003) -> None:
        self.margin, self.tuition = margin, tuition
        self._held: float | None = None  # tokens of a row that are sent; None before the first choice
        self._saved = 0.0  # seconds that may be lost

    def __call__(self, rows: int, totals: np.ndarray, seconds: np.ndarray, accepted: np.ndarray) -> tuple[int, bool]:
        """
        Index of the coming round's total, and whether it is a retry.

        Args:
            rows (`int`): Rows that take part.
            totals (`np.ndarray` of shape `(n,)`): Tokens of the step, rising; at first the plain step's, at last those
                of whole windows.
            seconds (`np.ndarray` of shape `(n,)`): Of rounds of these totals, with the draft but for the first.
            accepted (`np.ndarray` of shape `(n,)`): Drafts that all rows together are expected to have accepted.
        """
        rates = (rows + accepted) / seconds
        if not ((rows + totals - totals[0])[1:] / seconds[1:] > rates[0]).any():
            return self._hold(0, totals), False
        first, best = self._held is None, int(rates.argmax())
        if first:
            held = len(totals) - 1 if best else 0
        else:
            held = min(int(totals.searchsorted(self._held * totals[0] - 0.5)), len(totals) - 1)
        if first or rates[best] <= rates[held] * (1 + self.margin):
            best = held
        self._hold(best, totals)
        if best:
            self._saved = 0.0
            return best, False
        self._saved += self.tuition * seconds[0]
        losses = seconds[1:] - (rows + accepted[1:]) / rates[0]
        least = int(losses.argmin())
        if losses[least] > self._saved and not first:
            return 0, False
        self._saved = max(0.0, self._saved - max(0.0, losses[least]))
        return 1 + least, True

    def _hold(self, index: int, totals: np.ndarray) -> int:
        self._held = totals[index] / totals[0]
        return index


__all__ = ["Outlook", "SizeChoice", "tiers"]
