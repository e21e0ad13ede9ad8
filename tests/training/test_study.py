"""The study at a tiny size: arms that step together, results that stay, and pictures of them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.tokenizer import word_tokenizer
from transformers_dspark import DSparkDrafter
from transformers_dspark.training.answers import Answer, AnswerWriter


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("study", Path(__file__).parents[2] / "benchmarks" / "study.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["study"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["study"]


def test_arms_are_trained_alike_and_measured_once(study, walker, answers, tmp_path, capsys):
    walker.save_pretrained(tmp_path / "target")
    word_tokenizer(64).save_pretrained(tmp_path / "target")
    for name in ("answers", "written"):
        writer = AnswerWriter(tmp_path / name, {"target": "tiny"}, vocab_size=64)
        for number, (ids, start) in enumerate(zip(answers.ids, answers.starts, strict=True)):
            writer.add(Answer(number, 0, ids, int(start), 0.0, "length"))
        writer.flush()
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"turns": [f"t0{i} t1{i}"]}) for i in range(3)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"turns": ["t20"]}))

    def run(folder: str, *arms: str) -> dict:
        words = f"--target {tmp_path}/target --answers {tmp_path}/answers --written {tmp_path}/written --device cpu "
        words += f"--prompts {tmp_path}/a.jsonl {tmp_path}/b.jsonl --out {tmp_path}/{folder} --steps 5 "
        words += "--tokens-per-batch 200 --anchors 3 --max-new-tokens 12 --draft-vocab-size 40 --markov-rank 8 --arms"
        assert study.main([*words.split(), *arms]) == 0
        return json.loads((tmp_path / folder / "study.json").read_text())

    found = run("out", "dflash-4", "markov-4", "markov-7-written", "rnn-7")
    assert [arm["name"] for arm in found["arms"]] == ["dflash-4", "markov-4", "rnn-7", "markov-7-written"]
    assert {arm["steps"] for arm in found["arms"]} == {5}
    for arm in found["arms"]:
        greedy, sampled = arm["results"]
        assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
        assert 1 <= greedy["accepted_length"] <= arm["block_size"] + 1
        assert greedy["accepted_length_by_prompts"].keys() == {"a", "b"}
        assert len(greedy["acceptance_by_position"]) == arm["block_size"]
    assert found["gains"].keys() == {"4"}
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        "study-block-sizes.png",
        "study-acceptance.png",
    }
    assert "Markov over DFlash at 4" in capsys.readouterr().out
    # an arm learns the same alone and in company
    run("alone", "markov-4")
    ours, theirs = (
        DSparkDrafter.from_pretrained(tmp_path / name / "drafters" / "markov-4").state_dict()
        for name in ("out", "alone")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # what has a result is left alone; what is trained is only measured
    capsys.readouterr()
    kept = (tmp_path / "out" / "markov-4.json").read_text()
    (tmp_path / "out" / "dflash-4.json").unlink()
    (tmp_path / "out" / "markov-4.json").write_text(kept.replace('"steps": 5', '"steps": 77'))
    again = run("out", "dflash-4", "markov-4")
    assert [arm["steps"] for arm in again["arms"]] == [5, 77, 5, 5]
    assert "step" not in capsys.readouterr().out.replace("steps", "")  # nothing was trained
