"""The study at a tiny size: arms that step together, results that stay, and pictures of them."""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import study
from benchmarks.together import Company, launch
from tests.cli.tokenizer import word_tokenizer
from transformers_dspark import DSparkDrafter
from transformers_dspark.training.answers import Answer, AnswerWriter


@pytest.fixture
def words(walker, answers, tmp_path) -> list[str]:
    """What is common to the runs below: a target, two texts of it, two files of prompts."""
    walker.save_pretrained(tmp_path / "target")
    word_tokenizer(64).save_pretrained(tmp_path / "target")
    for name in ("answers", "written"):
        writer = AnswerWriter(tmp_path / name, {"target": "tiny"}, vocab_size=64)
        for number, (ids, start) in enumerate(zip(answers.ids, answers.starts, strict=True)):
            writer.add(Answer(number, 0, ids, int(start), 0.0, "length"))
        writer.flush()
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"turns": [f"t0{i} t1{i}"]}) for i in range(3)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"turns": ["t20"]}))
    common = f"--target {tmp_path}/target --answers {tmp_path}/answers --written {tmp_path}/written --device cpu "
    common += f"--prompts {tmp_path}/a.jsonl {tmp_path}/b.jsonl "
    common += "--tokens-per-batch 200 --anchors 3 --max-new-tokens 12 --draft-vocab-size 40 --markov-rank 8"
    return common.split()


def test_arms_are_trained_alike_and_measured_once(words, tmp_path, capsys):
    def run(folder: str, *arms: str) -> dict:
        assert study.main([*words, "--out", f"{tmp_path}/{folder}", "--steps", "5", "--arms", *arms]) == 0
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


def test_processes_take_as_many_steps(words, tmp_path):
    """By one clock, though they are not equally quick."""
    arms = ["dflash-4", "markov-7-depth-1", "markov-7-written"]
    rest = ["--out", str(tmp_path / "out"), "--jobs", "2", "--minutes", "0.15", "--arms", *arms]
    assert study.main([*words, *rest]) == 0
    found = json.loads((tmp_path / "out" / "study.json").read_text())
    assert {arm["name"] for arm in found["arms"]} == set(arms)
    (steps,) = {arm["steps"] for arm in found["arms"]}
    assert (steps - study.WARM) % study.STRETCH == 0
    assert found["settings"]["jobs"] == 2


def test_all_go_by_the_clock_of_the_first(tmp_path):
    def member(index: int) -> list[float]:
        company = Company(tmp_path / "steps", index, 3)
        return [company.agree(f"step {step}", lambda step=step: 10 * step + index) for step in range(4)]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(member, range(3))) == [[0, 10, 20, 30]] * 3


def test_one_that_fails_ends_the_others(tmp_path, capfd):
    launch("json.tool", [["--help"], ["--help"]])
    assert capfd.readouterr().out.count("usage") == 2
    begun = time.perf_counter()
    with pytest.raises(RuntimeError, match="Process 1 of 2 ended with"):
        launch("http.server", [["0", "--bind", "127.0.0.1"], ["no port"]])
    assert time.perf_counter() - begun < 100  # the first would never have ended


def test_shares_are_fair():
    groups = study.shares(study.ARMS, 4)
    assert sorted(arm.name for group in groups for arm in group) == sorted(arm.name for arm in study.ARMS)
    work = [sum(arm.cost for arm in group) for group in groups]
    assert max(work) < 1.3 * min(work)
    assert [len(group) for group in study.shares(study.ARMS[:2], 3)] == [1, 1, 0]


def test_texts_to_the_same_prompts_are_of_equal_length(words, answers, tmp_path):
    writer = AnswerWriter(tmp_path / "asked", {"target": "tiny"}, vocab_size=64)
    for number in range(9):
        writer.add(Answer(number, 0, answers.ids[number], int(answers.starts[number]), 0.0, "length"))
    writer.flush()
    folders = {name: [tmp_path / name] for name in ("answers", "asked", "written")}
    given = study.load_texts(argparse.Namespace(**folders, max_length=640))
    assert {name: len(text) for name, text in given.items()} == {"answers": len(answers), "asked": 9, "written": 9}
    given = study.load_texts(argparse.Namespace(**folders | {"asked": None}, max_length=640))
    assert {name: len(text) for name, text in given.items()} == {"answers": len(answers), "written": len(answers)}
