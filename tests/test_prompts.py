"""Prompts for training: distinct, reproducible, in the stated mix, and never those of an evaluation."""

import ast
import gzip
import itertools
import json
import random
import re
import zipfile

import pytest

from transformers_dspark.cli import main
from transformers_dspark.evaluation.prompts import read_conversations
from transformers_dspark.training import prompt_chat, prompt_code, prompt_math, prompt_texts, prompts
from transformers_dspark.training.prompts import SOURCES, Decontaminator, build_prompts, read_prompts, write_prompts


ENDLESS = [
    prompt_chat.chat,
    prompt_code.composed_functions,
    prompt_code.described_functions,
    prompt_math.word_problems,
    prompt_math.exercises,
]


@pytest.fixture
def few_python_files(monkeypatch):
    files = [prompts.__file__, prompt_code.__file__, json.__file__]
    monkeypatch.setattr(prompt_code, "python_files", lambda: [prompt_code.Path(file) for file in files])


@pytest.mark.parametrize("source", ENDLESS)
def test_template_sources_give_clean_and_mostly_distinct_prompts(source):
    drawn = list(itertools.islice(source(random.Random(1)), 600))
    assert drawn == list(itertools.islice(source(random.Random(1)), 600))
    assert len({tuple(turns) for turns in drawn}) > 550
    for turns in drawn:
        assert 1 <= len(turns) <= 2
        for turn in turns:
            assert turn.strip()
            assert len(turn) < 1400
            assert not re.search(r"\{[a-z]\w*\}", turn.replace("\\boxed{}", ""))


# What some of the descriptions mean, written once more, apart from the parts that computed the examples.
MEANINGS = {
    "the sum of": lambda values: sum(values),
    "the largest of": lambda values: sorted(values)[-1] if values else None,
    "how many distinct values there are among": lambda values: len({*values}),
    "a list in reverse order of": lambda values: [*reversed(values)],
    "a sorted list of": lambda values: sorted(values),
    "the last of": lambda values: [None, *values][-1],
    "squares": lambda x: x**2,
    "cubes": lambda x: x * x * x,
    "absolute values": lambda x: x if x > 0 else -x,
    "words": lambda word: word,
    "reversed words": lambda word: "".join(reversed(word)),
    "words in upper case": lambda word: word.upper(),
    "even": lambda x: not x & 1,
    "negative": lambda x: x < 0,
    "prime": lambda x: x in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37),
    "longer than 3 letters": lambda word: len(word) >= 4,
    "of even length": lambda word: not len(word) & 1,
    "starting with a vowel": lambda word: word[0] in "aeiouAEIOU",
    "": lambda x: x,
}
SENTENCES = (
    r"returns? (?P<end>the sum of|the largest of|how many distinct values there are among|a list in reverse order of) "
    r"the (?:(?P<map>squares|cubes|absolute values) of the )?(?P<test>even|negative|prime) numbers\.",
    r"returns? (?P<end>a sorted list of|the last of|how many distinct values there are among) "
    r"the (?P<map>words|reversed words|words in upper case) "
    r"(?P<test>longer than 3 letters|of even length|starting with a vowel)\.",
)
EXAMPLE = re.compile(r"^ *(?:>>> )?\w+\((\[.*\])\)(?:\n *| => | == | -> )(.+)$", re.MULTILINE)


def test_composed_examples_are_true():
    checked = [0, 0]
    for (text,) in itertools.islice(prompt_code.composed_functions(random.Random(2)), 8000):
        examples = EXAMPLE.findall(text)
        assert examples, text
        for kind, sentence in enumerate(SENTENCES):
            if found := re.search(sentence, " ".join(text.split())):
                end, change, test = (MEANINGS[found[name] or ""] for name in ("end", "map", "test"))
                for given, result in examples:
                    values = [change(value) for value in ast.literal_eval(given) if test(value)]
                    assert end(values) == ast.literal_eval(result), text
                    checked[kind] += 1
    assert min(checked) > 100, checked


def test_mined_functions(few_python_files):
    mined = list(prompt_code.mined_functions(random.Random(0)))
    assert len(mined) > 20
    assert any("has a bug" in turns[0] or "not work as expected" in turns[0] for turns in mined)


