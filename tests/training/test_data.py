"""Batches of answers: budgets, epochs, shares of processes, and what a trainer reads of a row."""

import numpy as np
import pytest
import torch

from transformers_dspark.training.data import (
    AnswerDataset,
    Sequences,
    TokenBatches,
    batch_indices,
    collate,
    frequent_tokens,
    sequences_of,
    split,
)


def test_batches_cover_every_sequence_once_within_the_budget(answers):
    lengths = np.array([len(ids) for ids in answers.ids])
    for seed in range(5):
        groups = batch_indices(lengths, 100, np.random.default_rng(seed))
        assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
        assert all(len(group) * lengths[group].max() <= 100 for group in groups)
    # a sequence beyond the budget is a batch of its own
    groups = batch_indices(np.array([5, 500, 5]), 100, np.random.default_rng(0))
    assert sorted(map(len, groups)) == [1, 2]


def lengths_of(answers) -> np.ndarray:
    return np.array([len(ids) for ids in answers.ids])


def test_epochs_differ_and_repeat(answers):
    batches = TokenBatches(lengths_of(answers), 100, seed=0)
    first = list(batches)
    assert first == list(batches)
    assert len(first) == len(batches)
    batches.set_epoch(1)
    assert first != list(batches)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_process_has_as_many_batches_in_every_epoch(answers, world):
    lengths = lengths_of(answers)
    shares = [TokenBatches(lengths, 60, 0, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    for epoch in range(6):
        for share in shares:
            share.set_epoch(epoch)
        batches = [list(share) for share in shares]
        assert {len(part) for part in batches} == {len(shares[0])}
        seen = [index for part in batches for batch in part for index in batch]
        assert len(seen) == len(set(seen))  # nothing twice
        assert len(seen) > 0.8 * len(lengths)


def test_too_few_sequences_for_all_processes():
    share = TokenBatches(np.array([5]), 100, 0, rank=1, world=2)
    assert list(share) == [[0]]


def test_rows():
    dataset = AnswerDataset(
        Sequences([np.array([5, 6, 7]), np.array([8, 9])], np.array([1, 1]), np.array([True, True]))
    )
    batch = collate([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    # as Transformers' own collators have it, and as lists
    other = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": torch.tensor([8, 9]), "loss_mask": [0, 1]},
    ]
    assert all(torch.equal(batch[name], part) for name, part in collate(other).items())
    assert sequences_of(other).starts.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"A row has \['input_ids'\]: give"):
        collate([{"input_ids": [1]}])


def test_split_keeps_greedy_answers_aside(answers):
    mixed = Sequences(answers.ids, answers.starts, np.arange(len(answers)) % 2 == 0)
    train, held_out = split(mixed, 256, seed=0)
    assert len(held_out) == 4  # at most a tenth
    assert held_out.greedy.all()
    assert len(train) + len(held_out) == len(mixed)
    ours = {ids.tobytes() for ids in held_out.ids}
    assert not ours & {ids.tobytes() for ids in train.ids}


def test_frequent_tokens():
    sequences = Sequences([np.array([9, 9, 9, 3, 3, 5, 2])], np.array([3]), np.array([True]))
    assert frequent_tokens(sequences, 2, 10).tolist() == [2, 3]  # the prompt does not count, ties go to the smaller id
