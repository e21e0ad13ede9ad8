"""Damaged folders of answers: the file is named, and what to do."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from transformers_dspark.training.answers import INDEX_NAME, Answer, AnswerWriter, read_answers


SHARD = "answers-00000.safetensors"


@pytest.fixture
def folder(tmp_path):
    writer = AnswerWriter(tmp_path, {"target": "tiny"}, vocab_size=64)
    for number in range(3):
        writer.add(Answer(number, 0, np.arange(10), 4, 0.7, "eos"))
    writer.flush()
    assert [answer.prompt for answer in read_answers(tmp_path)] == [0, 1, 2]
    return tmp_path


def check(folder, name: str, problem: str) -> None:
    for read in (lambda: list(read_answers(folder)), lambda: AnswerWriter(folder, {"target": "tiny"}, 64)):
        with pytest.raises(ValueError, match=problem) as caught:
            read()
        assert str(folder / name) in str(caught.value)
        assert "is damaged" in str(caught.value)
        assert "`dspark data answers` again" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        '{"format": "x"}',
        '{"format": 1}',
        '{"format": 1, "facts": [], "shards": []}',
        '{"format": 1, "facts": {}, "shards": [3]}',
        '{"format": 1, "facts": {}, "shards": [{"file": "x"}]}',
        '{"format": 1, "facts": {}, "shards": [{"file": "../x", "answers": 3}]}',
        '{"format": 1, "facts": {}, "shards": [{"file": "x", "answers": -1}]}',
    ],
)
def test_a_damaged_index(folder, text):
    (folder / INDEX_NAME).write_text(text)
    check(folder, INDEX_NAME, "damaged")


def test_an_index_that_is_no_text(folder):
    (folder / INDEX_NAME).write_bytes(b"\xff\xfe")
    check(folder, INDEX_NAME, "utf-8")


@pytest.mark.parametrize("kept", [0, 5, -20, None])
def test_a_truncated_shard(folder, kept):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    if kept is not None:
        (folder / SHARD).write_bytes(data[:kept])
    check(folder, SHARD, "damaged")


def test_a_count_that_lies(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    for answers in (2, 50):
        index["shards"][0]["answers"] = answers
        (folder / INDEX_NAME).write_text(json.dumps(index))
        check(folder, SHARD, f"promises for {answers} answers")


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("offsets", None, "`offsets` is missing"),
        ("finishes", None, "`finishes` is missing"),
        ("offsets", lambda a: a * 0, "does not divide"),
        ("offsets", lambda a: a + 1, "does not divide"),
        ("offsets", lambda a: a.astype(np.float32), "`offsets` is missing or not"),
        ("ids", lambda a: a[:-1], "does not divide"),
        ("ids", lambda a: a.astype(np.int32) - 5, "`ids` holds a number below 0"),
        ("ids", lambda a: a.reshape(2, -1), "`ids` is missing or not"),
        ("prompt_lengths", lambda a: -a, "`prompt_lengths` holds a number below 0"),
        ("prompt_lengths", lambda a: a + 1000, "longer than"),
        ("temperatures", lambda a: a * np.float32("nan"), "`temperatures` holds"),
        ("finishes", lambda a: a * 0 + 99, "above 3"),
    ],
)
def test_damaged_arrays(folder, name, change, problem):
    arrays = load_file(folder / SHARD)
    array = arrays.pop(name)
    if change is not None:
        arrays[name] = np.ascontiguousarray(change(array))
    save_file(arrays, folder / SHARD)
    check(folder, SHARD, problem)
