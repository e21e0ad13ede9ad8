"""How many drafted tokens of each row the target checks in a round, and whether a row drafts at all.

Pure functions of confidences and seconds, and one small state, [`DraftGate`]. Nothing here knows models, caches or
where the seconds come from. The functions on tensors never wait for a device, so a captured graph can hold them.

A *cost* is always a vector: entry k holds the seconds of a round in which k drafted tokens are admitted over all rows.
[`~transformers_dspark.step_costs.StepCostTable.curve`] makes it; with the seconds of the draft added to every entry it
is the cost of a whole round.
"""

from __future__ import annotations

import numpy as np
import torch


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """
    Probability that each drafted token is accepted together with all before it.

    Args:
        confidence (`torch.FloatTensor` of shape `(rows, gamma)`): Conditional acceptance in 0..1. NaN stands for a
            confidence that nobody knows, as of a new row, and counts as 1.

    Returns:
        `torch.DoubleTensor` of shape `(rows, gamma)`: Falls, or stays, from left to right.
    """
    return confidence.double().nan_to_num(nan=1.0).clamp(0.0, 1.0).cumprod(dim=-1)


def threshold_caps(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """
    Most tokens of each row when a block ends before its first token of a confidence below `threshold`.

    Args:
        confidence (`torch.FloatTensor` of shape `(rows, gamma)`): As for [`survival`].
        threshold (`float`): In 0..1; 0 never cuts.

    Returns:
        `torch.LongTensor` of shape `(rows,)`.
    """
    return (~(confidence < threshold)).long().cumprod(dim=-1).sum(dim=-1)  # NaN, which nobody knows, does not cut


def causal_lengths(
    survival: torch.Tensor,
    cost: torch.Tensor | np.ndarray,
    caps: torch.Tensor | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """
    Lengths by early stop: tokens are admitted in order of survival until one does not raise the throughput.

    Since the search stops at the first token that does not pay, no confidence behind the cut has any say. The result
    is the best one whenever throughput has a single peak over the number of admitted tokens.

    Args:
        survival (`torch.DoubleTensor` of shape `(rows, gamma)`): What [`survival`] returns for the current block.
        cost (`torch.Tensor` or `np.ndarray` of shape `(rows * gamma + 1,)`): Seconds with k tokens admitted, above 0.
        caps (`torch.LongTensor` of shape `(rows,)`, *optional*): Most tokens of each row. Defaults to gamma.
        rows (`int`, *optional*): Rows in the step, each of which commits one token beside its drafts. Defaults to
            those of `survival`.

    Returns:
        `torch.LongTensor` of shape `(rows,)`: Tokens admitted in each row.

    Raises:
        ValueError: the cost has too few entries.

    Source: DSpark paper, algorithm 1. Ties go to the smaller position, then to the smaller row.
    """
    ranked, order = _rank(survival, caps)
    throughput = _throughput(ranked, cost, survival.shape[0] if rows is None else rows)
    admitted = (throughput[1:] > throughput[:-1]).long().cumprod(dim=0).sum()
    return _lengths(order, admitted, survival)


def budget(
    survival: torch.Tensor,
    cost: torch.Tensor | np.ndarray,
    caps: torch.Tensor | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """
    Number of tokens that maximises throughput over all budgets, whatever the shape of the cost.

    The search looks at every confidence it is given. To stay lossless it must not see the block it decides about: give
    it confidences two rounds old, then let [`top_k_lengths`] spread the budget over the current block.

    Args:
        survival (`torch.DoubleTensor` of shape `(rows, gamma)`): Of an earlier block of the same rows; 1 for rows
            without one.
        cost, caps, rows: As for [`causal_lengths`].

    Returns:
        `torch.LongTensor` of shape `()`: K, the smallest one among equals.

    Raises:
        ValueError: the cost has too few entries.

    Source: DSpark paper, section on production use.
    """
    ranked, _ = _rank(survival, caps)
    throughput = _throughput(ranked, cost, survival.shape[0] if rows is None else rows)
    index = torch.arange(len(throughput), device=throughput.device)
    return torch.where(throughput == throughput.max(), index, len(throughput)).min()  # argmax leaves ties open


def top_k_lengths(
    survival: torch.Tensor, budget: torch.Tensor | int, caps: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Spreads a budget over the rows: the K tokens of greatest survival, or all that the caps allow.

    Args:
        survival (`torch.DoubleTensor` of shape `(rows, gamma)`): Of the current block.
        budget (`torch.LongTensor` of shape `()` or `int`): K, chosen without a look at the current block.
        caps (`torch.LongTensor` of shape `(rows,)`, *optional*): Most tokens of each row. Defaults to gamma.

    Returns:
        `torch.LongTensor` of shape `(rows,)`: Tokens admitted in each row. Ties as in [`causal_lengths`].
    """
    ranked, order = _rank(survival, caps)
    return _lengths(order, (ranked >= 0).sum().clamp(max=budget), survival)


def _rank(survival: torch.Tensor, caps: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Survivals in order of admission, -1 behind a row's cap, and the places they had, position by position."""
    if caps is not None:
        within = torch.arange(survival.shape[1], device=survival.device) < caps[:, None]  # [rows, gamma]
        survival = survival.masked_fill(~within, -1.0)
    # Laid out position by position, so that a stable sort breaks ties by position and then by row.
    ranked, order = survival.double().T.flatten().sort(descending=True, stable=True)
    return ranked, order


def _throughput(ranked: torch.Tensor, cost: torch.Tensor | np.ndarray, rows: int) -> torch.Tensor:
    """Expected tokens per second with 0, 1, ... tokens admitted, `(rows * gamma + 1,)`; -inf where caps forbid it."""
    if len(cost) <= len(ranked):
        raise ValueError(
            f"The cost has {len(cost)} entries, but up to {len(ranked)} tokens can be admitted: give seconds for 0 to "
            f"{len(ranked)} of them."
        )
    seconds = torch.as_tensor(cost, dtype=torch.float64, device=ranked.device)[: len(ranked) + 1]
    committed = rows + torch.cat((ranked.new_zeros(1), ranked.clamp(min=0.0).cumsum(dim=0)))
    forbidden = torch.cat((torch.zeros(1, dtype=torch.bool, device=ranked.device), ranked < 0))
    return (committed / seconds).masked_fill(forbidden, float("-inf"))


def _lengths(order: torch.Tensor, admitted: torch.Tensor, survival: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), device=order.device)
    taken = torch.zeros_like(order).scatter(0, order, (places < admitted).long())
    return taken.view(survival.shape[1], survival.shape[0]).sum(dim=0)


class DraftGate:
    """
    Decides before each round which rows draft: drafting costs time even for a row whose tokens all fail.

    The rule. For each row the gate keeps running means of the tokens it accepted and of the tokens it sent, in rounds
    in which it drafted; a new row starts with one imagined round that accepted half a block. Rows are ordered by
    expected acceptance, and the first m of them draft, where m maximises expected tokens over the seconds of draft and
    step. If that is not better than the plain step by `margin`, nobody drafts.

    A row that is left out retries after `first_wait` rounds, then after twice as many, and so on up to `longest_wait`;
    each round among the chosen halves its wait again. Retries fall on multiples of the wait, so that rows which wait
    equally long share the cost of one draft. Memory fades with every round, drafted or not: the longer a row waited,
    the more its retry counts. A retry does not happen when drafting would not pay even if every token passed.

    The decision for a round uses only counts of earlier rounds, so it cannot leak a token of the block it is about.

    Args:
        rows (`int`): Rows of the call.
        gamma (`int`): Drafted tokens of a block.
        margin (`float`): Least gain in throughput for which drafting is worth it.
        decay (`float`): Weight that a round keeps after one more round, in 0..1.
        first_wait, longest_wait (`int`): Rounds without a draft before a retry; the second a power of two times the
            first.
    """

    def __init__(
        self,
        rows: int,
        gamma: int,
        *,
        margin: float = 0.02,
        decay: float = 0.9,
        first_wait: int = 8,
        longest_wait: int = 128,
    ) -> None:
        self.gamma = gamma
        self.margin = margin
        self.decay = decay
        self.first_wait = first_wait
        self.longest_wait = longest_wait
        self.rounds = 0  # decided
        self.skipped_rounds = 0  # in which no row drafted
        self.row_rounds = 0  # live rows, summed over rounds
        self.skipped_row_rounds = 0
        self.retries = 0  # row by row
        self._weight = np.ones(rows)  # [rows]
        self._accepted = np.full(rows, gamma / 2)  # [rows]
        self._sent = np.full(rows, gamma / 2)  # [rows]
        self._wait = np.full(rows, first_wait)  # [rows]
        self._since = np.full(rows, -1)  # [rows]; the round that left a row out, -1 while it drafts

    def decide(self, live: np.ndarray, cost: np.ndarray, draft: np.ndarray) -> np.ndarray:
        """
        Which rows draft in the coming round.

        Args:
            live (`np.ndarray` of shape `(rows,)`, bool): Rows that are not finished; there are R of them.
            cost (`np.ndarray` of shape `(R * gamma + 1,)`): Seconds of a target step over the R rows with k drafted
                tokens; without the draft.
            draft (`np.ndarray` of shape `(R + 1,)`): Seconds of a draft for m rows; 0 at m = 0.

        Returns:
            `np.ndarray` of shape `(rows,)`, bool.
        """
        chosen = np.zeros(len(live), dtype=bool)
        (index,) = np.nonzero(live)
        count = len(index)
        if not count:
            return chosen
        self.rounds += 1
        to_beat = count / cost[0] * (1 + self.margin)

        expected = self._accepted[index] / self._weight[index]
        order = index[np.argsort(-expected, kind="stable")]
        accepted = np.cumsum(self._accepted[order] / self._weight[order])  # [R], of the first m rows
        sent = np.cumsum(self._sent[order] / self._weight[order])
        step = np.interp(sent, np.arange(len(cost)), cost)
        throughput = (count + accepted) / (draft[1 : count + 1] + step)
        best = int(np.argmax(throughput))
        if throughput[best] > to_beat:
            chosen[order[: best + 1]] = True

        left_out = live & ~chosen
        self._since[left_out & (self._since < 0)] = self.rounds
        self._since[chosen] = -1
        self._wait[chosen] = np.maximum(self.first_wait, self._wait[chosen] // 2)
        due = left_out & (self.rounds >= self._since + self._wait) & (self.rounds % self._wait == 0)
        if due.any() and self._could_pay(int(chosen.sum() + due.sum()), count, cost, draft, to_beat):
            self._since[due] = self.rounds
            self._wait[due] = np.minimum(self.longest_wait, 2 * self._wait[due])
            self.retries += int(due.sum())
            chosen |= due

        for memory in (self._weight, self._accepted, self._sent):
            memory[index] *= self.decay
        self.row_rounds += count
        self.skipped_row_rounds += count - int(chosen.sum())
        self.skipped_rounds += not chosen.any()
        return chosen

    def record(self, drafted: np.ndarray, sent: np.ndarray, accepted: np.ndarray) -> None:
        """
        Counts a round after its tokens are committed.

        Args:
            drafted (`np.ndarray` of shape `(rows,)`, bool): What [`~DraftGate.decide`] returned for it.
            sent (`np.ndarray` of shape `(rows,)`): Drafted tokens that the target checked.
            accepted (`np.ndarray` of shape `(rows,)`): Those of them that passed.
        """
        self._weight[drafted] += 1
        self._accepted[drafted] += np.asarray(accepted)[drafted]
        self._sent[drafted] += np.asarray(sent)[drafted]

    def to_dict(self) -> dict[str, int]:
        """How often drafting was skipped, as plain numbers."""
        return {
            "rounds": self.rounds,
            "skipped_rounds": self.skipped_rounds,
            "row_rounds": self.row_rounds,
            "skipped_row_rounds": self.skipped_row_rounds,
            "retries": self.retries,
        }

    def _could_pay(self, drafting: int, count: int, cost: np.ndarray, draft: np.ndarray, to_beat: float) -> bool:
        """Whether some number of tokens would pay if all of them passed."""
        tokens = np.arange(drafting * self.gamma + 1)
        return bool(((count + tokens) / (draft[drafting] + cost[: len(tokens)])).max() > to_beat)


__all__ = ["DraftGate", "budget", "causal_lengths", "survival", "threshold_caps", "top_k_lengths"]
