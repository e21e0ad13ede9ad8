"""Temperatures: where they are read from, what they change, and that a fit finds those that were put in."""

import json
import math

import pytest
import torch

from transformers_dspark import ConfidenceCalibration, DSparkConfig
from transformers_dspark.calibration import brier, expected_calibration_error, roc_auc


def test_apply_divides_logits() -> None:
    calibration = ConfidenceCalibration([0.5, 1.0, 2.0])
    logits = torch.tensor([[1.0, 1.0, 1.0], [-2.0, 0.0, 4.0]])
    expected = torch.sigmoid(torch.tensor([[2.0, 1.0, 0.5], [-4.0, 0.0, 2.0]]))
    torch.testing.assert_close(calibration.apply(logits), expected)
    torch.testing.assert_close(calibration.apply(logits[:, :2]), expected[:, :2])  # a narrower block
    with pytest.raises(ValueError, match="4 confidence logits in a row, but 3 temperatures"):
        calibration.apply(torch.zeros(1, 4))


@pytest.mark.parametrize(
    "temperatures", [[], [0.0], [1.0, -1.0], [math.inf], [math.nan], [True], ["1"], "12", None, 3]
)
def test_temperatures_that_cannot_be(temperatures, tmp_path) -> None:
    with pytest.raises(ValueError, match="must be finite numbers above 0"):
        ConfidenceCalibration(temperatures)
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"temperatures": temperatures}))
    with pytest.raises(ValueError, match=r"t\.json: no usable temperatures"):
        ConfidenceCalibration.load(file)


def test_files(tmp_path) -> None:
    file = tmp_path / "t.json"
    calibration = ConfidenceCalibration((0.5, 2.0), (0.1, 0.2), (0.01, 0.02), 100)
    calibration.save(file)
    assert list(ConfidenceCalibration.load(file).temperatures) == [0.5, 2.0]
    assert ConfidenceCalibration.load(file).samples == 100
    file.write_text('{"temperatures": [1.5, 0.75], "dataset": "x", "num_samples": 7, "ece_before": [0.1, 0.1]}')
    loaded = ConfidenceCalibration.load(file)  # SGLang's form
    assert (loaded.temperatures, loaded.samples, loaded.error_before) == ([1.5, 0.75], 7, [0.1, 0.1])
    for text in ("[1, 2]", "{", "{}"):
        file.write_text(text)
        with pytest.raises(ValueError, match="no usable temperatures"):
            ConfidenceCalibration.load(file)


def test_a_drafters_configuration_holds_them(tmp_path) -> None:
    config = DSparkConfig(block_size=3, enable_confidence_head=True)
    assert list(ConfidenceCalibration.of(config).temperatures) == [1.0, 1.0, 1.0]
    ConfidenceCalibration((0.5, 1.0, 2.0)).store_in(config)
    config.save_pretrained(tmp_path)
    assert ConfidenceCalibration.load(tmp_path / "config.json") == ConfidenceCalibration([0.5, 1.0, 2.0])
    assert ConfidenceCalibration.of(DSparkConfig.from_pretrained(tmp_path)).temperatures == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="2 temperatures do not fit a drafter of 3 tokens"):
        ConfidenceCalibration((0.5, 1.0)).store_in(config)
    with pytest.raises(ValueError, match="without a confidence head"):
        ConfidenceCalibration((0.5, 1.0, 2.0)).store_in(DSparkConfig(block_size=3))


def blocks(temperatures: list[float], count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a head that is too sure or too shy by known factors, and what was accepted."""
    noise = torch.Generator().manual_seed(0)
    true = torch.randn(count, len(temperatures), generator=noise) * 1.5 + 1.0
    accepted = torch.rand(true.shape, generator=noise) < torch.sigmoid(true)
    return true * torch.tensor(temperatures), accepted.long()


def test_a_fit_finds_the_temperatures_that_were_put_in() -> None:
    true = [2.0, 0.5, 1.5, 1.0]
    logits, accepted = blocks(true)
    calibration = ConfidenceCalibration.fit(logits, accepted)
    assert calibration.samples == len(logits)
    for found, wanted in zip(calibration.temperatures, true, strict=True):
        assert found == pytest.approx(wanted, rel=0.2)
    assert max(calibration.error_after) < 0.015 < 0.05 < max(calibration.error_before)
    for k in range(4):  # the order at a position stays
        before, after = logits[:, k], calibration.apply(logits)[:, k]
        assert roc_auc(after, accepted[:, k]) == pytest.approx(roc_auc(before, accepted[:, k]))


def test_a_fit_does_not_read_behind_a_failure() -> None:
    logits, accepted = blocks([2.0, 0.5, 1.5], count=2000)
    alive = accepted.cumprod(dim=1)
    assert ConfidenceCalibration.fit(logits, accepted) == ConfidenceCalibration.fit(logits, alive)
    perfect = ConfidenceCalibration.fit(torch.full((8, 2), 40.0), torch.ones(8, 2))
    assert perfect.temperatures == (1.0, 1.0)  # every temperature is as good: the one that changes nothing


def test_temperatures_of_few_outcomes_are_uncertain(tmp_path) -> None:
    accepted = torch.zeros(150, 3)
    accepted[:120, 0] = accepted[:40, 1] = 1
    found = ConfidenceCalibration.fit(torch.zeros(150, 3), accepted)
    assert found.reached == (150, 120, 40)
    assert found.uncertain == [3]
    found.save(tmp_path / "t.json")
    assert ConfidenceCalibration.load(tmp_path / "t.json").uncertain == [3]
    assert not ConfidenceCalibration((1.0,)).uncertain  # nothing is known


@pytest.mark.parametrize(
    ("logits", "accepted"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 2)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.zeros(4), torch.zeros(4)),
        (torch.tensor([[0.0, math.nan]]), torch.ones(1, 2)),
    ],
)
def test_what_a_fit_refuses(logits, accepted) -> None:
    with pytest.raises(ValueError, match="confidence_logits"):
        ConfidenceCalibration.fit(logits, accepted)


def test_figures_by_hand() -> None:
    probabilities, outcomes = torch.tensor([0.1, 0.1, 0.9, 1.0]), torch.tensor([0, 1, 1, 1])
    # two bins: |0.2 - 1| and |1.9 - 2|, over four
    assert expected_calibration_error(probabilities, outcomes, bins=2) == pytest.approx((0.8 + 0.1) / 4)
    assert brier(probabilities, outcomes) == pytest.approx((0.01 + 0.81 + 0.01) / 4)
    assert roc_auc(probabilities, outcomes) == pytest.approx((0.5 + 1 + 1) / 3)
    assert math.isnan(roc_auc(probabilities, torch.ones(4)))
    scores, labels = torch.randint(5, (40,)).double(), torch.arange(40) % 3 == 0
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert roc_auc(scores, labels) == pytest.approx(float(sum(pairs) / len(pairs)))
