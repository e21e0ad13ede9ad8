"""Prompts for evaluation: a file of conversations, or the few that the demonstration shows."""

from __future__ import annotations

from ..training.prompts import read_prompts as read_conversations


DEMO_PROMPTS = {
    "code": (
        "Complete this Python function:\n"
        "```python\n"
        "def count_vowels(text: str) -> int:\n"
        '    """Return the number of vowels in text, in either case.\n'
        "    >>> count_vowels('Hello World')\n"
        "    3\n"
        '    """\n'
        "```"
    ),
    "prose": "Explain in a few paragraphs how the water cycle works.",
    "chat": "What are some good habits for staying healthy?",
}

__all__ = ["DEMO_PROMPTS", "read_conversations"]
