"""The verdict on speed: each limit from the figures that show it."""

import dataclasses

import pytest

from transformers_dspark.evaluation.verdict import SpeedFigures, gains, judge


BALANCED = SpeedFigures(
    rows=4,
    plain_tokens_per_second=40.0,
    drafted_tokens_per_second=120.0,
    plain_step_seconds=0.1,
    draft_seconds=0.001,
    verify_seconds=0.101,
    host_seconds=0.001,
    verify_length=3.0,
    accepted_length=3.95,
    scheduled=False,
)


@pytest.mark.parametrize(
    ("change", "limit", "figure", "option"),
    [
        ({"accepted_length": 1.5}, "drafter acceptance", "0.50 pass", "dspark train --from"),
        ({"verify_seconds": 0.3}, "verify cost", "300.0 ms, a plain step 100.0 ms", "step_cost_table=FILE"),
        ({"verify_seconds": 0.3, "scheduled": True}, "verify cost", "300.0 ms", "max_verify_tokens=4"),
        ({"draft_seconds": 0.1}, "draft cost", "50% of a round", "--num-layers"),
        ({"host_seconds": 0.1}, "host overhead", "50% of a round", "--rows"),
        ({"memory_share": 0.95}, "memory", "95% of the device's memory", "fewer rows"),
        ({"memory_share": 0.95, "draft_seconds": 0.1}, "memory", "95%", "fewer rows"),
        ({"memory_share": 0.5}, "nothing", "twentieth", "more rows"),
        ({}, "nothing", "twentieth", "more rows"),
    ],
)
def test_each_verdict(change, limit, figure, option):
    verdict = judge(dataclasses.replace(BALANCED, **change))
    assert verdict.limit == limit
    first, second, third = verdict.sentences
    assert "3.00x" in first
    assert limit in second.lower()
    assert figure in second
    assert option in third


def test_gains_are_what_the_round_would_save():
    figures = dataclasses.replace(BALANCED, draft_seconds=0.1, verify_seconds=0.25, host_seconds=0.05)
    found = gains(figures)
    assert found["draft cost"] == pytest.approx(0.4 / 0.3)
    assert found["verify cost"] == pytest.approx(0.4 / 0.25)
    assert found["host overhead"] == pytest.approx(0.4 / 0.35)
    assert found["drafter acceptance"] == pytest.approx(4 / 3.95)
    # a step over a window that measures quicker than a plain one is no limit, and no gain below 1
    quick = dataclasses.replace(BALANCED, verify_seconds=0.05, verify_length=1.0)
    assert gains(quick)["verify cost"] == gains(quick)["drafter acceptance"] == 1
