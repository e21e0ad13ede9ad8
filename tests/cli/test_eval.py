"""`dspark eval` on a tiny pair: batches answer as single rows do, and a file's parts are told apart."""

import json
from array import array

import pytest
import torch

from transformers_dspark import DSparkDrafter
from transformers_dspark.cli import main
from transformers_dspark.evaluation.lengths import figures, markdown, thresholds
from transformers_dspark.evaluation.runs import Pair, converse, run
from transformers_dspark.telemetry import GenerationStats


def evaluate(folder, *more):
    words = ["--target", f"{folder}/target", "--drafter", f"{folder}/drafter", "--device", "cpu"]
    return main(["eval", *words, "--max-new-tokens", "12", *more])


def test_conversations_in_batches_are_those_one_by_one(pair):
    loaded = Pair.load(str(pair / "target"), str(pair / "drafter"), torch.device("cpu"))
    conversations = [["t01 t02", "t03"], ["t05"], ["t07 t08 t09", "t10", "t11"]]
    batches = list(converse(loaded, conversations, 2, 8, 0.0, seed=0))
    assert [len(batch.ids) for batch in batches] == [2, 1, 2, 1]
    answers = dict(
        zip(
            [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (2, 2)],
            [ids for batch in batches for ids in batch.ids],
            strict=True,
        )
    )
    for number, turns in enumerate(conversations):
        messages = []
        for turn, text in enumerate(turns):
            messages.append({"role": "user", "content": text})
            alone = run(loaded, loaded.prompt_ids(messages), 8, drafted=False).ids.tolist()
            assert answers[number, turn] == alone
            messages.append({"role": "assistant", "content": loaded.tokenizer.decode(alone)})


def test_a_report_by_domain_and_language(pair, capsys):
    lines = [{"turns": ["t01"], "language": "de"}, {"turns": ["t02", "t03"], "domain": "law", "language": "en"}]
    (pair / "own.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"turns": ["t04"]}])))
    (pair / "gsm8k.jsonl").write_text(json.dumps({"turns": ["t05"]}))
    (pair / "math500.jsonl").write_text(json.dumps({"turns": ["t06"]}))
    files = [str(pair / f"{name}.jsonl") for name in ("own", "gsm8k", "math500")]
    out = ["--json", f"{pair}/r.json", "--markdown", f"{pair}/r.md", "--pictures", f"{pair}/p"]
    assert evaluate(pair, *files, "--temperature", "0", "1", *out) == 0
    assert "own (de)" in capsys.readouterr().out
    report = json.loads((pair / "r.json").read_text())
    kinds = [(r["prompts"], r["domain"], r["language"], r["temperature"]) for r in report["results"]]
    assert kinds[:4] == [
        ("own", "other", "de", 0),
        ("own", "other", "de", 1),
        ("own", "law", "en", 0),
        ("own", "law", "en", 1),
    ]
    assert {domain for _, domain, _, _ in kinds[6:]} == {"math"}
    for record in report["results"]:
        assert record["survival_by_position"][0] == record["acceptance_by_position"][0]
        assert record["thresholds"][0]["accepted_length"] == pytest.approx(record["accepted_length"])
    tables = (pair / "r.md").read_text()
    assert (
        tables.splitlines()[0]
        == "| temperature | own (de) | own (en) | own | gsm8k | math500 | other, mean | math, mean |"
    )
    assert len(tables.splitlines()[2].split("|")) == 10
    names = {path.stem for path in (pair / "p").glob("*.png")}
    assert names == {"eval-acceptance", "eval-accepted-length", "eval-survival", "eval-thresholds"}


def test_thresholds_cut_blocks():
    stats = GenerationStats(
        confidences=[array("f", [0.9, 0.8, 0.3, 0.95, 0.2, 0.9])], verify_lengths=[[3, 3]], accepted_lengths=[[3, 2]]
    )
    whole, half, high = thresholds(stats, (0.0, 0.5, 0.85))
    assert (whole["verify_length"], whole["accepted_length"], whole["accepted_share"]) == (3, 2.5, 0.5)
    assert (half["verify_length"], half["accepted_length"], half["accepted_share"]) == (1.5, 2.5, 1.0)
    assert (high["verify_length"], high["accepted_length"], high["accepted_share"]) == (1, 2, 1.0)
    assert thresholds(GenerationStats(verify_lengths=[[3]], accepted_lengths=[[2]])) == []


def test_a_table_without_confidences_or_rounds():
    record = {"prompts": "a", "domain": "other", "language": None, "temperature": 0.0, **figures(GenerationStats())}
    facts = {"environment": {"device": "a machine"}, "dtype": "float32", "max_new_tokens": 4}
    assert "| a | 0 |" in markdown({"results": [record], **facts})


def test_a_drafter_without_confidences(pair):
    drafter = DSparkDrafter.from_pretrained(pair / "drafter")
    drafter.config.enable_confidence_head = drafter.config.confidence_head_with_markov = False
    DSparkDrafter(drafter.config).save_pretrained(pair / "drafter")
    assert evaluate(pair, f"{pair}/prompts.jsonl", "--json", f"{pair}/r.json") == 0
    assert json.loads((pair / "r.json").read_text())["results"][0]["thresholds"] == []
