"""Prompts for evaluation: a file of conversations, or the few that the demonstration shows."""

from __future__ import annotations

from ..training.prompts import read_prompts as read_conversations


DEMO_PROMPTS = {
    "code": "Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation.",
    "prose": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "chat": "I have two free days in Rome. What should I see, and in which order?",
}

__all__ = ["DEMO_PROMPTS", "read_conversations"]
