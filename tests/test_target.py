"""The target's head under speculation: the same numbers, and nothing left behind."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_dspark.target import few_rows_head


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape)).eval()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17])
def test_same_logits(target, rows):
    ids = torch.arange(rows)[None]
    with torch.inference_mode():
        plain = target(ids).logits
        with few_rows_head(target):
            quick = target(ids).logits
    torch.testing.assert_close(quick, plain, rtol=1e-5, atol=1e-6)


def test_restored_after_an_error(target):
    def fail() -> None:
        with few_rows_head(target):
            assert "forward" in vars(target.lm_head)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "forward" not in vars(target.lm_head)


def test_leaves_a_replaced_forward_alone(target):
    def theirs(states):
        return states

    target.lm_head.forward = theirs
    with few_rows_head(target):
        assert target.lm_head.forward is theirs
    assert target.lm_head.forward is theirs


def test_leaves_another_kind_of_head_alone(target):
    class Head(torch.nn.Linear):
        pass

    target.set_output_embeddings(Head(32, 97, bias=False))
    with few_rows_head(target):
        assert "forward" not in vars(target.lm_head)
