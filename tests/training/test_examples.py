"""The example from zero, and the benchmark of training, at tiny sizes."""

import importlib.util
import json
from pathlib import Path

import pytest

from transformers_dspark import DSparkDrafter


ROOT = Path(__file__).parents[2]


def script(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_from_zero(tmp_path, capsys):
    example = script("examples/train_your_own.py")
    assert example.main(["--tiny", "--device", "cpu", "--out", str(tmp_path / "made")]) == 0
    said = capsys.readouterr().out
    assert "Estimated memory" in said
    drafter = DSparkDrafter.from_pretrained(tmp_path / "made" / "drafter")
    assert len(drafter.config.confidence_temperatures) == 4
    assert json.loads((tmp_path / "made" / "eval.json").read_text())["results"]
    exported = DSparkDrafter.from_pretrained(tmp_path / "made" / "exported", sample_from_anchor=True)
    assert exported.config.num_hidden_layers == 1
    assert example.main(["--tiny", "--device", "cpu", "--out", str(tmp_path / "made")]) == 0  # nothing is done twice
    assert "$ dspark" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.main(["--out", str(tmp_path)])


def test_benchmark(tmp_path):
    benchmark = script("benchmarks/training.py")
    assert benchmark.main(["--tiny", "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["tokens_per_second"] > 0
    assert 0 < result["utilisation"] < 1
    assert result["processes"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard-target"]])
def test_benchmark_of_processes(tmp_path, more):
    benchmark = script("benchmarks/training.py")
    assert benchmark.main(["--tiny", "--processes", "1", "2", *more, "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run["processes"] for run in result["runs"].values()] == [1, 2]
    assert len(result["runs"]["1"]["losses"]) == 5
    assert result["largest_loss_difference"] < 1e-4
    assert result["speed_up"] > 0
