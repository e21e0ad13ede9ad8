"""Coding prompts: small functions put together from parts that can be run, and functions mined from Python sources."""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


# Packages under BSD, MIT or Apache-2.0 whose functions may be shown in a prompt.
PERMISSIVE_PACKAGES = [
    "accelerate",
    "click",
    "filelock",
    "fsspec",
    "httpx",
    "jinja2",
    "markdown_it",
    "mpmath",
    "networkx",
    "numpy",
    "packaging",
    "peft",
    "pydantic",
    "pygments",
    "requests",
    "rich",
    "safetensors",
    "setuptools",
    "sympy",
    "torch",
    "transformers",
    "huggingface_hub",
    "urllib3",
    "wheel",
]

COMPLETE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n\n{code}\n\n```",
    "Complete the following Python function:\n\n```python\n{code}\n```",
    "Finish this function.\n```python\n{code}\n```",
    "Implement the function below in Python. Return only the code.\n\n{code}",
    "Please write the body of this Python function:\n```python\n{code}\n```",
    "{code}",
)
ABOUT_CODE = (
    "Explain what this Python code does, step by step:\n```python\n{code}\n```",
    "Write a docstring for this function:\n```python\n{code}\n```",
    "Write unit tests for the following function:\n```python\n{code}\n```",
    "What does this function return, and when does it fail?\n\n{code}",
    "Refactor this code to make it more readable:\n```python\n{code}\n```",
    "Add type hints to this function:\n```python\n{code}\n```",
    "Review this code and suggest improvements:\n```python\n{code}\n```",
    "Translate this Python function to {language}:\n```python\n{code}\n```",
    "What is the time complexity of this function?\n```python\n{code}\n```",
)
BUGGY = (
    "This function has a bug. Find it and fix it:\n```python\n{code}\n```",
    "Why does this code not work as expected? Correct it.\n```python\n{code}\n```",
)
LANGUAGES = ("JavaScript", "Java", "C++", "Go", "Rust", "TypeScript", "Ruby", "C#")

Part = tuple[str, Callable[[Any], Any]]

NUMBER_TESTS: tuple[Part, ...] = (
    ("even", lambda x: x % 2 == 0),
    ("odd", lambda x: x % 2 == 1),
    ("positive", lambda x: x > 0),
    ("negative", lambda x: x < 0),
    ("non-zero", lambda x: x != 0),
    ("prime", lambda x: x > 1 and all(x % d for d in range(2, int(x**0.5) + 1))),
    ("two-digit", lambda x: 10 <= abs(x) <= 99),
    ("divisible by 3", lambda x: x % 3 == 0),
    ("divisible by 5", lambda x: x % 5 == 0),
    ("greater than 10", lambda x: x > 10),
    ("less than 20", lambda x: x < 20),
    ("not divisible by 4", lambda x: x % 4 != 0),
    ("perfect square", lambda x: x >= 0 and int(x**0.5) ** 2 == x),
    ("palindromic", lambda x: str(abs(x)) == str(abs(x))[::-1]),
)
NUMBER_MAPS: tuple[Part, ...] = (
    ("", lambda x: x),
    ("squares of the", lambda x: x * x),
    ("cubes of the", lambda x: x**3),
    ("absolute values of the", abs),
    ("doubles of the", lambda x: 2 * x),
    ("digit sums of the", lambda x: sum(int(c) for c in str(abs(x)))),
    ("last digits of the", lambda x: abs(x) % 10),
    ("negations of the", lambda x: -x),
    ("remainders modulo 7 of the", lambda x: x % 7),
    ("numbers of digits of the", lambda x: len(str(abs(x)))),
    ("successors of the", lambda x: x + 1),
)
NUMBER_ENDS: tuple[Part, ...] = (
    ("the sum of", sum),
    ("how many distinct values there are among", lambda v: len(set(v))),
    ("the largest of", lambda v: max(v, default=None)),
    ("the smallest of", lambda v: min(v, default=None)),
    ("a sorted list of", sorted),
    ("a list, in descending order, of", lambda v: sorted(v, reverse=True)),
    ("a list, without duplicates and in the original order, of", lambda v: list(dict.fromkeys(v))),
    ("a list in reverse order of", lambda v: list(v)[::-1]),
    ("the running totals of", lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
    ("the difference between the largest and the smallest of", lambda v: max(v) - min(v) if v else 0),
    ("a dictionary counting each of", lambda v: {x: v.count(x) for x in dict.fromkeys(v)}),
    ("the average of", lambda v: sum(v) / len(v) if v else 0),
)
WORD_TESTS: tuple[Part, ...] = (
    ("longer than 3 letters", lambda w: len(w) > 3),
    ("of even length", lambda w: len(w) % 2 == 0),
    ("of odd length", lambda w: len(w) % 2 == 1),
    ("starting with a vowel", lambda w: w[:1].lower() in tuple("aeiou")),
    ("ending with a consonant", lambda w: w[-1:].lower() not in tuple("aeiou")),
    ("without the letter 'e'", lambda w: "e" not in w.lower()),
    ("containing the letter 'a'", lambda w: "a" in w.lower()),
    ("starting with a capital letter", lambda w: w[:1].isupper()),
    ("with a repeated letter", lambda w: len(set(w.lower())) < len(w)),
    ("with at least two vowels", lambda w: sum(c in "aeiou" for c in w.lower()) >= 2),
    ("shorter than 5 letters", lambda w: len(w) < 5),
)
WORD_MAPS: tuple[Part, ...] = (
    ("words", lambda w: w),
    ("reversed words", lambda w: w[::-1]),
    ("words in upper case", str.upper),
    ("words in lower case", str.lower),
    ("lengths of the words", len),
    ("first letters of the words", lambda w: w[0]),
    ("last letters of the words", lambda w: w[-1]),
    ("vowel counts of the words", lambda w: sum(c in "aeiou" for c in w.lower())),
    ("words with their vowels removed", lambda w: "".join(c for c in w if c.lower() not in "aeiou")),
    ("words with their letters sorted", lambda w: "".join(sorted(w))),
    ("words with swapped case", str.swapcase),
)
WORD_ENDS: tuple[Part, ...] = (
    ("a list of", list),
    ("a sorted list of", sorted),
    ("how many distinct values there are among", lambda v: len(set(v))),
    ("the first of", lambda v: v[0] if v else None),
    ("the last of", lambda v: v[-1] if v else None),
    ("the alphabetically or numerically largest of", lambda v: max(v, default=None)),
    ("a dictionary counting each of", lambda v: {x: v.count(x) for x in dict.fromkeys(v)}),
    ("a comma-separated string of", lambda v: ", ".join(map(str, v))),
    ("a list of pairs of index and value of", lambda v: list(enumerate(v))),
)
WORDS = [
    "apple",
    "river",
    "Stone",
    "cloud",
    "green",
    "tiger",
    "Music",
    "banana",
    "hello",
    "world",
    "code",
    "Python",
    "light",
    "Ocean",
    "tree",
    "moon",
    "garden",
    "window",
    "Paris",
    "letter",
    "summer",
    "bread",
    "eagle",
    "Orange",
    "silver",
    "island",
    "simple",
    "question",
    "answer",
    "level",
    "radar",
    "noon",
    "book",
    "happy",
    "zebra",
]
VERBS = ["compute", "get", "find", "collect", "make", "select", "process", "calculate", "extract", "build"]
NOUNS = ["values", "numbers", "items", "data", "result", "stats", "elements", "output", "summary", "scores"]
STRING_NOUNS = ["words", "names", "terms", "labels", "tokens", "strings", "tags", "text", "list", "keys"]


def _examples(rng: random.Random, name: str, inputs: list[Any], function: Callable[[Any], Any]) -> list[str]:
    style = rng.randrange(4)
    shown = []
    for given in inputs:
        result = function(given)
        if isinstance(result, float):
            result = round(result, 4)
        if style == 0:
            shown += [f">>> {name}({given!r})", f"{result!r}"]
        else:
            arrow = ("=>", "==", "->")[style - 1]
            shown.append(f"{name}({given!r}) {arrow} {result!r}")
    if style:
        shown.insert(0, rng.choice(("For example:", "Examples:", "Example:")))
    return shown


def _composed(rng: random.Random) -> tuple[str, str, list[str], str]:
    """Name, argument, examples and description of a function made of a test, a map and an end."""
    numbers = rng.random() < 0.55
    if numbers:
        test, mapping, end = rng.choice(NUMBER_TESTS), rng.choice(NUMBER_MAPS), rng.choice(NUMBER_ENDS)
        kind = (
            "numbers" if test[0] in ("even", "odd", "positive", "negative", "non-zero", "prime", "two-digit") else ""
        )
        what = f"{test[0]} {kind}" if kind else f"numbers that are {test[0]}"
        what = f"{mapping[0]} {what}" if mapping[0] else what
        argument = rng.choice(("numbers", "nums", "lst", "values", "arr", "l"))
        tail = rng.choice(NOUNS)
        inputs: list[Any] = [[rng.randint(-9, 40) for _ in range(rng.randint(2, 7))] for _ in range(rng.randint(1, 3))]
        given = rng.choice(("a list of integers", "a list of numbers", "an array of integers", "a non-empty list"))
    else:
        test, mapping, end = rng.choice(WORD_TESTS), rng.choice(WORD_MAPS), rng.choice(WORD_ENDS)
        what = f"{mapping[0]} {test[0]}" if mapping[0].endswith("words") else f"{mapping[0]}, for words {test[0]}"
        argument = rng.choice(("words", "strings", "names", "lst", "items", "tokens"))
        tail = rng.choice(STRING_NOUNS)
        inputs = [rng.sample(WORDS, rng.randint(2, 5)) for _ in range(rng.randint(1, 3))]
        given = rng.choice(("a list of words", "a list of strings", "a list of names"))
    name = f"{rng.choice(VERBS)}_{tail}" if rng.random() < 0.6 else f"{rng.choice(VERBS)}{tail.capitalize()}"

    def function(values: list[Any]) -> Any:
        return end[1]([mapping[1](v) for v in values if test[1](v)])

    if rng.random() < 0.5:
        description = f"Given {given}, return {end[0]} the {what}."
    else:
        description = f"Write a function that takes {given} as input and returns {end[0]} the {what}."
    return name, argument, _examples(rng, name, inputs, function), description


def composed_functions(rng: random.Random) -> Iterator[list[str]]:
    """Signatures with a docstring and examples whose results were computed."""
    while True:
        name, argument, examples, description = _composed(rng)
        hint = rng.choice(("", ": list", ": List", ": list"))
        lines = [*textwrap.wrap(description, 76), *([""] if rng.random() < 0.4 else []), *examples]
        body = textwrap.indent("\n".join(lines), "    ")
        opening = '    """' + (lines[0] if rng.random() < 0.5 else "\n" + "    " + lines[0])
        code = f"def {name}({argument}{hint}):\n{opening}\n" + "\n".join(body.split("\n")[1:]) + '\n    """'
        if rng.random() < 0.15:
            code = f"from typing import List\n\n\n{code}"
        style = rng.choice(COMPLETE) if rng.random() < 0.7 else COMPLETE[0]
        yield [style.format(code=code)]


def described_functions(rng: random.Random) -> Iterator[list[str]]:
    """One-sentence tasks, some followed by a wish that changes the first answer."""
    openings = (
        "Write a function to {}",
        "Write a python function to {}",
        "Write a Python function that can {}",
        "How can I {} in Python?",
        "Show me Python code to {}",
        "Using {language}, write a function to {}",
    )
    followups = (
        "Now write tests for it.",
        "Can you make it faster?",
        "Rewrite it without loops.",
        "What happens with an empty input?",
        "Add type hints and a docstring.",
        "Explain the code line by line.",
        "Now do the same in {language}.",
        "What is its time complexity?",
    )
    while True:
        name, argument, examples, description = _composed(rng)
        del name, argument
        task = description.removesuffix(".").split("return", 1)[-1].removeprefix("s").strip()
        source = rng.choice(("a given list", "a list", "the given array", "a list of inputs"))
        language = rng.choice(LANGUAGES)
        text = rng.choice(openings).format(f"return {task} from {source}", language=language)
        if not text.endswith("?"):
            text += rng.choice((".", ".", "", f".\n{examples[-1]}" if len(examples[-1]) < 80 else "."))
        yield [text] if rng.random() < 0.85 else [text, rng.choice(followups).format(language=language)]


def mined(path: Path) -> Iterator[tuple[str, str]]:
    """Source and signature-with-docstring of each short documented function of a file."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, OSError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if len(node.body) > 1 and 30 <= len(docstring) <= 600 and len(source) <= 1100 and len(head) <= 800:
            yield source, head


def python_files() -> list[Path]:
    """Python sources that may be quoted: the standard library and installed packages of `PERMISSIVE_PACKAGES`."""
    library, site = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    files = [
        p for p in library.rglob("*.py") if not {"site-packages", "dist-packages", "test", "tests"} & set(p.parts)
    ]
    for package in PERMISSIVE_PACKAGES:
        files += [p for p in (site / package).rglob("*.py") if not {"tests", "_vendor", "test"} & set(p.parts)]
    return sorted(files)


def mined_functions(rng: random.Random) -> Iterator[list[str]]:
    """Functions of real Python sources, to complete, explain, test, document or repair."""
    files = python_files()
    rng.shuffle(files)
    for path in files:
        for source, head in mined(path):
            yield [rng.choice(COMPLETE[:5]).format(code=head)]
            undocumented = source.replace("\n".join(head.split("\n")[1:]), "", 1) if rng.random() < 0.3 else source
            for style in rng.sample(ABOUT_CODE, 2):
                yield [style.format(code=undocumented, language=rng.choice(LANGUAGES))]
            broken = _broken(rng, source)
            if broken:
                yield [rng.choice(BUGGY).format(code=broken)]


def _broken(rng: random.Random, source: str) -> str | None:
    changes = [
        ("==", "!="),
        ("<", "<="),
        (" + 1", ""),
        (" and ", " or "),
        ("not ", ""),
        ("True", "False"),
        ("[0]", "[1]"),
    ]
    rng.shuffle(changes)
    for right, wrong in changes:
        if right in source:
            at = source.rfind(right)
            return source[:at] + wrong + source[at + len(right) :]
    return None
