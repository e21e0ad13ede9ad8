"""Times a target's steps and a drafter's blocks. It knows how to run them, not what the seconds are used for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from .attention import use_ragged_attention
from .cache import RaggedLayer, check_layers, rows_of_states
from .compressed import CompressedRows
from .graphs import Graph
from .modeling_dspark import DSparkDrafter
from .ragged_context import RaggedContext
from .recurrent import RecurrentRows
from .round_size import tiers
from .target import few_rows_linears
from .windows import WINDOW_KEYWORD, VerifyWindow


logger = logging.get_logger(__name__)

WARM_UP = 2


@torch.inference_mode()
def time_steps(
    target: PreTrainedModel,
    rows: Sequence[int],
    tokens_per_row: Sequence[int],
    context: Sequence[int],
    samples: int,
    block: int = 0,
) -> Iterator[tuple[int, int, int, list[float]]]:
    """
    Times packed forwards of the target, as the batched loop makes them: rows that each hold some context read some new
    tokens. On a GPU these are replays of CUDA graphs, unless the target keeps states that are no keys and values.

    Args:
        target (`PreTrainedModel`): On its device and in its dtype.
        rows, tokens_per_row, context (`Sequence[int]`): Every combination of them is timed, each 1 or more.
        samples (`int`): Timed forwards of each, after a warm-up.
        block (`int`): Every total that captured rounds of blocks of so many tokens have is timed as well, its tokens
            shared out evenly.

    Yields:
        `tuple[int, int, int, list[float]]`: Rows, tokens over all rows, context and the seconds of every sample.

    Raises:
        ValueError: a number below 1, or more positions than the target knows.
        NotImplementedError: a target that the batched loop cannot run.
    """
    for name, values in (("rows", rows), ("tokens_per_row", tokens_per_row), ("context", context)):
        if not values or min(values) < 1:
            raise ValueError(f"{name}={list(values)} must hold whole numbers of at least 1.")
    config = target.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    widest = max(*tokens_per_row, 1 + block)
    if most is not None and max(context) + widest > most:
        raise ValueError(
            f"context={max(context)} and {widest} tokens behind it are more than the {most} positions of "
            "this target: give a shorter context."
        )
    check_layers(target)
    noise = torch.Generator().manual_seed(0)
    device = target.device
    with use_ragged_attention(target), few_rows_linears(target):
        for length in context:
            for count in rows:
                # What the cache holds does not change the time, so no prompt has to be read.
                layers = [RaggedLayer(count, length + widest) for _ in range(config.num_hidden_layers)]
                cache = Cache(layers=layers)
                states = rows_of_states(target, count)
                if isinstance(states, CompressedRows):  # how many entries there are to read is known from real tokens
                    for row in range(count):
                        widths = [length * (row == other) for other in range(count)]
                        text = torch.zeros(1, length, dtype=torch.long, device=device)
                        window = VerifyWindow.pack([0] * count, widths, device, certain=True)
                        _packed_step(target, cache, states, text, window, [0] * count)
                elif states is not None:
                    first = torch.zeros(1, count, dtype=torch.long, device=device)
                    window = VerifyWindow.pack([length] * count, [1] * count, device, certain=True)
                    _packed_step(target, cache, states, first, window, [length] * count)
                    states.settle_as_usual([length] * count)
                for total in totals_of(count, tokens_per_row, block):
                    ids = torch.randint(config.vocab_size, (1, total), generator=noise).to(device)
                    widths = [total // count + (row < total % count) for row in range(count)]
                    window = VerifyWindow.pack([length] * count, widths, device)
                    step: Callable[[], object] = partial(
                        _packed_step, target, cache, states, ids, window, [length] * count
                    )
                    step = step if states is not None else _recorded(step, device)
                    yield count, total, length, _sample(step, device, samples)


def totals_of(rows: int, tokens_per_row: Sequence[int], block: int = 0) -> list[int]:
    """Totals that [`time_steps`] times for this number of rows, the smallest first."""
    return sorted({rows * width for width in tokens_per_row} | set(tiers(rows, block) if block else ()))


@torch.inference_mode()
def time_drafts(
    target: PreTrainedModel, drafter: DSparkDrafter, rows: Sequence[int], context: int, samples: int
) -> Iterator[tuple[int, list[float]]]:
    """
    Times the drafting of whole blocks.

    Args:
        target (`PreTrainedModel`): The target, whose embedding and head the drafter uses.
        drafter (`DSparkDrafter`): The drafter; it is bound to the target.
        rows (`Sequence[int]`): Numbers of rows to time.
        context (`int`): Committed tokens of each row.
        samples (`int`): Timed blocks of each, after a warm-up.

    Yields:
        `tuple[int, list[float]]`: Rows and the seconds of every sample.

    Raises:
        ValueError: the drafter does not fit the target.
    """
    drafter.bind_target(target)
    width = drafter.config.num_taps * drafter.config.target_hidden_size
    noise = torch.Generator().manual_seed(0)
    for count in rows:
        window = VerifyWindow.pack([0] * count, [context] * count, drafter.device)
        taps = torch.randn(1, count * context, width, generator=noise).to(drafter.device, drafter.dtype)
        held = RaggedContext(drafter, count, context)
        held.extend(drafter, taps, window.columns[None], window)
        anchors = torch.randint(drafter.config.vocab_size, (count,), generator=noise).to(drafter.device)
        places = torch.full((count,), context, device=drafter.device)
        with few_rows_linears(target, drafter):
            draft = _recorded(partial(drafter.propose, anchors, places, held), drafter.device)
            seconds = _sample(draft, drafter.device, samples)
        yield count, seconds


def _packed_step(
    target: PreTrainedModel,
    cache: Cache,
    states: RecurrentRows | CompressedRows | None,
    ids: torch.Tensor,
    window: VerifyWindow,
    lengths: list[int],
) -> None:
    cache.recurrent = states
    with nullcontext() if states is None else states.reading(window, lengths):
        target(ids, position_ids=window.columns[None], cache=cache, use_cache=True, **{WINDOW_KEYWORD: window})


def _recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Work as the batched loop does it: on a GPU as a graph, where it can be captured."""
    try:
        return Graph(work, device).replay
    except RuntimeError as error:
        logger.warning(f"A step cannot be captured and is timed without a graph: {error}")
        return work


def _sample(work: Callable[[], object], device: torch.device, samples: int) -> list[float]:
    """Seconds of `work()`, `samples` times after a warm-up."""
    seconds = []
    for i in range(WARM_UP + samples):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["time_drafts", "time_steps", "totals_of"]
