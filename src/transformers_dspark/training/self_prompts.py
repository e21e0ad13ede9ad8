"""
Prompts that the target writes itself: shown its chat template up to where the user would speak, it speaks as a user.

No text from outside is needed, and the prompts come from the distribution that the target was tuned on, far more
varied than templates.

Source: Magpie (Xu et al., 2024), where instruction data is drawn from an aligned model in this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention import use_ragged_attention
from ..generation_config import eos_ids
from .on_policy import prompt_noise
from .slots import Request, SlotDecoder, decoded


TEMPERATURE = 1.0
LEAST_CHARACTERS = 8
MOST_MISSES = 4096
MARK = "\u2042\u2042\u2042"  # stands for the user's words while the template is cut open; no template holds it


def before_user(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """
    Token ids of a conversation up to where the user's first words begin.

    Raises:
        ValueError: the chat template does not show the user's words as they are.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, found, _ = text.partition(MARK)
    if not found or not before:
        raise ValueError(
            "The tokenizer's chat template has nothing before the user's words, so the target cannot be asked for"
            " prompts; use `dspark data prompts` without --from-target."
        )
    return tokenizer(before, add_special_tokens=False)["input_ids"]


def self_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    slots: int = 2048,
    most_tokens: int = 320,
) -> Iterator[list[str]]:
    """
    Draws prompts at temperature 1 without end, in the order in which they are finished. Those that do not end within
    `most_tokens`, repeat themselves or say nothing are left out.

    Args:
        target ([`PreTrainedModel`]): The model, on its device and in its dtype.
        tokenizer ([`PreTrainedTokenizerBase`]): Its tokenizer, with a chat template.
        seed (`int`): Decides the draws.
        slots (`int`): Prompts drawn together.
        most_tokens (`int`): Longest prompt.

    Yields:
        `list[str]`: One user turn.

    Raises:
        ValueError: see [`before_user`]; or `MOST_MISSES` draws in a row were no prompt.
        NotImplementedError: The target's layers are not all full attention.
    """
    start = before_user(tokenizer)
    numbers = itertools.count()

    def take(free: int) -> list[Request]:
        # turn -1 is nobody's answer, so these seeds are a stream of their own
        return [
            Request((n, -1), start, TEMPERATURE, prompt_noise(seed, n, -1)[1], most_tokens)
            for n in itertools.islice(numbers, free)
        ]

    eos = eos_ids(target.generation_config, target.config.get_text_config(decoder=True), tokenizer)
    special = set(tokenizer.all_special_ids)
    training = target.training
    target.eval()
    try:
        with use_ragged_attention(target):
            decoder = SlotDecoder(target, slots, len(start) + most_tokens + 1, eos)
            misses = 0
            for done, _ in decoded(decoder, take):
                for prompt in done:
                    misses += 1
                    if misses > MOST_MISSES:
                        raise ValueError(
                            f"{MOST_MISSES} draws in a row gave no prompt: this target was not tuned to see users"
                            " speak; use `dspark data prompts` without --from-target."
                        )
                    *words, last = prompt.ids.tolist()
                    if last not in eos or special.intersection(words):
                        continue
                    text = tokenizer.decode(words).strip()
                    if len(text) >= LEAST_CHARACTERS and "\ufffd" not in text:
                        misses = 0
                        yield [text]
    finally:
        target.train(training)
