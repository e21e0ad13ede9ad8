"""A tiny pair on disk, with six prompts."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli.tokenizer import word_tokenizer
from transformers_dspark import DSparkConfig, DSparkDrafter


SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.fixture
def pair(tmp_path):
    torch.manual_seed(0)
    llama = {"num_hidden_layers": 2, "initializer_range": 0.3, "eos_token_id": None, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**SMALL, **llama)).save_pretrained(tmp_path / "target")
    word_tokenizer(40).save_pretrained(tmp_path / "target")
    config = DSparkConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        block_size=3,
        target_layer_ids=[0],
        num_hidden_layers=1,
        mask_token_id=1,
        markov_rank=4,
        enable_confidence_head=True,
    )
    DSparkDrafter(config).save_pretrained(tmp_path / "drafter")
    lines = (json.dumps({"turns": [f"t{i:02d} t{i + 1:02d}"]}) for i in range(6))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path
