"""`strict_greedy`: bit by bit the tokens of the same call without drafts, in half precision, or a refusal."""

import pytest
import torch

from transformers_dspark import DSparkGenerationConfig

from .conftest import BatchLab, ragged, texts_of


FAMILIES = ["llama", "mistral", "gemma3", "gemma4", "gpt2", "gpt-oss", "qwen3-moe"]


@pytest.fixture(scope="module")
def lab():
    """Of its own: targets change their dtype here."""
    return BatchLab()


def target_of(lab, kind, dtype):
    target = lab.target(kind).to(dtype)
    if any(type(module).__name__.endswith("Experts") for module in target.modules()):
        target.set_experts_implementation("batched_mm")
    return target


def differing(lab, kind, dtype, rows, block, seed, tokens=32, **options):
    """Rows whose tokens with drafts are not those without; and the mean accepted length."""
    target, (ids, mask) = target_of(lab, kind, dtype), ragged(rows, seed=seed)
    config = {"strict_greedy": True, "do_sample": False, "max_new_tokens": tokens, **options}

    def generate(texts, width):
        drafter = lab.knowing(texts, block_size=block).to(dtype)
        ours = DSparkGenerationConfig(**config, max_verify_tokens=width, return_dict_in_generate=True)
        return target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=ours)

    plain = generate([], 0)
    assert not plain.dspark.verify_lengths or not any(map(sum, plain.dspark.verify_lengths))
    drafted = generate(texts_of(plain.sequences, mask), None)
    unlike = (plain.sequences != drafted.sequences).any(dim=1)
    return int(unlike.sum()), drafted.dspark.mean_accepted_length


@pytest.mark.parametrize(
    ("kind", "rows", "block", "dtype"),
    [
        ("llama", 5, 4, torch.bfloat16),
        ("llama", 1, 4, torch.float32),  # five tokens leave a vector unit half a group
        ("llama", 3, 6, torch.float16),
        ("gemma3", 1, 8, torch.bfloat16),
        ("gpt2", 3, 3, torch.bfloat16),
        ("gpt-oss", 2, 5, torch.bfloat16),
        ("qwen3-moe", 2, 2, torch.bfloat16),
    ],
)
def test_the_tokens_of_the_same_call_without_drafts(lab, kind, rows, block, dtype):
    unlike, accepted = differing(lab, kind, dtype, rows, block, seed=rows)
    assert not unlike
    assert accepted > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_hundreds_of_prompts(lab, kind):
    for block in range(1, 9):
        for rows in range(1, 6):
            assert not differing(lab, kind, torch.bfloat16, rows, block, seed=10 * block + rows)[0]


def test_rows_that_end_and_blocks_that_are_cut(lab):
    """Fewer live rows and shorter windows leave more places of a step to repeats."""
    target, (ids, mask) = target_of(lab, "llama", torch.bfloat16), ragged(4, seed=8)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
    ending = {"eos_token_id": [int(free[1, 14]), int(free[3, 20])], "pad_token_id": 0}
    assert not differing(lab, "llama", torch.bfloat16, 4, 5, 8, assistant_confidence_threshold=0.5, **ending)[0]


def test_a_device_that_treats_places_differently_is_noticed(lab):
    target, (ids, mask) = target_of(lab, "llama", torch.float32), ragged(2)
    drafter = lab.knowing([], block_size=3)
    config = DSparkGenerationConfig(strict_greedy=True, do_sample=False, max_new_tokens=9, max_verify_tokens=0)

    def planted(module, args, output):
        return output + 1e-6 * torch.arange(output.shape[-2])[:, None]

    handle = target.lm_head.register_forward_hook(planted)
    try:
        with pytest.raises(NotImplementedError, match="other bits for the same token at another place"):
            target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"do_sample": True}, ValueError, "it needs do_sample=False"),
        ({"do_sample": False, "dspark_loop": "transformers"}, ValueError, "'auto' or 'batched'"),
    ],
)
def test_refused_options(lab, options, error, part):
    config = DSparkGenerationConfig(strict_greedy=True, max_new_tokens=4, **options)
    with pytest.raises(error, match=part):
        lab.target().generate(ragged(1)[0], assistant_model=lab.drafter(), generation_config=config)


def test_experts_in_groups_are_refused(lab):
    target = lab.target("qwen3-moe")
    before = target.get_experts_implementation()
    target.set_experts_implementation("grouped_mm")
    config = DSparkGenerationConfig(strict_greedy=True, do_sample=False, max_new_tokens=4)
    try:
        with pytest.raises(NotImplementedError, match="experts compute in groups"):
            target.generate(ragged(1)[0], assistant_model=lab.drafter(), generation_config=config)
    finally:
        target.set_experts_implementation(before)
