"""Answers on disk -> padded batches of similar length, in an order that a seed and an epoch decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

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
    answers = [ids[start:] for ids, start in zip(sequences.ids, sequences.starts, strict=True)]
    counts = np.bincount(np.concatenate(answers), minlength=vocab_size)
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


class TokenBatches(Sampler[list[int]]):
    """
    Batches of similar length, `tokens_per_batch` padded tokens at most, in an order that seed and epoch decide.

    Each epoch has as many batches as the first, which other groupings miss by a few: a surplus is left out, and
    where some are missing the largest are halved. Process `rank` of `world` has every `world`-th.
    """

    def __init__(self, lengths: np.ndarray, tokens_per_batch: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self.lengths, self.tokens_per_batch, self.seed = lengths, tokens_per_batch, seed
        self.rank, self.world, self.epoch = rank, world, 0
        self.count = max(1, round(len(self._groups(0)) / world))

    def _groups(self, epoch: int) -> list[np.ndarray]:
        return batch_indices(self.lengths, self.tokens_per_batch, np.random.default_rng((self.seed, epoch)))

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        groups, wanted = self._groups(self.epoch), self.count * self.world
        while len(groups) < wanted:
            largest = max(range(len(groups)), key=lambda i: len(groups[i]))
            whole = groups[largest]
            half = max(1, len(whole) // 2)
            groups[largest] = whole[:half]
            groups.append(whole[half:] if len(whole) > 1 else whole)
        for group in groups[self.rank : wanted : self.world]:
            yield group.tolist()


class BatchLoader(DataLoader):
    """A loader of [`TokenBatches`] that is told the epoch."""

    batch_sampler: TokenBatches

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.batch_sampler.set_epoch(epoch)


class AnswerDataset(Dataset):
    """Conversations as a trainer reads them: `input_ids` and `loss_mask`, `(length,)`; 1 where the target wrote."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.sequences.ids[index].astype(np.int64))
        mask = torch.zeros(len(ids))
        mask[int(self.sequences.starts[index]) :] = 1.0
        return {"input_ids": ids, "loss_mask": mask}


def sequences_of(dataset: Any) -> Sequences:
    """A dataset's rows as sequences; each answer begins at the first token that is learned, and counts as greedy."""
    if isinstance(dataset, AnswerDataset):
        return dataset.sequences
    rows = [_tensors(dataset[index]) for index in range(len(dataset))]
    starts = [int(mask.argmax()) for _, mask in rows]
    return Sequences([ids.numpy() for ids, _ in rows], np.array(starts), np.ones(len(rows), dtype=bool))


def _tensors(row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and loss mask of a row that has `loss_mask`, or `labels` with -100 where nothing is learned."""
    ids = torch.as_tensor(row["input_ids"])
    if "loss_mask" in row:
        return ids, torch.as_tensor(row["loss_mask"]).float()
    if "labels" in row:
        return ids, (torch.as_tensor(row["labels"]) != -100).float()
    raise ValueError(f"A row has {sorted(row)}: give `input_ids` with `loss_mask`, or with `labels`.")


def collate(rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads rows on the right with zeros to `input_ids` and `loss_mask`, both `(rows, length)`."""
    ids, masks = zip(*map(_tensors, rows), strict=True)
    return {
        "input_ids": pad_sequence(list(ids), batch_first=True),
        "loss_mask": pad_sequence(list(masks), batch_first=True),
    }
