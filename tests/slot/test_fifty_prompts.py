"""Trained drafters, every head, block sizes 1 to 8, fifty prompts: the ids of plain greedy generate, in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.golden import DATA, WITH_TARGET
from transformers_dspark import DSparkConfig, DSparkDrafter


NEW_TOKENS = 20


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (50,), generator=generator).tolist()
    return [torch.randint(3, 300, (1, length), generator=generator) for length in lengths]


def resized(drafter: DSparkDrafter, block_size: int, **head) -> DSparkDrafter:
    """The same weights under another block size, and where asked for a head of random weights."""
    copy = DSparkDrafter(DSparkConfig(**{**drafter.config.to_dict(), "block_size": block_size, **head}))
    copy.load_state_dict(drafter.state_dict(), strict=not head)
    return copy.eval()


HEADS = {
    **{folder.name: (folder, {}) for folder in WITH_TARGET},
    "qwen3_gated": (DATA / "qwen3_vanilla", {"markov_head_type": "gated"}),
    "qwen3_none": (
        DATA / "qwen3_vanilla",
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("block_size", range(1, 9))
@pytest.mark.parametrize("name", HEADS)
def test_same_ids(prompts, name, block_size):
    folder, head = HEADS[name]
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    drafter = resized(DSparkDrafter.from_pretrained(folder / "drafter"), block_size, **head)
    accepted = []
    for prompt in prompts:
        plain = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        ours = target.generate(
            prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True
        )
        assert torch.equal(plain, ours.sequences)
        accepted += ours.dspark.accepted_lengths[0] if ours.dspark.rounds else []
    assert max(accepted) > 1  # else nothing was put to the test
