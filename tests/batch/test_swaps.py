"""Rows that change places, and windows packed for rows of any length."""

import random

import pytest
import torch

from transformers_dspark import ragged_context
from transformers_dspark.ragged_context import swap_items, swap_rows, to_the_front
from transformers_dspark.windows import VerifyWindow


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_pairs_of_rows_are_exchanged(at_once, monkeypatch):
    buffers = [torch.randn(9, 2, 5), torch.arange(9), torch.randn(4, 9).t(), torch.randn(9, 3, 8)[:, :, :6]]
    monkeypatch.setattr(ragged_context, "SWAPPED_BYTES", 2 * at_once * 6 * 4 * 3)
    before, items = [buffer.clone() for buffer in buffers], list(range(9))
    first, second = [0, 7, 2, 3], [8, 1, 5, 6]
    swap_items(items, first, second)
    assert items == [8, 7, 5, 6, 4, 2, 3, 1, 0]
    swap_rows(buffers, first, second)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer, old[items])
    swap_rows(buffers, [], [])
    swap_rows(buffers, second, first)
    assert all(torch.equal(buffer, old) for buffer, old in zip(buffers, before, strict=True))


def test_those_that_are_not_done_come_first():
    for seed in range(50):
        dice = random.Random(seed)
        done = [dice.random() < 0.5 for _ in range(dice.randint(0, 12))]
        live = done.count(False)
        first, second = to_the_front(done)
        assert len(first) == sum(done[:live])  # no more than are in the way
        swap_items(done, first, second)
        assert not any(done[:live])
        assert all(done[live:])


def test_packed_windows():
    lengths, widths = [4, 0, 7, 1], [3, 5, 0, 1]
    window = VerifyWindow.pack(lengths, widths, torch.device("cpu"))
    assert window.places.dtype == torch.long
    assert window.places.T.tolist() == [
        [row, lengths[row] + offset, offset] for row, width in enumerate(widths) for offset in range(width)
    ]
    assert window.spans.dtype == torch.int32
    assert window.spans.tolist() == [[4, 0, 7, 1, 0], [0, 3, 8, 8, 9]]
    assert (window.num_rows, window.width, window.length, window.before) == (4, 5, 7, 7)
