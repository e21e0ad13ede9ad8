"""`dspark calibrate` on a tiny pair: blocks are labelled as decoding judged them, and temperatures are stored."""

import json
from array import array

import pytest
import torch

from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.calibration import FEW
from transformers_dspark.cli import main
from transformers_dspark.evaluation.confidences import calibration_figures, labelled_confidences
from transformers_dspark.telemetry import GenerationStats


def calibrate(folder, *more):
    words = ["--target", f"{folder}/target", "--drafter", f"{folder}/drafter", "--device", "cpu", "--rows", "2"]
    return main(["calibrate", f"{folder}/prompts.jsonl", *words, "--max-new-tokens", "24", *more])


def test_temperatures_are_found_and_stored(pair, capsys):
    assert calibrate(pair, "--out", f"{pair}/t.json", "--store", "--json", f"{pair}/r.json") == 0
    result = json.loads((pair / "r.json").read_text())
    stored = DSparkConfig.from_pretrained(pair / "drafter").confidence_temperatures
    assert stored == result["temperatures"] == json.loads((pair / "t.json").read_text())["temperatures"]
    assert result["fitted_on_blocks"] > 20
    assert result["judged_on_blocks"] > 20
    after, before = ([line[f"error_{when}"] for line in result["positions"]] for when in ("after", "before"))
    assert result["means"]["error_after"] == pytest.approx(sum(after) / len(after))
    assert result["means_by_temperature"].keys() == {"0", "1"}
    assert sum(after) < sum(before)  # an untrained head is sure of nothing, and its drafts fail
    printed = capsys.readouterr().out
    assert "judged on" in printed
    assert "…" not in printed  # nothing is cut at 80 columns
    reached = result["fitted_on_blocks_by_position"]
    assert reached[0] == result["fitted_on_blocks"] < FEW
    assert reached == sorted(reached, reverse=True)
    words = f"Fewer than {FEW} blocks say something about drafted tokens from number 1 on ({reached[-1]} about"
    assert words in " ".join(printed.split())
    # the temperatures that a drafter holds are undone before the next fit, so it finds the same ones
    assert calibrate(pair, "--json", f"{pair}/again.json") == 0
    assert json.loads((pair / "again.json").read_text())["temperatures"] == pytest.approx(stored)


def test_labels():
    stats = GenerationStats(
        confidences=[array("f", [0.5, 0.25, 0.9, 0.8, 0.7, 0.7]), array("f", [0.6, 0.1, 0.2, 0.3, 0.3])],
        verify_lengths=[[2, 2, 2], [1, 2, 2]],
        accepted_lengths=[[1, 3, 2], [1, 2, 1]],
    )
    logits, passed = labelled_confidences(stats, (1.0, 2.0))
    confidences = torch.tensor([[0.5, 0.25], [0.9, 0.8], [0.1, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(torch.sigmoid(logits / torch.tensor([1.0, 2.0])), confidences, rtol=1e-6, atol=0)
    assert passed.tolist() == [[0, 0], [1, 1], [1, 0]]  # neither last rounds nor blocks that were cut
    first = calibration_figures(logits, passed, (1.0, 2.0), (1.0, 2.0))[0]
    assert first["survived"] == pytest.approx(2 / 3)
    assert first["brier_before"] == pytest.approx((0.5**2 + 0.1**2 + 0.9**2) / 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "prompts.jsonl").write_text('{"turns": ["t01"]}'), "two or more"),
        (lambda folder: headless(folder / "drafter"), "no confidence head"),
    ],
)
def test_what_cannot_be_calibrated(pair, capsys, change, problem):
    change(pair)
    assert calibrate(pair) == 2
    assert problem in capsys.readouterr().err


def headless(folder):
    config = DSparkConfig.from_pretrained(folder)
    config.enable_confidence_head = config.confidence_head_with_markov = False
    DSparkDrafter(config).save_pretrained(folder)
