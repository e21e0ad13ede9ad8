"""Bounds on what trimmed tokens would have done, by hand."""

import math

import pytest

from transformers_dspark.ceiling import CeilingEstimator
from transformers_dspark.telemetry import BlockCeiling


def logs(*probabilities):
    return [math.log(p) if p else -math.inf for p in probabilities]


def trimmed(draft_probs, tokens=(7, 8, 9)):
    """A block whose two admitted drafts 5 and 6 passed, at place 10 of the text of row 1."""
    estimator = CeilingEstimator()
    estimator.open(1, 4, 12, 3, tokens, logs(*draft_probs))
    return estimator


def test_resolved_over_two_rounds():
    estimator = trimmed((0.5, 0.5, 0.8))
    assert estimator.asks(1, 10, [5, 6, 7]) == [(2, 7)]
    assert estimator.settle(1, 10, [5, 6, 7], logs(0.25), False) == []
    assert estimator.asks(1, 13, [8, 2]) == [(0, 8), (1, 9)]
    (ceiling,) = estimator.settle(1, 13, [8, 2], logs(0.75, 0.2), True)
    assert (ceiling.row, ceiling.round) == (1, 4)
    # 3 + 0.5 + 0.5 * 1 + 0.5 * 0.25
    assert ceiling.lower == ceiling.upper == pytest.approx(4.125)
    assert estimator.asks(1, 15, [3]) == []


def test_a_disagreement_leaves_the_rest_open():
    (ceiling,) = trimmed((0.5, 0.5, 0.8)).settle(1, 10, [5, 6, 1], logs(0.25), False)
    assert (ceiling.lower, ceiling.upper) == pytest.approx((3.5, 4.5))


def test_nothing_is_open_behind_a_zero():
    assert trimmed((1, 1, 1)).settle(1, 10, [5, 6, 1], logs(0), False) == [BlockCeiling(1, 4, 3.0, 3.0)]


def test_the_end_of_a_text_settles():
    (ceiling,) = trimmed((1, 1, 1)).settle(1, 10, [5, 6, 7], logs(1), True)
    assert (ceiling.lower, ceiling.upper) == (4.0, 6.0)
    (ceiling,) = trimmed((1, 1, 1)).settle(1, 10, [5], [], True)  # a criterion stopped within the admitted part
    assert (ceiling.lower, ceiling.upper) == (3.0, 6.0)


def test_blocks_overlap():
    estimator = trimmed((1, 1, 1))
    assert estimator.settle(1, 10, [5, 6, 7], logs(1), False) == []
    estimator.open(1, 5, 13, 1, [8], logs(1))
    assert estimator.asks(1, 13, [8]) == [(0, 8), (0, 8)]
    assert estimator.settle(1, 13, [8], logs(1, 1), False) == [BlockCeiling(1, 5, 2.0, 2.0)]
