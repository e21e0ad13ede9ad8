"""Both schedulers against exhaustive search, what may not move a cut, and the gate that decides who drafts."""

from itertools import product

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transformers_dspark.scheduling import (
    DraftGate,
    budget,
    causal_lengths,
    survival,
    threshold_caps,
    top_k_lengths,
)


CASES = 2000


def random_case(seed: int):
    """Survivals with ties, a jagged cost and caps: nothing that a real table would be too tidy for."""
    rng = np.random.default_rng(seed)
    rows, gamma = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    confidence = rng.random((rows, gamma))
    if rng.random() < 0.5:
        confidence = confidence.round(1)  # many equals, zeros and ones
    cost = np.cumsum(rng.random(rows * gamma + 1) * rng.choice([0.01, 1.0], rows * gamma + 1)) + 0.05
    if rng.random() < 0.3:
        cost = np.ceil(cost * 2) / 2  # a staircase
    if rng.random() < 0.2:
        cost = rng.random(rows * gamma + 1) + 0.1  # even falling
    caps = rng.integers(0, gamma + 1, rows) if rng.random() < 0.5 else np.full(rows, gamma)
    others = int(rng.integers(0, 3))  # rows that take part in the step without a draft
    return survival(torch.tensor(confidence)), cost, torch.tensor(caps), rows + others


def ordered(alive: torch.Tensor, caps: torch.Tensor) -> list[tuple[float, int, int]]:
    """Every admissible token as (survival, position, row), best first."""
    rows, gamma = alive.shape
    tokens = [(float(alive[r, j]), j, r) for r in range(rows) for j in range(gamma) if j < caps[r]]
    return sorted(tokens, key=lambda token: (-token[0], token[1], token[2]))


def algorithm_1(alive: torch.Tensor, cost: np.ndarray, caps: torch.Tensor, rows: int) -> list[int]:
    """Step by step as the paper has it."""
    lengths = [0] * alive.shape[0]
    committed, best = float(rows), rows / cost[0]
    for admitted, (value, _, row) in enumerate(ordered(alive, caps), start=1):
        committed += value
        if not committed / cost[admitted] > best:
            break
        best = committed / cost[admitted]
        lengths[row] += 1
    return lengths


def throughput(lengths: tuple[int, ...], alive: torch.Tensor, cost: np.ndarray, rows: int) -> float:
    """Of any choice of lengths, not only of those that follow the order of survival."""
    committed = rows + sum(float(alive[r, :n].sum()) for r, n in enumerate(lengths))
    return committed / cost[sum(lengths)]


def exhaustive(alive: torch.Tensor, cost: np.ndarray, caps: torch.Tensor, rows: int) -> float:
    gains = np.pad(alive.numpy(), ((0, 0), (1, 0))).cumsum(axis=1).tolist()
    choices = product(*(range(int(cap) + 1) for cap in caps))
    return max((rows + sum(map(list.__getitem__, gains, lengths))) / cost[sum(lengths)] for lengths in choices)


def rises_and_falls(alive: torch.Tensor, cost: np.ndarray, caps: torch.Tensor, rows: int) -> bool:
    gains = np.cumsum([0.0] + [value for value, _, _ in ordered(alive, caps)])
    curve = (rows + gains) / cost[: len(gains)]
    top = int(curve.argmax())
    return bool((np.diff(curve[: top + 1]) > 0).all() and (np.diff(curve[top:]) <= 0).all())


def test_both_schedulers_against_every_choice() -> None:
    single_peaks = 0
    for seed in range(CASES):
        alive, cost, caps, rows = random_case(seed)
        causal = causal_lengths(alive, cost, caps, rows)
        assert causal.dtype == torch.int64
        assert causal.tolist() == algorithm_1(alive, cost, caps, rows), seed
        best = exhaustive(alive, cost, caps, rows)
        if rises_and_falls(alive, cost, caps, rows):
            single_peaks += 1
            assert throughput(tuple(causal.tolist()), alive, cost, rows) == pytest.approx(best), seed
        lagged = top_k_lengths(alive, budget(alive, cost, caps, rows), caps)
        assert throughput(tuple(lagged.tolist()), alive, cost, rows) == pytest.approx(best), seed
    assert CASES / 4 < single_peaks < CASES  # the sweep holds both kinds


