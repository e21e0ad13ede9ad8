"""Prompts of a pair."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from transformers_dspark.evaluation.runs import Pair


class Letters:
    """A tokenizer of one token a letter."""

    def apply_chat_template(self, messages, **options) -> str:
        return "".join(message["content"] for message in messages)

    def __call__(self, text: str, **options) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(map(ord, text))])}


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    target = SimpleNamespace(config=LlamaConfig(max_position_embeddings=8), device=torch.device("cpu"))
    pair = Pair(target, Letters(), None)
    assert pair.prompt_ids([{"role": "user", "content": "a" * 7}]).shape == (1, 7)
    with pytest.raises(ValueError, match="has 8 tokens, the target's context 8, answer included: shorten it"):
        pair.prompt_ids([{"role": "user", "content": "a" * 8}])
