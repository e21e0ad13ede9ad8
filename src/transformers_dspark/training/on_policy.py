"""On-policy training text: the target answers prompts itself.

A drafter trained on text that its target would not write is accepted less, so the answers come from the target,
through its own chat template: half of them greedy, a quarter at temperature 0.7, a quarter at 1.0. This module feeds
the slots and writes what comes out; how a token is computed is in `slots`, what a file looks like in `answers`.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention import use_ragged_attention
from ..generation_config import eos_ids
from .answers import Answer, AnswerWriter
from .slots import Decoded, Request, SlotDecoder, decoded


TEMPERATURES = ((0.0, 0.5), (0.7, 0.25), (1.0, 0.25))  # temperature and its share of the prompts
LEAST_ANSWER = 64  # prompts that leave less room than this are skipped
CHUNK = 1024  # prompts tokenised at a time, on a thread of their own


@dataclass(frozen=True)
class AnswerOptions:
    """
    How answers are generated.

    Args:
        slots (`int`, *optional*, defaults to 2048): Sequences decoded together.
        capacity (`int`, *optional*, defaults to 704): Tokens of a prompt and its answer.
        max_new_tokens (`int`, *optional*): Most tokens of an answer; by default only the capacity limits it.
        max_seconds (`float`, *optional*): Stop after so many seconds; unfinished answers are kept as they stand.
        seed (`int`, *optional*, defaults to 0): Chooses temperatures and draws, together with a prompt's index.
        check_every (`int`, *optional*, defaults to 32): Steps between two looks at the flags.
    """

    slots: int = 2048
    capacity: int = 704
    max_new_tokens: int | None = None
    max_seconds: float | None = None
    seed: int = 0
    check_every: int = 32

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("check_every", 1), ("capacity", LEAST_ANSWER + 8)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")


@dataclass
class AnswerProgress:
    """Counts of a run so far; `recent_rate` is in answer tokens a second since the report before."""

    answers: int = 0
    tokens: int = 0
    skipped: int = 0
    running: int = 0
    seconds: float = 0.0
    recent_rate: float = 0.0
    exhausted: bool = False


def prompt_noise(seed: int, prompt: int, turn: int) -> tuple[float, int]:
    """
    Temperature and row seed of a turn, the same on every run and machine.

    Returns:
        `tuple[float, int]`: Temperature from `TEMPERATURES`, and a seed in 0 .. 2**62 - 1.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt}/{turn}".encode(), digest_size=16).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64
    edges = list(accumulate(share for _, share in TEMPERATURES))
    temperature = TEMPERATURES[min(bisect(edges, point), len(edges) - 1)][0]
    return temperature, int.from_bytes(digest[8:], "big") >> 2


def chat_ids(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[dict[str, str]]]) -> list[list[int]]:
    """Token ids of conversations up to where the assistant's next answer begins."""
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in conversations
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


class _Conversations:
    """Turns prompts into requests, and answers to earlier turns into requests for later ones."""

    def __init__(
        self,
        prompts: Sequence[Sequence[str]],
        tokenizer: PreTrainedTokenizerBase,
        options: AnswerOptions,
        done: set[tuple[int, int]],
    ):
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.options = options
        self.skipped = self.given = 0
        self._todo = [i for i in range(len(prompts)) if (i, 0) not in done]
        self._followups: deque[Request] = deque()
        self._messages: dict[int, list[dict[str, str]]] = {}  # of prompts with turns still to come
        self._fresh = self._stream()

    def _request(self, prompt: int, turn: int, ids: list[int]) -> Request | None:
        if len(ids) > self.options.capacity - LEAST_ANSWER:
            self.skipped += 1
            return None
        temperature, seed = prompt_noise(self.options.seed, prompt, turn)
        return Request((prompt, turn), ids, temperature, seed, self.options.max_new_tokens or self.options.capacity)

    def _stream(self) -> Iterator[Request]:
        def tokenize(chunk: list[int]) -> list[list[int]]:
            first_turns = [[{"role": "user", "content": self.prompts[i][0]}] for i in chunk]
            return chat_ids(self.tokenizer, first_turns)

        chunks = [self._todo[i : i + CHUNK] for i in range(0, len(self._todo), CHUNK)]
        with ThreadPoolExecutor(max_workers=1) as pool:
            ahead = pool.submit(tokenize, chunks[0]) if chunks else None
            for number, chunk in enumerate(chunks):
                assert ahead is not None
                ids = ahead.result()
                ahead = pool.submit(tokenize, chunks[number + 1]) if number + 1 < len(chunks) else None
                for prompt, prompt_ids in zip(chunk, ids, strict=True):
                    request = self._request(prompt, 0, prompt_ids)
                    if request is not None:
                        yield request

    def take(self, count: int) -> list[Request]:
        """Up to `count` requests, later turns of running conversations first."""
        taken: list[Request] = []
        while len(taken) < count:
            request = self._followups.popleft() if self._followups else next(self._fresh, None)
            if request is None:
                break
            taken.append(request)
        self.given += len(taken)
        return taken

    def answered(self, request: Request, answer: np.ndarray) -> None:
        """Queues the turn after this one, if there is one."""
        prompt, turn = request.key
        turns = self.prompts[prompt]
        if turn + 1 >= len(turns):
            self._messages.pop(prompt, None)
            return
        messages = self._messages.setdefault(prompt, [{"role": "user", "content": turns[0]}])
        messages.append({"role": "assistant", "content": self.tokenizer.decode(answer, skip_special_tokens=True)})
        messages.append({"role": "user", "content": turns[turn + 1]})
        followup = self._request(prompt, turn + 1, chat_ids(self.tokenizer, [messages])[0])
        if followup is not None:
            self._followups.append(followup)


