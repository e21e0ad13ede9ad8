"""
Targets whose linear layers are quantized, with and without their head. Runs where torchao or bitsandbytes is
installed.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from transformers_dspark import DSparkConfig, DSparkDrafter


SHAPE = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def torchao(head: bool) -> TorchAoConfig:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2), include_input_output_embeddings=head)


def bitsandbytes(head: bool) -> BitsAndBytesConfig:
    """In four bits: its eight-bit product looks for outliers in all tokens of a step, so its width may matter."""
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["none"] if head else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("target")
    config = LlamaConfig(**SHAPE, num_hidden_layers=2, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("quantization", [torchao, bitsandbytes])
def test_quantized_targets(folder, quantization, head):
    target = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization(head))
    plain_head = type(target.lm_head.weight) is torch.nn.Parameter
    assert plain_head is not head
    torch.manual_seed(1)
    more = {"num_hidden_layers": 1, "target_layer_ids": [0, 1], "block_size": 4, "markov_rank": 8}
    drafter = DSparkDrafter(DSparkConfig(**SHAPE, **more)).eval()
    ids, accepted = torch.tensor([[5, 1, 3, 4], [9, 9, 2, 2], [0, 1, 2, 3], [8, 7, 6, 5]]), 0
    for rows in (1, 4):
        options = {"attention_mask": torch.ones_like(ids[:rows]), "max_new_tokens": 24, "pad_token_id": 0}
        plain = target.generate(ids[:rows], do_sample=False, **options)
        ours = target.generate(
            ids[:rows], do_sample=False, assistant_model=drafter, return_dict_in_generate=True, **options
        )
        assert torch.equal(plain, ours.sequences)
        accepted += sum(ours.dspark.passed_by_position)
    assert accepted > 0
    states = torch.randn(1, 3, 64)
    torch.testing.assert_close(drafter.unembed(states), target.lm_head(states))
    torch.testing.assert_close(drafter.target_logits(states), target.lm_head(states))


@pytest.mark.parametrize("quantization", [torchao, bitsandbytes])
def test_a_reduced_vocabulary_reads_its_rows_of_a_quantized_head(folder, quantization):
    target = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization(True))
    more = {"num_hidden_layers": 1, "target_layer_ids": [0, 1], "block_size": 4, "draft_vocab_size": 5}
    drafter = DSparkDrafter(DSparkConfig(**SHAPE, **more)).eval().bind_target(target)
    drafter.d2t.copy_(torch.tensor([0, 2, 4, 6, 8]))
    states = torch.randn(1, 3, 64)
    torch.testing.assert_close(drafter.unembed(states), target.lm_head(states)[..., [0, 3, 6, 9, 12]])
