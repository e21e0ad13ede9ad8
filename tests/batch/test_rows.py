"""Rows know nothing of each other, cuts nothing of what they drop, and memory nothing of time."""

import copy
import itertools
import os

import pytest
import torch

from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.batch.schedule import RoundSchedule
from transformers_dspark.generation_config import DraftingOptions

from .conftest import ragged, texts_of


SEEDS = [11, 5, 8, 2, 9]


def sampled(lab, target, drafter, ids, mask, seeds, **options):
    config = DSparkGenerationConfig(
        dspark_loop="batched",
        do_sample=True,
        temperature=0.7,
        max_new_tokens=25,
        pad_token_id=0,
        seed=seeds,
        return_dict_in_generate=True,
        **options,
    )
    return target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_row_of_a_batch_is_that_row_alone(lab, kind):
    """Sampling: its tokens, its accepted lengths, and what its cache holds, although others end and move about."""
    target, drafter, (ids, mask) = lab.target(kind), lab.drafter(), ragged(5)
    free = sampled(lab, target, drafter, ids, mask, SEEDS)
    eos = [int(free.sequences[0, 12]), int(free.sequences[3, 20])]
    batch = sampled(lab, target, drafter, ids, mask, SEEDS, eos_token_id=eos)
    ends = [1 + sum(lengths) for lengths in batch.dspark.accepted_lengths]
    assert len(set(ends)) > 1
    for row, (seed, end) in enumerate(zip(SEEDS, ends, strict=True)):
        own = ids[row : row + 1, row:], mask[row : row + 1, row:]
        alone = sampled(lab, target, drafter, *own, [seed], eos_token_id=eos)
        assert alone.sequences[0, 9 - row :].tolist() == batch.sequences[row, 9 : 9 + end].tolist()
        assert (alone.dspark.accepted_lengths or [[]])[0] == batch.dspark.accepted_lengths[row]
        length = alone.cache.lengths[0]
        assert batch.cache.lengths[row] == length == 9 - row + end - 1  # the last token has no keys and values
        for ours, theirs in zip(batch.cache.layers, alone.cache.layers, strict=True):
            torch.testing.assert_close(ours.keys[row, :, :length], theirs.keys[0, :, :length], rtol=1e-4, atol=1e-4)


def test_permuted_rows(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(5)
    order = [3, 0, 4, 2, 1]
    first = sampled(lab, target, drafter, ids, mask, SEEDS, eos_token_id=[7, 30])
    second = sampled(lab, target, drafter, ids[order], mask[order], [SEEDS[i] for i in order], eos_token_id=[7, 30])
    assert torch.equal(first.sequences[order], second.sequences)
    assert [first.dspark.accepted_lengths[i] for i in order] == second.dspark.accepted_lengths


def test_seeds_of_a_call(lab):
    """One seed serves all rows, each with its own number; the global generator serves where there is none."""
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(3)
    one, many = (sampled(lab, target, drafter, ids, mask, seed).sequences for seed in (5, [5, 6, 7]))
    assert torch.equal(one, many)
    outs = []
    for start in (1, 1, 2):
        torch.manual_seed(start)
        outs.append(sampled(lab, target, drafter, ids, mask, None).sequences)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("scheduler", ["causal", "lagged"])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_a_cut_does_not_depend_on_what_it_drops(lab, scheduler, threshold):
    """
    Another token behind a row's cut means other confidences behind the next one, and perhaps another end of the block.
    The row's cut stays; under the causal scheduler every row's does.
    """
    rows, gamma, changed = 3, 4, 0
    generator = torch.Generator().manual_seed(0)
    options = {"verify_mode": "compact", "scheduler": scheduler, "step_cost_table": lab.table()}
    config = DSparkGenerationConfig(**options, assistant_confidence_threshold=threshold)
    drafter = lab.drafter(block_size=gamma)
    schedule = RoundSchedule(DraftingOptions.resolve(config, drafter), lab.target(), drafter, rows)
    for _ in range(300):
        confidence = torch.rand(rows, gamma, generator=generator).sqrt()
        usable = torch.randint(1, gamma + 1, (rows,), generator=generator).tolist()
        schedule.widths([0, 1, 2], [gamma] * rows, 10.0)
        twin = copy.deepcopy(schedule)
        cut = schedule.lengths([0, 1, 2], confidence, usable, 10.0)
        row = int(torch.randint(rows, (1,), generator=generator))
        if cut[row] + 1 >= gamma:
            continue
        other = confidence.clone()
        other[row, cut[row] + 1 :] = torch.rand(gamma - cut[row] - 1, generator=generator).sqrt()
        ends = list(usable)
        if usable[row] > cut[row]:  # the first dropped token was there; whether the block goes on is up to it
            ends[row] = int(torch.randint(cut[row] + 1, gamma + 1, (1,), generator=generator))
        again = twin.lengths([0, 1, 2], other, ends, 10.0)
        assert again[row] == cut[row]
        if scheduler == "causal":
            assert again == cut
        changed += 1
    assert changed > 50


# ---- never slower than no drafter
# --------------------------------------------------------------------------------------------------------------------


class Counts:
    """Counts the blocks that a drafter makes."""

    def __init__(self, drafter, each=lambda: None):
        self.rounds, block_states = [], drafter.block_states

        def counted(anchor_ids, *args, **kwargs):
            self.rounds.append(len(anchor_ids))
            each()
            return block_states(anchor_ids, *args, **kwargs)

        drafter.block_states = counted


def always_wrong(lab, target, ids, mask, steps, **changes):
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps)
    never = next(token for token in range(64) if not (plain[:, 9:] == token).any())
    drafter = lab.drafter(**changes)
    torch.nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    drafter.unembed = lambda hidden: torch.zeros(*hidden.shape[:2], 64).index_fill_(2, torch.tensor(never), 9.0)
    return plain, drafter