def generate_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[str]],
    writer: AnswerWriter,
    options: AnswerOptions,
    report: Callable[[AnswerProgress], Any] | None = None,
    report_every: float = 5.0,
) -> AnswerProgress:
    """
    Answers prompts with the target and writes the answers.

    Prompts whose first turn the writer already holds are passed over, so running again continues an interrupted run.
    (A conversation that was interrupted between two of its turns stays as it is.)

    Args:
        target ([`PreTrainedModel`]): The model, on its device and in its dtype.
        tokenizer ([`PreTrainedTokenizerBase`]): Its tokenizer, with a chat template.
        prompts (`Sequence[Sequence[str]]`): User turns of each prompt.
        writer ([`AnswerWriter`]): Where answers go; flushed at the end, also if that is an exception or
            Ctrl-C.
        options ([`AnswerOptions`]): How to generate.
        report (`Callable`, *optional*): Called with the progress about every `report_every` seconds.

    Raises:
        NotImplementedError: The target's layers are not all full attention.
    """
    conversations = _Conversations(prompts, tokenizer, options, writer.done)
    eos = eos_ids(target.generation_config, target.config.get_text_config(decoder=True), tokenizer)
    progress = AnswerProgress()
    cut = False
    began = last_report = time.monotonic()
    last_tokens = 0

    def keep(answer: Decoded) -> None:
        if not len(answer.ids):
            return
        if int(answer.ids[-1]) in eos:
            finish = "eos"
        else:
            finish = "loop" if answer.looping else "cut" if answer.cut else "length"
        request = answer.request
        ids = np.concatenate([np.asarray(request.ids, dtype=np.int64), answer.ids])
        writer.add(Answer(*request.key, ids, len(request.ids), request.temperature, finish))
        progress.answers += 1
        progress.tokens += len(answer.ids)
        if not answer.cut:
            conversations.answered(request, answer.ids)

    training = target.training
    target.eval()
    try:
        with use_ragged_attention(target):
            decoder = SlotDecoder(target, options.slots, options.capacity, eos)
            for done, running_tokens in decoded(decoder, conversations.take, options.check_every, options.max_seconds):
                for answer in done:
                    keep(answer)
                cut |= any(answer.cut for answer in done)
                now, tokens = time.monotonic(), progress.tokens + running_tokens
                if report is not None and now - last_report > report_every:
                    progress.seconds, progress.running = now - began, conversations.given - progress.answers
                    progress.skipped = conversations.skipped
                    progress.recent_rate = (tokens - last_tokens) / (now - last_report)
                    last_report, last_tokens = now, tokens
                    report(progress)
            progress.exhausted = not cut and not conversations.take(1)
    finally:  # also when interrupted: what is answered is kept
        target.train(training)
        writer.flush()
    progress.seconds, progress.running = time.monotonic() - began, 0
    progress.skipped = conversations.skipped
    progress.recent_rate = progress.tokens / max(progress.seconds, 1e-9)
    return progress