def test_top_k_takes_the_first_k_in_order() -> None:
    for seed in range(200):
        alive, _, caps, _ = random_case(seed)
        tokens = ordered(alive, caps)
        for k in range(alive.numel() + 2):
            expected = [sum(row == r for _, _, row in tokens[:k]) for r in range(alive.shape[0])]
            assert top_k_lengths(alive, k, caps).tolist() == expected
            assert top_k_lengths(alive, torch.tensor(k), caps).tolist() == expected


def test_ties_go_to_the_smaller_position_then_to_the_smaller_row() -> None:
    alive = torch.tensor([[0.5, 0.5], [0.8, 0.5], [0.5, 0.5]])
    assert [top_k_lengths(alive, k).tolist() for k in range(1, 6)] == [
        [0, 1, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
    ]
    flat = np.ones(7)
    assert budget(torch.zeros(3, 2), flat) == 0  # of equal budgets the smallest
    assert causal_lengths(torch.zeros(3, 2), flat).tolist() == [0, 0, 0]  # what does not raise throughput is not taken


def test_what_lies_behind_the_cut_does_not_move_it() -> None:
    """A confidence behind the cut depends on tokens there: had it a say, the output would not be the target's."""
    rng = np.random.default_rng(7)
    moved = 0
    for seed in range(300):
        alive, cost, caps, rows = random_case(seed)
        confidence = torch.tensor(rng.random(alive.shape))
        lengths = causal_lengths(survival(confidence), cost, caps, rows)
        for row in range(alive.shape[0]):
            for position in range(int(lengths[row]) + 1, alive.shape[1]):
                for value in (0.0, 1.0):
                    changed = confidence.clone()
                    changed[row, position] = value
                    assert torch.equal(causal_lengths(survival(changed), cost, caps, rows), lengths)
                    moved += 1
    assert moved > 500


@pytest.mark.parametrize("second", [0.0, 0.3, 0.9, 1.0])
def test_the_appendix_example(second: float) -> None:
    """Steps per second 1, 0.5 and 0.45 at 1, 2 and 3 tokens, and a first token of confidence 0.8."""
    cost = 1 / np.array([1.0, 0.5, 0.45])
    alive = survival(torch.tensor([[0.8, second]]))
    assert causal_lengths(alive, cost).tolist() == [0]
    # A search over everything lets the second confidence, hence the first token, decide about the first token.
    assert budget(alive, cost) == (2 if second >= 0.9 else 0)


def test_the_budget_comes_from_elsewhere() -> None:
    """K is fixed by older confidences, so what the current block says only shares it out."""
    old, cost = survival(torch.full((2, 3), 0.9)), np.linspace(1.0, 1.5, 7)
    k = budget(old, cost)
    assert k == 6
    for current in (torch.full((2, 3), 0.01), torch.tensor([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]])):
        assert top_k_lengths(survival(current), k - 2).sum() == 4


def test_unknown_confidences_count_as_one() -> None:
    unknown = float("nan")
    alive = survival(torch.tensor([[unknown, unknown], [0.5, unknown]]))
    assert alive.tolist() == [[1.0, 1.0], [0.5, 0.5]]
    assert survival(torch.tensor([[0.5, 1.5, -1.0, 0.5]])).tolist() == [[0.5, 0.5, 0.0, 0.0]]  # 0..1, and falling


def test_threshold_cuts_before_the_first_low_confidence() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.3, 0.9, 0.9], [0.9, float("nan"), 0.5]])
    assert threshold_caps(confidence, 0.5).tolist() == [1, 0, 3]
    assert threshold_caps(confidence, 0.0).tolist() == [3, 3, 3]


def test_nothing_waits_for_the_device() -> None:
    """On tensors without data, the attempt to read a value on the host raises."""
    with FakeTensorMode():
        confidence, caps, cost = torch.rand(3, 4), torch.full((3,), 2), torch.ones(13)
        alive = survival(confidence)
        for lengths in (
            threshold_caps(confidence, 0.5),
            causal_lengths(alive, cost, caps),
            top_k_lengths(alive, budget(alive, cost, caps), caps),
        ):
            assert lengths.shape == (3,)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            int(lengths[0])