def test_passages(tmp_path):
    sentence = "A sentence of some length that stands in for real documentation of a service. " * 3
    model = {
        "metadata": {"serviceFullName": "Example"},
        "operations": {"ListThings": {"documentation": f"<p>{sentence}</p>"}},
        "shapes": {},
    }
    with zipfile.ZipFile(tmp_path / "botocore-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("botocore/data/example/service-2.json.gz", gzip.compress(json.dumps(model).encode()))
    (tmp_path / "page.html").write_text(f"<p>{sentence}&amp; more</p><p>short</p>")
    tagged = "The/at jury/nn said/vbd ``/`` nothing/pn ''/'' ,/, really/rb ./.\n" * 8
    (tmp_path / "ca01").write_text(tagged)
    (service, operation) = prompt_texts.botocore(random.Random(0), tmp_path)
    assert sentence.strip() in service[0]
    assert "list things" in operation[0]
    (paragraph,) = prompt_texts.documentation(random.Random(0), tmp_path)
    assert "& more" in paragraph[0]
    passages = list(prompt_texts.brown(random.Random(0), tmp_path))
    assert passages
    assert 'said "nothing", really.' in passages[0][0]


def test_a_file_is_distinct_reproducible_and_in_the_mix(tmp_path, few_python_files):
    messages = []
    built = build_prompts(3000, seed=4, say=messages.append)
    assert len(built.prompts) == 3000
    assert built.prompts == build_prompts(3000, seed=4).prompts
    assert built.prompts != build_prompts(3000, seed=5).prompts
    assert len({tuple(prompt["turns"]) for prompt in built.prompts}) == 3000
    assert built.counts["composed-functions"] == 480
    assert any("pip download --no-deps botocore" in message for message in messages)
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_prompts(tmp_path / name, built.prompts)
        assert read_prompts(tmp_path / name) == [prompt["turns"] for prompt in built.prompts]


def test_shares_sum_to_one():
    assert sum(source.share for source in SOURCES) == pytest.approx(1)


def test_evaluation_prompts_are_kept_out(tmp_path, few_python_files):
    built = build_prompts(200, seed=4)
    stolen = built.prompts[:3]
    long_task = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    lines = [{"turns": prompt["turns"]} for prompt in stolen] + [{"turns": [long_task]}]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, lines)))
    check = Decontaminator(tmp_path)
    assert check.contaminated(["Well, " + long_task.upper().replace(" ", ", ")])
    assert not check.contaminated([long_task.replace("seven", "7")])
    rebuilt = {tuple(prompt["turns"]) for prompt in build_prompts(200, seed=4, exclude=tmp_path).prompts}
    assert not rebuilt & {tuple(prompt["turns"]) for prompt in stolen}


def test_the_wording_of_a_task_is_no_contamination(tmp_path):
    wording = "Write a solution to the following problem and make sure that it passes the tests"
    lines = [{"turns": [f"{wording}: {i} {i + 1} {i + 2}"]} for i in range(6)]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert not Decontaminator(tmp_path).contaminated([f"{wording}: something else"])
    assert Decontaminator(tmp_path).contaminated([f"{wording}: 1 2 3"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["prompts", "--out", "{tmp}/p.jsonl", "--count", "0"], "--count: '0'"),
        (["prompts", "--out", "{tmp}/p.jsonl", "--count", "5", "--exclude", "{tmp}/x"], "no \\*.jsonl"),
        (["answers", "--target", "x", "--prompts", "{tmp}/none.jsonl", "--out", "{tmp}/a"], "No such file"),
        (["answers", "--target", "x", "--prompts", "{tmp}/bad.jsonl", "--out", "{tmp}/a"], "line 1"),
        (["answers", "--target", "x", "--prompts", "{tmp}/p", "--out", "{tmp}/a", "--device", "gpu"], "--device gpu"),
        (["answers", "--target", "x", "--prompts", "{tmp}/p", "--out", "{tmp}/a", "--slots", "0"], "--slots: '0'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words, problem):
    (tmp_path / "bad.jsonl").write_text("[]\n")
    (tmp_path / "p").write_text('{"turns": ["a"]}\n')
    assert main(["data", *(word.format(tmp=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert re.search(problem, error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"turns": 3}',
        '{"turns": "abc"}',
        '{"turns": []}',
        '{"turns": ["a", 3]}',
        "[]",
        "{",
        "3",
        "",
        '{"turns": ["\\ud800"]}',
        '{"turns": ' + "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)
def test_lines_that_are_no_prompt_are_named(tmp_path, line):
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"turns": ["a", "b"]}}\n{line}\n')
    with pytest.raises(ValueError, match=r"some\.jsonl, line 2: ") as caught:
        read_prompts(file)
    assert "\n" not in str(caught.value)
    assert read_conversations(file, 1) == [["a", "b"]]  # what is not asked for is not read


def test_files_without_prompts(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(file)
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"some\.jsonl"):
        read_prompts(file)
    whole = gzip.compress(b'{"turns": ["a"]}\n' * 50)
    for damaged in (b"not compressed", whole[:-20], whole[:20] + b"\0garbage" * 5):
        (tmp_path / "some.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"some\.jsonl\.gz"):
            read_prompts(tmp_path / "some.jsonl.gz")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(tmp_path, limit):
    (tmp_path / "some.jsonl").write_text('{"turns": ["a"]}\n')
    with pytest.raises(ValueError, match=f"limit is {limit}"):
        read_conversations(tmp_path / "some.jsonl", limit)
