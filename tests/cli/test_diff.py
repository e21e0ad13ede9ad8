"""`dspark diff` on a tiny pair: equal texts, and a planted fault that ends with exit code 1."""

import json

import pytest

from transformers_dspark import decoding, divergence
from transformers_dspark.cli import main


@pytest.fixture
def diff(pair):
    def run(*more):
        models = ["--target", f"{pair}/target", "--drafter", f"{pair}/drafter", "--device", "cpu"]
        words = ["--prompts", f"{pair}/prompts.jsonl", "--max-new-tokens", "9", "--json", f"{pair}/r.json"]
        return main(["diff", *words, *models, *more]), json.loads((pair / "r.json").read_text())

    return run


@pytest.mark.parametrize("rows", ["1", "4"])
def test_equal_texts(diff, rows, capsys):
    code, report = diff("--batch-size", rows)
    assert (code, report["verdict"], len(report["rows"])) == (0, "equal", 6)
    assert all(row["tokens"] == 9 and not row["divergences"] for row in report["rows"])
    assert "equal: 6 rows" in capsys.readouterr().out


def test_an_interruption_keeps_what_was_compared(diff, monkeypatch, capsys):
    sound, calls = divergence.check_greedy, []

    def once(*args):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return sound(*args)

    monkeypatch.setattr(divergence, "check_greedy", once)
    code, report = diff("--batch-size", "2")
    assert (code, report["verdict"], len(report["rows"])) == (130, "equal", 4)
    assert "4 of 6 rows are kept; still to do: the prompts from number 5 on" in capsys.readouterr().err


def test_a_defect(diff, monkeypatch):
    sound = decoding.accept_greedy

    def planted(choices, tokens, admitted):
        return sound(choices, tokens, admitted)._replace(bonus=choices[:, 0] ^ 1)

    monkeypatch.setattr(decoding, "accept_greedy", planted)
    code, report = diff("--batch-size", "4")
    assert (code, report["verdict"]) == (1, "defect")
    worst = report["rows"][0]["divergences"][0]
    assert worst["verdict"] == "defect"
    assert worst["deficit"] > worst["tolerance"]
