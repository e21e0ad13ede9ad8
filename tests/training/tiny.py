"""Targets so small that a test can train drafters for them, and what they write."""

import copy

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_dspark.training.data import Sequences


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def greedy_answers(target: LlamaForCausalLM) -> Sequences:
    """The target's own greedy answers to random prompts of several lengths."""
    torch.manual_seed(1)
    ids, starts = [], []
    for number in range(44):
        prompt = torch.randint(2, 64, (1, 3 + number % 4))
        answer = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12 + number % 9, do_sample=False
        )
        if answer.shape[1] >= prompt.shape[1] + 2:
            ids.append(answer[0].numpy())
            starts.append(prompt.shape[1])
    return Sequences(ids, np.array(starts), np.ones(len(ids), dtype=bool))


def walking_target() -> LlamaForCausalLM:
    """One that walks in a circle of twelve tokens: a law that a drafter can learn."""
    model = copy.deepcopy(tiny_target())
    torch.manual_seed(3)
    table = torch.nn.functional.normalize(torch.randn(64, 32), dim=-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_().index_add_(0, 2 + (torch.arange(64) + 1) % 12, 5 * table)
    return model
