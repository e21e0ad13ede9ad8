"""Prompts for evaluation: a file of conversations, or the few that the demonstration shows."""

from __future__ import annotations

import json
from pathlib import Path


DEMO_PROMPTS = {
    "code": "Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation.",
    "prose": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "chat": "I have two free days in Rome. What should I see, and in which order?",
}


def read_conversations(path: Path, limit: int | None = None) -> list[list[str]]:
    """
    Reads user turns, one conversation a line: `{"turns": ["...", ...]}`.

    Args:
        path (`Path`): A JSON lines file.
        limit (`int`, *optional*): Most conversations to read.

    Raises:
        ValueError: a line has no list of turns, or the file has no line.
    """
    conversations = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(conversations) >= limit:
                break
            try:
                turns = json.loads(line)["turns"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f'{path}, line {number}: expected {{"turns": ["...", ...]}}.') from error
            conversations.append([str(turn) for turn in turns])
    if not conversations:
        raise ValueError(f"{path} holds no prompt.")
    return conversations
