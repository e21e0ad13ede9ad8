"""Runs of a pair: the target alone and with its drafter, timed on one prompt; conversations in batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..generation_config import DSparkGenerationConfig
from ..modeling_dspark import DSparkDrafter
from ..telemetry import GenerationStats


# What suits one row on a CPU: a step over up to four tokens takes hardly longer there than one over a single token.
CPU_OPTIONS = {"max_verify_tokens": 3, "assistant_confidence_threshold": 0.3}


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and a drafter bound to it on the same device and in the same dtype."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DSparkDrafter

    @classmethod
    def load(cls, target: str, drafter: str, device: torch.device, dtype: torch.dtype | None = None) -> Pair:
        """
        Args:
            target, drafter (`str`): Folders or hub ids.
            device (`torch.device`): Where both go.
            dtype (`torch.dtype`, *optional*): Defaults to float32 on the CPU and bfloat16 elsewhere.
        """
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
        drafts = DSparkDrafter.from_pretrained(drafter, dtype=dtype).to(device).eval()
        return cls(model, AutoTokenizer.from_pretrained(target), drafts.bind_target(model))

    @property
    def quick_options(self) -> dict[str, Any]:
        """Options of drafting that suit speed on one row; none where whole blocks are as good."""
        sure = self.drafter.config.enable_confidence_head
        kept = CPU_OPTIONS if self.target.device.type == "cpu" else {}
        return {name: value for name, value in kept.items() if sure or name != "assistant_confidence_threshold"}

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> torch.Tensor:
        """
        `(1, length)` ids of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: they leave no room for an answer in the target's context.
        """
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        context = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and ids.shape[1] >= context:
            raise ValueError(
                f"A prompt has {ids.shape[1]} tokens, the target's context {context}, answer included: shorten it."
            )
        return ids.to(self.target.device)

    def batch(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, `(rows, length)`, of first user turns; padded on the left."""
        return self.batch_of_chats([[{"role": "user", "content": text}] for text in prompts])

    def batch_of_chats(self, chats: Sequence[Sequence[dict[str, str]]]) -> dict[str, torch.Tensor]:
        """The same of conversations, each ready for the assistant's answer."""
        rows = [self.prompt_ids(messages)[0] for messages in chats]
        longest, (pad, _) = max(map(len, rows)), self.pad_and_end
        padding = [(longest - len(row), 0) for row in rows]
        pairs = list(zip(rows, padding, strict=True))
        return {
            "input_ids": torch.stack([torch.nn.functional.pad(row, room, value=pad) for row, room in pairs]),
            "attention_mask": torch.stack(
                [torch.nn.functional.pad(torch.ones_like(row), room) for row, room in pairs]
            ),
        }

    @property
    def pad_and_end(self) -> tuple[int, list[int]]:
        """The padding token, 0 where nobody names one, and the tokens that end an answer."""
        config = self.target.generation_config
        pad = config.pad_token_id if config.pad_token_id is not None else self.tokenizer.pad_token_id
        end = config.eos_token_id
        return pad or 0, [] if end is None else [end] if isinstance(end, int) else list(end)

    def config(self, max_new_tokens: int, temperature: float = 0.0, **options: Any) -> DSparkGenerationConfig:
        """
        Options of a generation.

        Args:
            temperature (`float`): 0 is greedy; otherwise the bare distribution at that temperature, unless `options`
                name top-k or top-p.
            options: Further options of [`DSparkGenerationConfig`].
        """
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        pad, end = self.pad_and_end
        given = {"pad_token_id": pad, "eos_token_id": end or None, "return_dict_in_generate": True}
        return DSparkGenerationConfig(**{"max_new_tokens": max_new_tokens, **given, **sampling, **options})

    def new_ids(self, output: torch.Tensor, prompt: int) -> list[list[int]]:
        """The new tokens of each row of `(rows, length)` sequences behind a prompt, up to the one that ends them."""
        ends = set(self.pad_and_end[1])
        found = []
        for row in output[:, prompt:].tolist():
            stop = next((k + 1 for k, token in enumerate(row) if token in ends), len(row))
            found.append(row[:stop])
        return found


@dataclass(frozen=True)
class Run:
    """New token ids `(tokens,)` of one generation, its wall time in seconds, and figures (none without a drafter)."""

    ids: torch.Tensor
    seconds: float
    stats: GenerationStats

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


def run(
    pair: Pair,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    drafted: bool,
    temperature: float = 0.0,
    **drafting: Any,
) -> Run:
    """
    Generates once and times it, prefill included.

    Args:
        drafted (`bool`): Whether the drafter assists.
        temperature (`float`): 0 is greedy; otherwise the bare distribution at that temperature (no top-k or top-p).
        drafting: Options of [`DSparkGenerationConfig`]; they change nothing for the target alone.
    """
    config = pair.config(max_new_tokens, temperature, **drafting)
    assistant = {"assistant_model": pair.drafter} if drafted else {}
    start = time.perf_counter()
    output = pair.target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, **assistant
    )
    ids = output.sequences[0, input_ids.shape[1] :].cpu()  # waits for the device, so the clock is honest
    return Run(ids, time.perf_counter() - start, output.dspark if drafted else GenerationStats())


@dataclass(frozen=True)
class Answers:
    """A batch of answers: the new token ids of each, wall seconds, and the figures of the call."""

    ids: list[list[int]]
    seconds: float
    stats: GenerationStats


def converse(
    pair: Pair,
    conversations: Sequence[Sequence[str]],
    rows: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    **options: Any,
) -> Iterator[Answers]:
    """
    Answers every turn of every conversation with the drafter, verifying every drafted token; later turns see the
    answers to earlier ones. All first turns come first, then the second ones.

    Args:
        pair (`Pair`): Target and drafter.
        conversations (`Sequence[Sequence[str]]`): User turns.
        rows (`int`): Answers of a batch.
        max_new_tokens (`int`): Of each answer.
        temperature (`float`): 0 is greedy; otherwise the bare distribution at that temperature.
        seed (`int`): The n-th answer draws with seed + n.
        options: Further options of [`DSparkGenerationConfig`].
    """
    chats: list[list[dict[str, str]]] = [[] for _ in conversations]
    answered = 0
    for turn in range(max(map(len, conversations), default=0)):
        running = [k for k, turns in enumerate(conversations) if turn < len(turns)]
        for k in running:
            chats[k].append({"role": "user", "content": conversations[k][turn]})
        for start in range(0, len(running), rows):
            batch = running[start : start + rows]
            inputs = pair.batch_of_chats([chats[k] for k in batch])
            config = pair.config(
                max_new_tokens,
                temperature,
                dspark_loop="batched",
                verify_mode="static",
                max_verify_tokens=pair.drafter.config.num_draft_tokens,
                seed=seed + answered,
                **options,
            )
            begun = time.perf_counter()
            output = pair.target.generate(**inputs, generation_config=config, assistant_model=pair.drafter)
            found = pair.new_ids(output.sequences, inputs["input_ids"].shape[1])  # waits for the device
            seconds = time.perf_counter() - begun
            answered += len(batch)
            for k, ids in zip(batch, found, strict=True):
                chats[k].append({"role": "assistant", "content": pair.tokenizer.decode(ids, skip_special_tokens=True)})
            yield Answers(found, seconds, output.dspark)
