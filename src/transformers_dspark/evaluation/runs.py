"""Runs of a pair: the target alone and with its drafter, timed on one prompt; whole conversations."""

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


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and a drafter bound to it on the same device and in the same dtype."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DSparkDrafter

    @classmethod
    def load(cls, target: str, drafter: str, device: str | None = None, dtype: str | None = None) -> Pair:
        """
        Args:
            target, drafter (`str`): Folders or hub ids.
            device (`str`, *optional*): Defaults to cuda if there is one.
            dtype (`str`, *optional*): Defaults to float32 on the CPU and bfloat16 elsewhere.
        """
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kind = getattr(torch, dtype or ("float32" if place.type == "cpu" else "bfloat16"))
        model = AutoModelForCausalLM.from_pretrained(target, dtype=kind).to(place).eval()
        drafts = DSparkDrafter.from_pretrained(drafter, dtype=kind).to(place).eval()
        return cls(model, AutoTokenizer.from_pretrained(target), drafts.bind_target(model))

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> torch.Tensor:
        """`(1, length)` ids of a conversation, ready for the assistant's answer."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return ids.to(self.target.device)


@dataclass(frozen=True)
class Run:
    """New token ids `(tokens,)` of one generation, its wall time in seconds, and the drafter's figures if any."""

    ids: torch.Tensor
    seconds: float
    stats: GenerationStats | None

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
    **options: Any,
) -> Run:
    """
    Generates once and times it, prefill included.

    Args:
        drafted (`bool`): Whether the drafter assists.
        temperature (`float`): 0 is greedy; otherwise the bare distribution at that temperature (no top-k or top-p).
        options: Further options of `generate`, or of [`DSparkGenerationConfig`] when drafted.
    """
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    base = pair.target.generation_config
    config = DSparkGenerationConfig(
        max_new_tokens=max_new_tokens,
        pad_token_id=base.pad_token_id if base.pad_token_id is not None else pair.tokenizer.pad_token_id,
        eos_token_id=base.eos_token_id,
        return_dict_in_generate=True,
        **sampling,
        **(
            options
            if drafted
            else {name: value for name, value in options.items() if name != "assistant_confidence_threshold"}
        ),
    )
    start = time.perf_counter()
    output = pair.target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=config,
        **({"assistant_model": pair.drafter} if drafted else {}),
    )
    ids = output.sequences[0, input_ids.shape[1] :].cpu()  # waits for the device, so the clock is honest
    return Run(ids, time.perf_counter() - start, output.dspark if drafted else None)


def converse(
    pair: Pair, conversations: Sequence[Sequence[str]], max_new_tokens: int, temperature: float, **options: Any
) -> Iterator[Run]:
    """Answers every turn of every conversation with the drafter; later turns see the answers to earlier ones."""
    for turns in conversations:
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            result = run(
                pair, pair.prompt_ids(messages), max_new_tokens, drafted=True, temperature=temperature, **options
            )
            messages.append(
                {"role": "assistant", "content": pair.tokenizer.decode(result.ids, skip_special_tokens=True)}
            )
            yield result


def merge(runs: Sequence[GenerationStats]) -> GenerationStats:
    """The statistics of several calls as those of one, each call being a row."""
    total = GenerationStats()
    for stats in runs:
        total.rounds += stats.rounds
        total.accepted_lengths += stats.accepted_lengths
        total.verify_lengths += stats.verify_lengths
        total.draft_seconds += stats.draft_seconds
        total.verify_seconds += stats.verify_seconds
        for counts, more in (
            (total.tested_by_position, stats.tested_by_position),
            (total.passed_by_position, stats.passed_by_position),
        ):
            counts.extend([0] * (len(more) - len(counts)))
            for k, number in enumerate(more):
                counts[k] += number
    return total