@pytest.mark.parametrize(
    ("mode", "scheduler"),
    [("static", "lagged"), ("compact", "causal"), ("compact", "lagged"), ("cap-accept", "lagged")],
)
def test_drafts_that_all_fail_are_given_up_and_retried(lab, mode, scheduler):
    target, (ids, mask), steps = lab.target(), ragged(3), 100
    plain, drafter = always_wrong(lab, target, ids, mask, steps)
    counts = Counts(drafter)
    config = DSparkGenerationConfig(
        verify_mode=mode,
        scheduler=scheduler,
        step_cost_table=lab.table(0.3),
        do_sample=False,
        max_new_tokens=steps,
        return_dict_in_generate=True,
    )
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert torch.equal(plain, ours.sequences)
    figures = ours.dspark.schedule
    assert figures["rounds"] == ours.dspark.rounds == steps - 1
    assert figures["skipped_rounds"] > 0.8 * figures["rounds"]
    assert figures["row_rounds"] == 3 * figures["rounds"]
    assert figures["skipped_rounds"] == figures["rounds"] - len(counts.rounds)
    assert figures["retries"] >= 6  # twice a row, at least
    drafted = [number for number, sent in enumerate(ours.dspark.verify_lengths[0]) if sent]
    gaps = [b - a for a, b in itertools.pairwise(drafted)]
    assert gaps[-1] > 2 * gaps[0] if mode == "static" else True  # ever more seldom
    assert ours.dspark.to_dict()["schedule"] == figures


def test_drafts_that_cannot_pay_are_never_made(lab):
    target, (ids, mask) = lab.target(), ragged(3)
    drafter = lab.drafter()
    counts = Counts(drafter)
    config = DSparkGenerationConfig(
        step_cost_table=lab.table(50.0), do_sample=False, max_new_tokens=40, return_dict_in_generate=True
    )
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert torch.equal(ours.sequences, target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40))
    assert counts.rounds == []
    assert ours.dspark.schedule["skipped_rounds"] == ours.dspark.rounds == 39


def test_one_row_skips_and_others_draft(lab):
    """A row whose drafts fail does not stop the others, and is not drafted for with them."""
    target, (ids, mask) = lab.target(), ragged(3)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=80)
    texts = texts_of(plain, mask)
    drafter = lab.knowing([texts[0], texts[2]])
    drafter.errs = False
    counts = Counts(drafter)
    config = DSparkGenerationConfig(
        verify_mode="static",
        step_cost_table=lab.table(0.15),
        do_sample=False,
        max_new_tokens=80,
        return_dict_in_generate=True,
    )
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert torch.equal(plain, ours.sequences)
    means = [sum(n) / len(n) for n in ours.dspark.accepted_lengths]
    assert means[1] < 1.3
    assert min(means[0], means[2]) > 2
    assert 2 in counts.rounds
    assert ours.dspark.schedule["skipped_row_rounds"] > 10


# ---- memory
# --------------------------------------------------------------------------------------------------------------------


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("rounds", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_stays_flat(lab, rounds):
    """Every round commits one token of each row. The slow case: `pytest tests/batch/test_rows.py -m slow`."""
    rows, (ids, mask), steps = 8, ragged(8), rounds + 1
    target = lab.target(max_position_embeddings=4096)
    drafter, sizes = lab.drafter(), []
    drafter.unembed = lambda hidden: torch.full((*hidden.shape[:2], 64), -9.0).index_fill_(2, torch.tensor([0]), 9.0)
    Counts(drafter, each=lambda: sizes.append(resident()))
    out = target.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=steps,
        suppress_tokens=None,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert len(sizes) > 0.9 * rounds
    settled = sizes[len(sizes) // 4 :]
    assert max(settled) < 1.01 * settled[0]
    capacity, layers, heads, size, float32 = 9 + steps, 3, 2, 8, 4
    held = sum(t.numel() * t.element_size() for layer in out.cache.layers for t in (layer.keys, layer.values))
    assert held == 2 * layers * rows * heads * capacity * size * float32
    context = [t for pair in out.cache.context._buffers for t in pair]
    assert sum(t.numel() * t.element_size() for t in context) == 2 * 1 * rows * heads * (capacity + 4) * size * float32
