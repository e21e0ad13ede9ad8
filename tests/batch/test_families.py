"""
Batched greedy decoding with a drafter gives the very tokens of plain generate, whatever the target.

The full product of families, heads, blocks and batch sizes: `pytest tests/batch/test_families.py -m slow`.
"""

import copy

import pytest
import torch

import transformers_dspark
from transformers_dspark import DSparkGenerationConfig

from .conftest import FAMILIES, ragged, texts_of


HEADS = {
    "none": {"markov_rank": 0},
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
KINDS = ["llama", "qwen3", "gemma2", *FAMILIES]
GREEDY = {"do_sample": False, "max_new_tokens": 20}


def plain_and_ours(lab, kind, rows, drafters, **options):
    """Greedy, unless `options` say what is generated."""
    target, (ids, mask) = lab.target(kind), ragged(rows)
    options = {**({} if options else GREEDY), "attention_mask": mask, **options}
    plain = target.generate(ids, **options)
    for make in drafters:
        yield plain, target.generate(ids, assistant_model=make(texts_of(plain, mask)), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_family(lab, kind):
    """A drafter that is often right, and one that is a matter of chance; the head and the block vary."""
    index = KINDS.index(kind)
    head, block = list(HEADS)[index % 4], 1 + index % 8
    drafters = [
        lambda texts: lab.knowing(texts, block_size=4),
        lambda texts: lab.drafter(block_size=block, **HEADS[head]),
    ]
    for plain, ours in plain_and_ours(lab, kind, 5, drafters):
        assert torch.equal(plain, ours)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_family_in_full(lab, kind, rows):
    def drafters():
        for block in range(1, 9):
            yield lambda texts, b=block: lab.knowing(texts, block_size=b)
            for head in HEADS.values():
                yield lambda texts, b=block, h=head: lab.drafter(block_size=b, **h)

    options = {"generation_config": DSparkGenerationConfig(dspark_loop="batched", **GREEDY)} if rows == 1 else {}
    for plain, ours in plain_and_ours(lab, kind, rows, drafters(), **options):
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("block", range(1, 9))
@pytest.mark.parametrize("rows", [3])
def test_every_block_size(lab, both, rows, block):
    plain, ours = both(lab.target("llama"), rows, block)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("head", HEADS)
def test_every_head(lab, head):
    for plain, ours in plain_and_ours(lab, "gemma2", 3, [lambda texts: lab.drafter(block_size=5, **HEADS[head])]):
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_the_same_as_transformers_own_loop(lab, kind):
    """Batch 1: the tokens, and the accepted lengths, of the assisted loop; a padded prompt as well."""
    target = lab.target(kind)
    ids, mask = ragged(3)
    for row in range(3):
        out = {
            loop: target.generate(
                ids[row : row + 1],
                attention_mask=mask[row : row + 1],
                assistant_model=lab.drafter(),
                generation_config=DSparkGenerationConfig(dspark_loop=loop, return_dict_in_generate=True, **GREEDY),
            )
            for loop in ("batched", "transformers")
        }
        assert torch.equal(out["batched"].sequences, out["transformers"].sequences)
        assert out["batched"].dspark.accepted_lengths == out["transformers"].dspark.accepted_lengths
        assert torch.equal(
            out["batched"].sequences, target.generate(ids[row : row + 1], attention_mask=mask[row : row + 1], **GREEDY)
        )


def test_both_doors(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(4)
    options = {**GREEDY, "attention_mask": mask, "return_dict_in_generate": True}
    slot = target.generate(ids, assistant_model=drafter, **options)
    door = target.generate(ids, custom_generate=transformers_dspark.generate, drafter=drafter, **options)
    assert torch.equal(slot.sequences, door.sequences)
    assert slot.dspark.accepted_lengths == door.dspark.accepted_lengths
    assert torch.equal(slot.sequences, target.generate(ids, **options).sequences)


def test_prompts_without_padding_and_without_mask(lab):
    target, ids = lab.target(), ragged(3)[0][:, 3:]
    ours = target.generate(ids, assistant_model=lab.drafter(), **GREEDY)
    assert torch.equal(ours, target.generate(ids, **GREEDY))


def test_learned_positions_end(lab):
    """Where a target's table of positions ends, plain generation's last token is ours as well."""
    target = lab.target("gpt2")
    ids, mask = ragged(3, 60)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5)
    drafter = lab.knowing(texts_of(plain, mask), block_size=7)
    ours = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5, assistant_model=drafter)
    assert torch.equal(plain, ours)


def test_longer_than_the_drafter_was_made_for(lab):
    target = lab.target()
    ids, mask = ragged(2, 40)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    for drafter in (
        lab.knowing(texts_of(plain, mask), max_position_embeddings=16),
        lab.drafter(max_position_embeddings=16),
    ):
        assert torch.equal(plain, target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY))


def test_long_prompts_are_read_in_parts(lab, monkeypatch):
    monkeypatch.setattr("transformers_dspark.decoding.PREFILL_TOKENS", 7)
    target, (ids, mask) = lab.target("gemma2"), ragged(3, 23)
    options = {**GREEDY, "attention_mask": mask, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = target.generate(ids, **options)
    ours = target.generate(ids, assistant_model=lab.drafter(), **options)
    assert torch.equal(plain.sequences, ours.sequences)
    for one, other in zip(plain.hidden_states[0], ours.hidden_states[0], strict=True):
        torch.testing.assert_close(one[mask.bool()], other[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by PEFT
def test_adapter(lab):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    tuned = peft.get_peft_model(
        copy.deepcopy(lab.target()), peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    ).eval()
    ids, mask = ragged(3)
    plain = tuned.generate(input_ids=ids, attention_mask=mask, **GREEDY)
    assert not torch.equal(plain, lab.target().generate(ids, attention_mask=mask, **GREEDY))
    for drafter in (lab.knowing(texts_of(plain, mask)), lab.drafter()):
        assert torch.equal(
            plain, tuned.generate(input_ids=ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
        )
