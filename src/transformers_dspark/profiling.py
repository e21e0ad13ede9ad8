"""Times a target's steps and a drafter's blocks. It knows how to run them, not what the seconds are used for."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from .modeling_dspark import DSparkDrafter
from .target import few_rows_head


WARM_UP = 2


@torch.inference_mode()
def time_steps(
    target: PreTrainedModel, rows: Sequence[int], tokens_per_row: Sequence[int], context: Sequence[int], samples: int
) -> Iterator[tuple[int, int, int, list[float]]]:
    """
    Times the target's forward over rows that each hold some context and read some new tokens.

    Args:
        target (`PreTrainedModel`): On its device and in its dtype.
        rows, tokens_per_row, context (`Sequence[int]`): Every combination of them is timed, each 1 or more.
        samples (`int`): Timed forwards of each, after a warm-up.

    Yields:
        `tuple[int, int, int, list[float]]`: Rows, tokens over all rows, context and the seconds of every sample.

    Raises:
        ValueError: a number below 1, or more positions than the target knows.
    """
    for name, values in (("rows", rows), ("tokens_per_row", tokens_per_row), ("context", context)):
        if not values or min(values) < 1:
            raise ValueError(f"{name}={list(values)} must hold whole numbers of at least 1.")
    config = target.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and max(context) + max(tokens_per_row) > most:
        raise ValueError(
            f"context={max(context)} and {max(tokens_per_row)} tokens behind it are more than the {most} positions of "
            "this target: give a shorter context."
        )
    noise = torch.Generator().manual_seed(0)

    def some_ids(*shape: int) -> torch.Tensor:
        return torch.randint(config.vocab_size, shape, generator=noise).to(target.device)

    with few_rows_head(target):
        for length in context:
            prefix = DynamicCache(config=target.config)
            target(some_ids(1, length), cache=prefix, use_cache=True, logits_to_keep=1)
            for count in rows:
                cache = copy.deepcopy(prefix)
                cache.batch_repeat_interleave(count)
                for width in tokens_per_row:
                    ids = some_ids(count, width)

                    def restore(cache: DynamicCache = cache) -> DynamicCache:
                        held = copy.copy(cache)  # a step gives layers new tensors, so the old ones serve again
                        held.layers = [copy.copy(layer) for layer in cache.layers]
                        return held

                    def step(held: DynamicCache, ids: torch.Tensor = ids) -> None:
                        target(ids, cache=held, use_cache=True)

                    yield count, count * width, length, _sample(step, restore, target.device, samples)


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
        taps = torch.randn(count, context, width, generator=noise).to(drafter.device, drafter.dtype)
        positions = torch.arange(context, device=drafter.device).expand(count, context)
        held = drafter.new_context()
        drafter.extend_context(held, taps, positions)
        anchors = torch.randint(drafter.config.vocab_size, (count,), generator=noise).to(drafter.device)
        places = torch.full((count,), context, device=drafter.device)

        def block(
            _: None, anchors: torch.Tensor = anchors, places: torch.Tensor = places, held: object = held
        ) -> None:
            drafter.propose(anchors, places, held)  # type: ignore[arg-type]

        yield count, _sample(block, lambda: None, drafter.device, samples)


def _sample(
    work: Callable[..., None], prepare: Callable[[], object], device: torch.device, samples: int
) -> list[float]:
    """Seconds of `work(prepare())`, without the preparation, `samples` times after a warm-up."""
    seconds = []
    for i in range(WARM_UP + samples):
        given = prepare()
        _wait(device)
        start = time.perf_counter()
        work(given)
        _wait(device)
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["time_drafts", "time_steps"]
