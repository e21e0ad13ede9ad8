"""Confidences watched in traffic: quiet while they are right, a warning when not, and temperatures that are right."""

import logging

import pytest
import torch

from transformers_dspark import ConfidenceCalibration, OnlineCalibration, RoundRecord


def traffic(watch: OnlineCalibration, rounds: int, sharpness: float, seed: int = 0, cut: bool = False) -> None:
    """Rounds whose tokens pass with the chance sigmoid(logit * sharpness), where confidences say sigmoid(logit)."""
    rng = torch.Generator().manual_seed(seed)
    for number in range(rounds):
        rows = 8
        logits = torch.randn(rows, 3, generator=rng) * 1.5 + 0.5
        said = torch.sigmoid(logits / torch.tensor(watch.applied.temperatures))
        passed = torch.rand(rows, 3, generator=rng) < torch.sigmoid(logits * sharpness)
        admitted = [1 + (row + number) % 3 if cut else 3 for row in range(rows)]
        accepted = [int(row[:n].long().cumprod(0).sum()) for row, n in zip(passed, admitted, strict=True)]
        watch(
            RoundRecord(
                round=number, mode="static", rows=list(range(rows)), drafted=[3] * rows, admitted=admitted,
                sent=admitted, accepted=accepted, committed=[n + 1 for n in accepted], tokens=rows, context=1.0,
                draft_seconds=1.0, verify_seconds=1.0, confidences=said.tolist(),
            )
        )  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
def test_a_drift_is_told_once_and_a_refit_ends_it(cut, caplog):
    watch = OnlineCalibration(ConfidenceCalibration([1.0] * 3), blocks=1000)
    with caplog.at_level(logging.WARNING):
        traffic(watch, 400, 1.0, cut=cut)
        assert not watch.drifted
        assert not caplog.records
        traffic(watch, 1500 if cut else 500, 0.4, seed=1, cut=cut)
    assert watch.drifted
    assert len(caplog.records) == 1
    assert "refit()" in caplog.text
    found = watch.refit()
    assert all(1.7 < temperature < 3.6 for temperature in found.temperatures)  # 2.5, but for chance
    assert not watch.drifted
    traffic(watch, 300, 0.4, seed=2, cut=cut)
    assert not watch.drifted
    assert all(abs(gap) < 0.05 for gap in watch.gaps if gap is not None)


def test_running_sums_are_those_of_the_latest_blocks():
    watch = OnlineCalibration(ConfidenceCalibration([1.0] * 3), blocks=100, least=50)
    traffic(watch, 60, 1.0)
    for seen, gap in zip(watch.seen, watch.gaps, strict=True):
        assert len(seen) == 100
        assert gap == pytest.approx(sum(c - p for c, p in seen) / 100)


def test_a_position_with_few_outcomes_keeps_its_temperature():
    watch = OnlineCalibration(ConfidenceCalibration([1.0, 1.0, 3.0]), least=300)
    with pytest.raises(ValueError, match="a refit takes 300"):
        watch.refit()
    traffic(watch, 60, 0.4)
    found = watch.refit()
    assert found.temperatures[2] == 3.0
    assert found.temperatures[0] > 1.5


@pytest.mark.parametrize("options", [{"tolerance": 1.0}, {"least": 0}, {"blocks": 5}])
def test_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        OnlineCalibration(ConfidenceCalibration([1.0]), **options)
