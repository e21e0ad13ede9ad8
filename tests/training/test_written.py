"""Answers that people wrote, and files of chats: what is read, what is skipped, and where an answer begins."""

import json
import random

import pytest
from transformers import LlamaForCausalLM

from tests.cli.tokenizer import word_tokenizer
from transformers_dspark.cli import main
from transformers_dspark.training import prompt_code, written
from transformers_dspark.training.answers import read_answers
from transformers_dspark.training.prompts import build_prompts, read_prompts


@pytest.fixture
def target(tiny: LlamaForCausalLM, tmp_path):
    tiny.save_pretrained(tmp_path / "target")
    word_tokenizer(64).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def chat(*contents: str) -> str:
    roles = ["system", "user", "assistant", "user", "assistant"]
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]})


def test_chats_are_read_and_broken_lines_counted(target, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    lines = [chat("t01", "t02 t03", "t04 t05"), "{", chat("t01", "t09", "t06 t07 t08", "t10", "t11 t12")]
    file.write_text("\n".join([*lines, '{"messages": [{"role": "user"}]}']))
    broken: list[int] = []
    assert read_prompts(file, broken=broken) == [["t02 t03"], ["t09", "t10"]]
    assert broken == [2, 4]
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file)
    words = ["data", "answers", "--target", str(target), "--prompts", str(file), "--device", "cpu"]
    assert main([*words, "--written", "--out", str(tmp_path / "kept"), "--json", str(tmp_path / "kept.json")]) == 0
    assert "2 broken lines are skipped, the first is line 2" in capsys.readouterr().out
    answers = list(read_answers(tmp_path / "kept"))
    assert [(a.prompt, a.turn, a.ids[a.prompt_length :].tolist()) for a in answers] == [
        (0, 0, [4, 5]),
        (1, 0, [6, 7, 8]),
        (1, 1, [11, 12]),
    ]
    assert answers[2].ids.tolist() == [1, 9, 6, 7, 8, 10, 11, 12]
    assert all(answer.temperature > 0 for answer in answers)  # none is taken for a greedy answer of the target
    assert json.loads((tmp_path / "kept.json").read_text())["broken_lines"] == 2
    assert main([*words, "--slots", "4", "--capacity", "96", "--out", str(tmp_path / "asked")]) == 0
    asked = list(read_answers(tmp_path / "asked"))
    assert {(a.prompt, a.turn) for a in asked} == {(0, 0), (1, 0), (1, 1)}


def test_a_text_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "python_files", lambda: [prompt_code.Path(prompt_code.__file__)])
    question, answer = next(written.functions(random.Random(0)))
    signature = next(line for line in answer.split("\n") if line.startswith("def "))
    assert signature in question
    assert len(answer) > len(question) - 100
    (tmp_path / "page.html").write_text(f"<p>{'Some words of a manual. ' * 12}</p>")
    built = build_prompts(4, sources=tmp_path, kinds=written.WRITTEN)
    (passage,) = (prompt for prompt in built.prompts if prompt["source"] == "documentation")
    asked, given = written.as_chat(passage)["messages"]
    assert (asked["role"], given["role"]) == ("user", "assistant")
    whole = f"{asked['content'].removeprefix('Continue this text:').strip()} {given['content']}"
    assert whole == ("Some words of a manual. " * 12).strip()


def test_two_origins_of_prompts_exclude_each_other(target, tmp_path, capsys):
    words = ["data", "prompts", "--written", "--from-target", str(target), "--out", str(tmp_path / "p.jsonl")]
    assert main(words) == 2
    assert "--written" in capsys.readouterr().err
