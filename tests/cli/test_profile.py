"""`dspark profile` on a small target: the table it writes, what it says, and what it refuses."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_dspark import DSparkConfig, DSparkDrafter, StepCostTable, cli
from transformers_dspark.round_size import tiers


SMALL = ["--rows", "2", "1", "--tokens", "1", "3", "--context", "5", "--samples", "2", "--device", "cpu"]


SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small-target")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2, max_position_embeddings=64)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small-drafter")
    DSparkDrafter(DSparkConfig(**SHAPE, num_hidden_layers=1, block_size=3, target_layer_ids=[0])).save_pretrained(
        folder
    )
    return str(folder)


def test_a_table_of_steps_and_drafts(target, drafter, tmp_path, capsys) -> None:
    out, result = tmp_path / "costs.json", tmp_path / "result.json"
    words = ["profile", "--target", target, "--drafter", drafter, "--out", str(out), "--json", str(result), *SMALL]
    assert cli.main(words) == 0
    table = StepCostTable.load(out)
    assert sorted((cost.rows, cost.tokens) for cost in table.steps) == [(1, 1), (1, 3), (2, 2), (2, 6)]
    assert sorted(cost.rows for cost in table.drafts) == [1, 2]
    table.check_target(LlamaForCausalLM.from_pretrained(target))
    assert table.measured["command"].startswith("dspark profile")
    assert json.loads(result.read_text()) == json.loads(out.read_text())
    shown = capsys.readouterr().out
    assert "context 5" in shown
    assert "draft" in shown


def test_every_total_of_captured_rounds(target, drafter, tmp_path, capsys) -> None:
    out, words = tmp_path / "costs.json", ["profile", "--target", target, *SMALL, "--tiers"]
    assert cli.main([*words, "--drafter", drafter, "--out", str(out)]) == 0
    totals = [(cost.rows, cost.tokens) for cost in StepCostTable.load(out).steps]
    block = DSparkDrafter.from_pretrained(drafter).config.num_draft_tokens
    assert totals == [(rows, total) for rows in (1, 2) for total in tiers(rows, block)]
    assert "3 a row" in capsys.readouterr().out
    assert cli.main([*words, "--out", str(out)]) == 2
    assert "give --drafter" in capsys.readouterr().err


def test_a_target_alone(target, tmp_path, capsys) -> None:
    out = tmp_path / "costs.json"
    assert cli.main(["profile", "--target", target, "--out", str(out), *SMALL]) == 0
    assert StepCostTable.load(out).drafts == ()
    assert "draft" not in capsys.readouterr().out


def test_an_unquiet_machine_is_named(target, tmp_path, capsys, monkeypatch) -> None:
    import time

    now, calls = iter(range(10**6)), iter(range(10**6))
    # every other step takes three times as long
    monkeypatch.setattr(time, "perf_counter", lambda: next(now) + (2.0 * (next(calls) % 4 == 3)))
    assert cli.main(["profile", "--target", target, "--out", str(tmp_path / "costs.json"), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "? 4 of 4 kinds varied" in shown
    assert len(StepCostTable.load(tmp_path / "costs.json").unstable) == 4


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--rows", "0"], ["--rows", "'0' is not possible"]),
        (["--tokens", "2", "4"], ["--tokens 2 4 lacks the plain step"]),
        (["--context", "200"], ["context=200", "64 positions"]),
        (["--out", "/no/such/folder/costs.json"], ["--out", "/no/such/folder"]),
        (["--target", "/no/such/target"], ["/no/such/target"]),
        (["--dtype", "float8"], ["--dtype", "float8"]),
    ],
)
def test_what_is_refused_in_one_line(target, tmp_path, capsys, options, parts) -> None:
    words = ["profile", "--target", target, "--out", str(tmp_path / "costs.json"), *SMALL, *options]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error
    assert not (tmp_path / "costs.json").exists()
