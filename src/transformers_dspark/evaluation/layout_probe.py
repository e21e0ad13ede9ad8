"""Which layout a drafter was trained for, measured: the same greedy answers are drafted both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..modeling_dspark import DSparkDrafter
from ..training.data import Sequences
from ..training.held_out import held_out_accepted_length


logger = logging.get_logger(__name__)

DOUBTFUL = 1.3  # a drafter that is read rightly gets further; one row off, hardly any draft is accepted


@dataclass(frozen=True)
class LayoutProbe:
    """
    Mean accepted lengths, bonus included, of one drafter in both layouts.

    Args:
        anchor_first (`float`): Read as layout A, `sample_from_anchor=True`.
        filler (`float`): Read as layout F.
    """

    anchor_first: float
    filler: float

    @property
    def sample_from_anchor(self) -> bool:
        """The layout that accepts more."""
        return self.anchor_first >= self.filler


def probe_layout(
    drafter: DSparkDrafter, target: PreTrainedModel, prompts: Sequence[torch.Tensor], max_new_tokens: int = 64
) -> LayoutProbe:
    """
    Lets the target answer each prompt greedily, without the drafter, and counts what the drafter would have been
    credited with in each layout. Nothing of the drafter changes.

    Args:
        drafter (`DSparkDrafter`): It is bound to the target.
        target (`PreTrainedModel`): Its target.
        prompts (`Sequence[torch.LongTensor]`): Token ids `(length,)` of each prompt.
        max_new_tokens (`int`): Most tokens of an answer.

    Raises:
        ValueError: no prompt, or the drafter does not fit the target.
    """
    if not prompts:
        raise ValueError("probe_layout was given no prompts: give some that are typical of what the target answers.")
    drafter.bind_target(target)
    answers = []
    for prompt in prompts:
        ids = prompt.to(target.device)[None]
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        answers.append(target.generate(ids, **options)[0].cpu().numpy())
    starts = np.array([len(prompt) for prompt in prompts])
    sequences, lengths = Sequences(answers, starts, np.ones(len(answers), dtype=bool)), {}
    for anchor_first in (True, False):
        with _read_as(drafter, anchor_first):
            lengths[anchor_first] = held_out_accepted_length(drafter, target, sequences).mean_accepted_length
    probe, declared = LayoutProbe(lengths[True], lengths[False]), drafter.config.sample_from_anchor
    if lengths[declared] < max(DOUBTFUL, lengths[not declared]):
        better = lengths[not declared] >= max(DOUBTFUL, lengths[declared])
        advice = f"open it with sample_from_anchor={not declared}" if better else "it may belong to another target"
        logger.warning(
            f"This drafter's accepted length is {lengths[declared]:.2f} in its own layout (sample_from_anchor="
            f"{declared}, by {drafter.config.layout_source}) and {lengths[not declared]:.2f} in the other: {advice}."
        )
    return probe


@contextmanager
def _read_as(drafter: DSparkDrafter, anchor_first: bool) -> Iterator[None]:
    config = drafter.config
    before = config.sample_from_anchor, config.confidence_temperatures
    config.sample_from_anchor, config.confidence_temperatures = anchor_first, None  # there is one for each draft
    try:
        yield
    finally:
        config.sample_from_anchor, config.confidence_temperatures = before


__all__ = ["LayoutProbe", "probe_layout"]
