"""What a row of a block may look at: windows and causality of a drafter's layers, from absolute positions alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .configuration_dspark import SLIDING, DSparkConfig


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Mask = torch.Tensor | Attend | None  # `None` shows everything; a function does the attention itself
Masks = dict[str, Mask]  # by layer type


def block_masks(
    config: DSparkConfig,
    context_positions: torch.Tensor,
    block_positions: torch.Tensor,
    visible: torch.Tensor | None = None,
) -> Masks:
    """
    Masks of packed blocks, one a layer type.

    Args:
        config (`DSparkConfig`): Says which layer types have a window or are causal in the block.
        context_positions (`torch.LongTensor` of shape `(rows, length)`): Absolute positions of the context.
        block_positions (`torch.LongTensor` of shape `(rows, queries)`): Those of whole blocks, `block_size` rows each.
        visible (`torch.BoolTensor` of shape `(rows, 1, queries, length + queries)`, *optional*): True where a row may
            look at all: its own block and the context before it. `None` where that is everything.

    Returns:
        `dict`: For each layer type in use, a mask like `visible`; some dimensions may be 1.

    Source: windows that begin at the query, SGLang and vLLM; at the anchor, speculators.
    """
    keys = torch.cat((context_positions, block_positions), dim=1)[:, None, None]
    queries = block_positions[:, None, :, None]
    anchors = block_positions.unflatten(1, (-1, config.block_size))[..., :1]
    anchors = anchors.expand(-1, -1, config.block_size).flatten(1)[:, None, :, None]
    masks: Masks = {}
    for kind in dict.fromkeys(config.layer_types):
        conditions = [] if visible is None else [visible]
        if kind in config.causal_layer_types:
            conditions.append(keys <= queries)
        if kind == SLIDING and config.sliding_window is not None:
            if config.sliding_window_from == "anchor":
                conditions.append(keys >= anchors - config.sliding_window)
            else:
                conditions.append(keys > queries - config.sliding_window)
        masks[kind] = functools.reduce(torch.logical_and, conditions) if conditions else None
    return masks


__all__ = ["Attend", "Mask", "Masks", "block_masks"]
