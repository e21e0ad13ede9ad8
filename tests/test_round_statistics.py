"""Running figures against those of all data at once, and the grammar of their text."""

import json
import re

import pytest
import torch

from transformers_dspark import RoundRecord, RoundStatistics
from transformers_dspark.calibration import RunningCalibration, brier, expected_calibration_error, roc_auc
from transformers_dspark.telemetry import BlockCeiling


def test_running_calibration():
    rng = torch.Generator().manual_seed(0)
    probabilities = torch.rand(400, generator=rng, dtype=torch.float64)
    outcomes = (torch.rand(400, generator=rng, dtype=torch.float64) < probabilities**2).long()
    running = RunningCalibration()
    for probability, outcome in zip(probabilities.tolist(), outcomes.tolist(), strict=True):
        running.add(probability, bool(outcome))
    assert running.error == pytest.approx(expected_calibration_error(probabilities, outcomes))
    assert running.brier == pytest.approx(brier(probabilities, outcomes))
    assert running.auc == pytest.approx(roc_auc(probabilities, outcomes), abs=2e-3)
    assert RunningCalibration().to_dict() == {"count": 0, "error": None, "brier": None, "auc": None}


def figures():
    statistics = RoundStatistics()
    statistics(
        RoundRecord(
            round=1,
            mode="compact",
            rows=[0, 2, 3],
            drafted=[3, 2, 0],
            admitted=[2, 2, 0],
            sent=[2, 2, 0],
            accepted=[2, 0, 0],
            committed=[3, 1, 1],
            tokens=7,
            context=10.0,
            draft_seconds=1.0,
            verify_seconds=4.0,
            predicted_draft_seconds=1.0,
            predicted_verify_seconds=3.0,
            confidences=[[0.9, 0.5, 0.1], [0.25, 0.5], []],
            ceilings=[BlockCeiling(0, 1, 3.5, 4.0), BlockCeiling(2, 1, 1.0, 1.0)],
        )
    )
    return statistics


def test_figures():
    found = json.loads(json.dumps(figures().to_dict()))
    assert (found["rounds"], found["tokens"], found["skipped"]) == (1, 5, 1)
    assert found["acceptance_by_position"] == [1 / 2, 1.0]
    assert found["ceiling"] == [2.25, 2.5]
    assert found["utilisation"] == [2 / 2.5, 2 / 2.25]
    assert (found["draft_share"], found["step_cost_error"]) == (0.2, 0.25)
    assert [line["count"] for line in found["calibration"]] == [2, 2]
    assert found["calibration"][1]["brier"] == pytest.approx((0.55**2 + 0.125**2) / 2)


@pytest.mark.parametrize("statistics", [RoundStatistics(), figures()], ids=["empty", "full"])
def test_openmetrics(statistics):
    *lines, end, nothing = statistics.openmetrics().split("\n")
    assert (end, nothing) == ("# EOF", "")
    family, kind, seen = "", "", []
    for line in lines:
        if type_of := re.fullmatch(r"# TYPE ([a-z_]+) (counter|gauge)", line):
            family, kind = type_of.groups()
            assert family not in seen
            seen.append(family)
        elif line.startswith("#"):
            assert re.fullmatch(rf"# (UNIT {family} seconds|HELP {family} [A-Z][^\\\n]+\.)", line)
        else:
            name = family + "_total" * (kind == "counter")
            assert re.fullmatch(rf'{name}(\{{[a-z]+="[a-z0-9]+"\}})? [0-9.e-]+', line)
    assert "dspark_rounds" in seen