def test_a_short_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="has 6 entries, but up to 6 tokens"):
        causal_lengths(torch.ones(2, 3), np.ones(6))


COST = np.array([1.0, 1.1, 1.2, 1.3])  # one row, three drafted tokens
DRAFT = np.array([0.0, 0.2])


def rounds_of(gate: DraftGate, accepted: int, rounds: int, live=None, cost=COST, draft=DRAFT) -> list[list[bool]]:
    """Decisions over rounds in which every drafting row sends three tokens and has `accepted` of them accepted."""
    live = np.ones(1, dtype=bool) if live is None else live
    decisions = []
    for _ in range(rounds):
        drafted = gate.decide(live, cost, draft)
        gate.record(drafted, np.where(drafted, 3, 0), np.where(drafted, accepted, 0))
        decisions.append(drafted.tolist())
    return decisions


def test_a_row_that_accepts_nothing_stops_drafting_and_retries_less_and_less_often() -> None:
    gate = DraftGate(1, 3)
    drafted = [i for i, (row,) in enumerate(rounds_of(gate, accepted=0, rounds=300), start=1) if row]
    assert drafted == [1, 2, 16, 32, 64, 128, 256]  # from the third on multiples of waits of 8, 16, 32, 64 and 128
    assert gate.to_dict() == {
        "rounds": 300,
        "skipped_rounds": 293,
        "row_rounds": 300,
        "skipped_row_rounds": 293,
        "retries": 5,
    }


def test_a_row_that_accepts_keeps_drafting_and_one_that_recovers_returns() -> None:
    gate = DraftGate(1, 3)
    assert all(row for (row,) in rounds_of(gate, accepted=3, rounds=50))
    assert not all(row for (row,) in rounds_of(gate, accepted=0, rounds=30))
    assert all(row for (row,) in rounds_of(gate, accepted=3, rounds=60)[-20:])


def test_drafting_that_could_never_pay_is_not_even_tried() -> None:
    dear = np.array([0.0, 4.0])  # more than three accepted tokens save
    gate = DraftGate(1, 3)
    assert not any(row for (row,) in rounds_of(gate, accepted=3, rounds=100, draft=dear))
    assert gate.retries == 0


def test_rows_are_judged_one_by_one() -> None:
    """The drafts of one row pay, those of the other do not; a finished row takes no part."""
    cost, draft = np.linspace(1.0, 1.3, 7), np.array([0.0, 0.1, 0.4])
    gate, live = DraftGate(2, 3), np.ones(2, dtype=bool)
    for _ in range(40):
        drafted = gate.decide(live, cost, draft)
        gate.record(drafted, np.where(drafted, 3, 0), np.array([3, 0]))
    assert drafted.tolist() == [True, False]
    assert gate.skipped_rounds == 0 < gate.skipped_row_rounds
    live[0] = False
    assert not gate.decide(live, cost[:4], draft[:2])[0]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_gate_costs_little_where_drafting_does_not_pay_and_leaves_it_alone_where_it_does(rows, acceptance) -> None:
    """Simulated: 256 steps' worth of tokens, costs of a small target on two cores, windows of three tokens."""
    rng, gamma = np.random.default_rng(0), 3
    cost = np.linspace(1.0, 2.0, rows * gamma + 1)  # of a plain step
    draft = np.linspace(0.1, 0.3, rows + 1)
    draft[0] = 0.0
    gate, live = DraftGate(rows, gamma), np.ones(rows, dtype=bool)
    seconds = {"gated": 0.0, "always": 0.0}
    tokens = {"gated": 0.0, "always": 0.0}
    while tokens["gated"] < 256:
        passed = np.cumprod(rng.random((rows, gamma)) < acceptance, axis=1).sum(axis=1)
        drafted = gate.decide(live, cost, draft)
        gate.record(drafted, np.where(drafted, gamma, 0), np.where(drafted, passed, 0))
        for name, mask in (("gated", drafted), ("always", live)):
            seconds[name] += draft[mask.sum()] + cost[mask.sum() * gamma]
            tokens[name] += 1 + (passed * mask).mean()
    speed = {name: tokens[name] / seconds[name] for name in seconds}
    assert speed["gated"] > 0.96  # of plain decoding, which commits one token a second here
    assert speed["gated"] > 0.93 * speed["always"]
