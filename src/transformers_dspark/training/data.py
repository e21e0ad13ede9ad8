"""Answers on disk -> padded batches of similar length, in an order that a seed and an epoch decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .answers import read_answers


@dataclass(frozen=True)
class Sequences:
    """
    Conversations of one set: `ids` holds `(length,)` arrays, `starts` where each answer begins, `greedy` whether it
    was written at temperature 0.
    """

    ids: list[np.ndarray]
    starts: np.ndarray
    greedy: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def pick(self, indices: np.ndarray) -> Sequences:
        return Sequences([self.ids[i] for i in indices], self.starts[indices], self.greedy[indices])


def load_sequences(folders: list[Path], max_length: int) -> Sequences:
    """
    Reads folders made by `dspark data answers`; answers too short to hold a block's first label are left out.

    Raises:
        ValueError: no usable answer.
    """
    ids, starts, greedy = [], [], []
    for folder in folders:
        for answer in read_answers(folder):
            cut = answer.ids[:max_length]
            if len(cut) >= answer.prompt_length + 2:
                ids.append(cut)
                starts.append(answer.prompt_length)
                greedy.append(answer.temperature == 0.0)
    if not ids:
        raise ValueError(
            f"{', '.join(map(str, folders))}: no answer of two tokens or more within max_length={max_length}."
        )
    return Sequences(ids, np.array(starts), np.array(greedy))


def split(sequences: Sequences, held_out: int, seed: int) -> tuple[Sequences, Sequences]:
    """Training set, and up to `held_out` greedy answers (at most a tenth of all) that it does not contain."""
    candidates = np.flatnonzero(sequences.greedy)
    wanted = min(held_out, len(sequences) // 10)
    chosen = np.random.default_rng(seed).permutation(candidates)[:wanted]
    rest = np.setdiff1d(np.arange(len(sequences)), chosen)
    return sequences.pick(rest), sequences.pick(np.sort(chosen))


def frequent_tokens(sequences: Sequences, size: int, vocab_size: int) -> torch.Tensor:
    """The `size` most frequent tokens of the answers, ascending `(size,)`; ties go to the smaller id."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids, start in zip(sequences.ids, sequences.starts, strict=True):
        counts += np.bincount(ids[start:], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def batch_indices(lengths: np.ndarray, tokens_per_batch: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Groups of similar length whose padded size stays within the budget, in random order."""
    shuffled = rng.permutation(len(lengths))
    ordered = np.concatenate(
        [w[np.argsort(lengths[w], kind="stable")] for w in np.array_split(shuffled, max(1, len(shuffled) // 8192))]
    )
    groups, start, longest = [], 0, 0
    for end, index in enumerate(ordered):
        longest = max(longest, int(lengths[index]))
        if end > start and longest * (end - start + 1) > tokens_per_batch:
            groups.append(ordered[start:end])
            start, longest = end, int(lengths[index])
    groups.append(ordered[start:])
    return [groups[i] for i in rng.permutation(len(groups))]


def _groups(sequences: Sequences, tokens_per_batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    lengths = np.array([len(ids) for ids in sequences.ids])
    return batch_indices(lengths, tokens_per_batch, np.random.default_rng((seed, epoch)))


def count_batches(sequences: Sequences, tokens_per_batch: int, seed: int) -> int:
    """Batches of the first epoch; later ones differ by a few, since they group other sequences."""
    return len(_groups(sequences, tokens_per_batch, seed, 0))


def batches(
    sequences: Sequences, tokens_per_batch: int, seed: int, epoch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields `(input_ids, loss_mask)` of one epoch, both `(rows, length)`, padded on the right with zeros."""
    for group in _groups(sequences, tokens_per_batch, seed, epoch):
        yield collate(sequences.pick(group))


def collate(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads sequences to `(input_ids, loss_mask)`; the mask is 1 on the answers."""
    longest = max(len(ids) for ids in sequences.ids)
    padded = np.zeros((len(sequences), longest), dtype=np.int64)
    mask = np.zeros((len(sequences), longest), dtype=np.float32)
    for row, (ids, start) in enumerate(zip(sequences.ids, sequences.starts, strict=True)):
        padded[row, : len(ids)] = ids
        mask[row, start : len(ids)] = 1.0
    return torch.from_numpy(padded), torch.from_numpy(mask)
