"""The target's head under speculation: the same numbers, and nothing left behind."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.utils import ModelOutput

from transformers_dspark.target import TargetTaps, few_rows_linears, learned_positions


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape)).eval()


def linears(target):
    return [module for module in target.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17])
def test_same_logits(target, rows):
    ids = torch.arange(rows)[None]
    with torch.inference_mode():
        plain = target(ids).logits
        with few_rows_linears(target):
            quick = target(ids).logits
    torch.testing.assert_close(quick, plain, rtol=1e-5, atol=1e-6)


def test_strides_are_those_of_a_product(target):
    """Some models look at pairs of numbers as complex ones."""
    with torch.inference_mode(), few_rows_linears(target):
        for rows in (1, 2, 3, 8, 9):
            assert target.lm_head(torch.ones(1, rows, target.lm_head.in_features)).is_contiguous()


def test_restored_after_an_error(target):
    def fail() -> None:
        with few_rows_linears(target):
            assert all("forward" in vars(layer) for layer in linears(target))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not any("forward" in vars(layer) for layer in linears(target))


def test_leaves_a_replaced_forward_alone(target):
    def theirs(states):
        return states

    target.lm_head.forward = theirs
    with few_rows_linears(target):
        assert target.lm_head.forward is theirs
    assert target.lm_head.forward is theirs


def test_leaves_another_kind_of_head_alone(target):
    class Head(torch.nn.Linear):
        pass

    target.set_output_embeddings(Head(32, 97, bias=False))
    with few_rows_linears(target):
        assert "forward" not in vars(target.lm_head)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_at_once(target, order):
    """Whichever ends first, the other keeps the quick head, and nothing stays behind."""
    contexts = [few_rows_linears(target) for _ in order]
    for context in contexts:
        context.__enter__()
    for index in order:
        assert "forward" in vars(target.lm_head)
        contexts[index].__exit__(None, None, None)
    assert "forward" not in vars(target.lm_head)


def test_many_threads(target):
    def enter_and_leave():
        for _ in range(500):
            with few_rows_linears(target):
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for job in [pool.submit(enter_and_leave) for _ in range(4)]:
                job.result()
    finally:
        sys.setswitchinterval(interval)
    assert "forward" not in vars(target.lm_head)


def test_several_states_a_token(target):
    """As with AltUp."""
    taps = TargetTaps(target, [0])
    with pytest.raises(NotImplementedError, match="one state a token"):
        taps.read(ModelOutput(hidden_states=(torch.zeros(2, 1, 4, 32),) * 2), torch.device("cpu"), torch.float32)


def test_tables_of_positions_end_and_nothing_else_does(target):
    """OPT's table has two lines in front of its first position; Nemotron-H has neither a table nor angles."""
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    opt = OPTForCausalLM(OPTConfig(**small, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=48))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=48))
    hybrid = NemotronHForCausalLM(
        NemotronHConfig(
            **small,
            head_dim=8,
            num_key_value_heads=2,
            layers_block_type=["attention"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=1,
            max_position_embeddings=64,  # as many as there are tokens
        )
    )
    assert [learned_positions(one) for one in (opt, gpt2, hybrid, target)] == [48, 48, None, None]
