"""Estimates of a step against what it does."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.test_trainer import trainer_of
from transformers_dspark.training import DrafterShape
from transformers_dspark.training import trainer as trainer_module
from transformers_dspark.training.estimates import estimate_training
from transformers_dspark.training.fresh import drafter_config


class Counter(TorchDispatchMode):
    """Counts operations of products; PyTorch's own counter does not see into a function with its own gradients."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def test_estimated_products(answers, tmp_path, monkeypatch):
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4, num_key_value_heads=2)).eval()
    form = DrafterShape(num_layers=2, block_size=4, markov_rank=16, target_layer_ids=(0, 2))
    trainer = trainer_of(target, answers, tmp_path, form, anchors=20, tokens_per_batch=None)
    batch = trainer.with_blocks({"input_ids": torch.randint(0, 512, (3, 64)), "loss_mask": torch.ones(3, 64)})
    monkeypatch.setattr(trainer_module, "ATTENTION", [SDPBackend.MATH])
    with Counter() as counter:
        trainer.compute_loss(trainer.model, batch).backward()
    config = trainer.drafter.config
    estimate = estimate_training(target, config, rows=3, length=64, anchors=20)
    # a plain mask forms the products that nobody sees too: of every query with every token and query
    queries, mean = 3 * 20 * 4, 64 // 2 + 4
    unseen = 3 * 2 * queries * 4 * 64 * (3 * 64 + queries - mean)
    assert estimate.flops + unseen == pytest.approx(counter.total, rel=0.05)
    assert estimate.parameters == sum(p.numel() for p in trainer.drafter.parameters())
    assert estimate.state_bytes == 16 * estimate.parameters
    assert estimate.target_bytes == 4 * target.num_parameters()
    assert estimate.seconds(10, estimate.flops) == 10
    assert "Estimated time: 1.0 minutes for 60 steps" in estimate.describe(60, estimate.flops)


def test_memory_of_a_large_target():
    """Shapes alone are enough; what the options say shows."""
    with torch.device("meta"):
        target = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
            )
        ).to(torch.bfloat16)  # fmt: skip
    config = drafter_config(target, DrafterShape())
    plain = estimate_training(target, config, rows=1, length=4096, anchors=512)
    half = estimate_training(target, config, rows=1, length=4096, anchors=512, pure_bf16=True)
    longer = estimate_training(target, config, rows=1, length=8192, anchors=512)
    assert 15e9 < plain.target_bytes < 17e9
    assert plain.memory > half.memory > plain.target_bytes
    assert longer.flops > 1.5 * plain.flops
    assert plain.memory < 60 * 2**30
