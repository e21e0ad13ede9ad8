"""`dspark generate`, `bench` and `why` on a tiny pair: the same texts with and without drafter; refusals."""

import json

import pytest

from transformers_dspark import StepCostTable
from transformers_dspark.cli import main
from transformers_dspark.step_costs import DraftCost, StepCost


def call(pair, command, *more):
    models = ["--target", f"{pair}/target", "--drafter", f"{pair}/drafter", "--device", "cpu"]
    return main([command, *more, *models, "--max-new-tokens", "12", "--json", f"{pair}/r.json"])


def result(pair):
    return json.loads((pair / "r.json").read_text())


def test_the_drafter_changes_no_text(pair, capsys):
    words = ("--prompts", f"{pair}/prompts.jsonl", "--rows", "4")
    assert call(pair, "generate", *words) == 0
    drafted = result(pair)["answers"]
    assert call(pair, "generate", *words, "--alone") == 0
    alone = result(pair)["answers"]
    assert [a["text"] for a in drafted] == [a["text"] for a in alone]
    assert len(drafted) == 6
    assert all(a["tokens"] == 12 and a["accepted_length"] >= 1 for a in drafted)
    assert drafted[5]["text"] in capsys.readouterr().out


def test_an_interrupted_generation_keeps_its_answers(pair, capsys, monkeypatch):
    from transformers_dspark.cli import generate

    sound, calls = generate._answer, []

    def once(*args):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return sound(*args)

    monkeypatch.setattr(generate, "_answer", once)
    assert call(pair, "generate", "--prompts", f"{pair}/prompts.jsonl", "--rows", "4") == 130
    shown = capsys.readouterr()
    assert len(result(pair)["answers"]) == 4
    assert [line[:3] for line in shown.out.splitlines() if line.startswith("[")] == ["[1]", "[2]", "[3]", "[4]"]
    assert "4 of 6 answers are kept; still to do: the prompts from number 5 on" in shown.err


def test_a_stream_and_a_seed(pair, capsys):
    assert call(pair, "generate", "t01 t02", "--stream") == 0
    text = result(pair)["answers"][0]["text"]
    assert capsys.readouterr().out.split() == text.split()
    sampled = []
    for _ in range(2):
        assert call(pair, "generate", "t01 t02", "--temperature", "1", "--top-k", "9", "--seed", "5") == 0
        sampled.append(result(pair)["answers"][0]["text"])
    assert sampled[0] == sampled[1] != text


@pytest.mark.parametrize(
    ("command", "words", "part"),
    [
        ("generate", [], "give prompts either as words or with --prompts"),
        ("generate", ["a", "b", "--stream"], "2 prompts are given"),
        ("generate", ["a", "--top-k", "3"], "choose nothing at temperature 0"),
        ("bench", ["{pair}/prompts.jsonl", "--modes", "compact"], "needs --costs FILE"),
        ("bench", ["{pair}/prompts.jsonl", "--rows", "7"], "holds 6 prompts"),
        ("why", ["{pair}/prompts.jsonl", "--rows", "7"], "more than the 6 prompts"),
    ],
)
def test_refusals(pair, capsys, command, words, part):
    assert call(pair, command, *(word.format(pair=pair) for word in words)) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_bench_with_costs_is_compact(pair):
    costs = StepCostTable((StepCost(1, 1, 8, 1e-3), StepCost(1, 8, 8, 2e-3)), (DraftCost(1, 1e-4),))
    (pair / "costs.json").write_text(json.dumps(costs.to_dict()))
    words = ("--rows", "1", "--repeats", "1", "--costs", f"{pair}/costs.json")
    assert call(pair, "bench", f"{pair}/prompts.jsonl", *words) == 0
    assert list(result(pair)["runs"][0]["modes"]) == ["compact"]


def test_bench_compares_and_keeps_what_was_finished(pair, capsys, monkeypatch):
    words = ("bench", f"{pair}/prompts.jsonl", "--rows", "1", "3", "--repeats", "1")
    assert call(pair, *words) == 0
    assert "…" not in capsys.readouterr().out  # nothing is cut at 80 columns
    runs = result(pair)["runs"]
    assert [run["rows"] for run in runs] == [1, 3]
    for run in runs:
        figures = run["modes"]["static"]
        assert figures["same_ids"]
        assert sum(figures["verify_length_counts"]) >= figures["rounds"]
        assert figures["speed_up"] == pytest.approx(figures["tokens_per_second"] / run["plain_tokens_per_second"])
        assert 0 < figures["overhead_share"] < 1

    from transformers_dspark.evaluation import batches

    compare = batches.compare

    def once(pair, prompts, *rest):
        if len(prompts) > 1:
            raise KeyboardInterrupt
        return compare(pair, prompts, *rest)

    monkeypatch.setattr(batches, "compare", once)
    assert call(pair, *words) == 130
    assert [run["rows"] for run in result(pair)["runs"]] == [1]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"1 of 2 measurements are kept; still to do: {pair}/prompts.jsonl --rows 3" in error


def test_why_names_a_limit_with_its_figure(pair, capsys):
    assert call(pair, "why", f"{pair}/prompts.jsonl", "--rows", "2", "--repeats", "1") == 0
    found = result(pair)
    assert found["limit"] in {"drafter acceptance", "verify cost", "draft cost", "host overhead"}
    assert len(found["sentences"]) == 3
    assert found["figures"]["draft_seconds"] > 0
    assert found["figures"]["plain_step_seconds"] > 0
    assert found["limit"] in capsys.readouterr().out
