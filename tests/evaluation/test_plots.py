"""Pictures: every file our commands write is recognised by its content, and the same file gives the same bytes."""

import json
from pathlib import Path

import pytest

from transformers_dspark.cli import main
from transformers_dspark.evaluation.plots import draw, pictures_of, read_result
from transformers_dspark.telemetry import RoundRecord


RESULTS = Path(__file__).parents[2] / "benchmarks/results/smollm2-135m-instruct"


def trace() -> list[dict]:
    two = {"mode": "compact", "rows": [0, 1], "drafted": [3, 3], "accepted": [1, 0], "committed": [2, 1]}
    times = {"context": 9.0, "draft_seconds": 0.01, "verify_seconds": 0.1, "predicted_verify_seconds": 0.09}
    return [
        RoundRecord(round=k, **two, **times, admitted=[k, 1], sent=[k, 1], tokens=k + 3).to_dict() for k in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("accepted_length.json", {"acceptance", "accepted_length"}),
        ("batched.json", {"throughput", "step_costs"}),
        ("training_log.jsonl", {"loss"}),
    ],
)
def test_committed_results_are_recognised_and_drawn(file, names, tmp_path):
    result = read_result(RESULTS / file)
    assert set(pictures_of(result)) == names
    first, second = (draw(result, tmp_path / place, "x") for place in "ab")
    assert [path.suffix for path in first] == [".png", ".svg"] * len(names)
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


def test_a_trace_of_rounds(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(map(json.dumps, trace())))
    assert set(pictures_of(read_result(path))) == {"budget", "verify_lengths", "step_time"}
    path.write_text(json.dumps(trace()[0]))  # a single round is one JSON value
    assert "budget" in pictures_of(read_result(path))
    assert main(["plot", str(path), "--out", str(tmp_path / "p"), "--json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())["pictures"][str(path)]
    assert len(found) == 6
    assert all(Path(name).stat().st_size > 1000 for name in found)


def test_a_reliability_diagram():
    bins = [[0, 0.0, 0.0], [4, 0.5, 0.25]]
    result = {"positions": [{"position": 1, "reliability_before": bins, "reliability_after": bins}]}
    assert set(pictures_of(result)) == {"reliability"}
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    pictures_of(result)["reliability"](axes)
    assert [line.get_xydata().tolist() for line in axes.lines[1:]] == [[[0.5, 0.25]]] * 2
    assert len({line.get_linestyle() for line in axes.lines[1:]}) == 2


def test_who_draws_results_of_the_gpu_benchmark(capsys):
    path = RESULTS.parent / "h200" / "gpu.json"
    assert main(["plot", str(path)]) == 2
    assert f"python -m benchmarks.gpu --plot {path}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "[1, 2]", "3", "not json"])
def test_nothing_to_draw(tmp_path, capsys, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["plot", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(RESULTS / "accepted_length.json"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "transformers-dspark[train]" in error
    assert error.count("\n") == 1
