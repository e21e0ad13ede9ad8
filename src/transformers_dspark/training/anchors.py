"""Anchors and packed blocks: which positions are trained, and what each block may see. Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch


@dataclass(frozen=True)
class Blocks:
    """
    Isolated blocks of `block_size` rows after `num` anchors of each row, packed densely.

    Args:
        anchors (`torch.LongTensor` of shape `(rows, num)`): Positions of the anchors.
        ids (`torch.LongTensor` of shape `(rows, num * block_size)`): Drafter input: each anchor's token, then mask
            tokens.
        position_ids (`torch.LongTensor` of shape `(rows, num * block_size)`): Absolute positions of those.
        previous (`torch.LongTensor` of shape `(rows, num, block_size)`): True token before each drafted one.
        labels (`torch.LongTensor` of shape `(rows, num, block_size)`): True token at each drafted position.
        valid (`torch.BoolTensor` of shape `(rows, num, block_size)`): False where there is nothing to learn.
    """

    anchors: torch.Tensor
    ids: torch.Tensor
    position_ids: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same on a device."""
        return Blocks(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def sample_anchors(
    loss_mask: torch.Tensor, num: int, generators: Sequence[np.random.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draws up to `num` distinct anchors a row among the positions where both the token and the next one are learned.

    Args:
        loss_mask (`torch.Tensor` of shape `(rows, length)`): Nonzero at tokens that the target wrote; on the CPU.
        num (`int`): Anchors a row.
        generators (`Sequence[np.random.Generator]`): One a row, so that a row's anchors depend neither on the rows
            beside it nor on its padding.

    Returns:
        Positions `(rows, n)`, ascending, with `n` the most that a row has, at least 1, and a mask `(rows, n)` that is
        False for rows with fewer.

    Source: DSpark paper, training (random anchors of each sequence).
    """
    learned = loss_mask.numpy() > 0
    drawn = []
    for row, generator in zip(learned, generators, strict=True):
        candidates = np.flatnonzero(row[:-1] & row[1:])
        drawn.append(np.sort(generator.choice(candidates, min(num, len(candidates)), replace=False)))
    positions = np.full((len(drawn), max(1, *map(len, drawn))), max(loss_mask.shape[1] - 1, 0))
    keep = np.zeros(positions.shape, dtype=bool)
    for row, found in enumerate(drawn):
        positions[row, : len(found)], keep[row, : len(found)] = found, True
    return torch.from_numpy(positions), torch.from_numpy(keep)


def pack_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    mask_token_id: int,
    first_draft_row: int = 0,
) -> Blocks:
    """
    Builds the blocks behind given anchors.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, length)`): Sequences, padded on the right.
        loss_mask (`torch.Tensor` of shape `(rows, length)`): Nonzero at tokens to learn.
        anchors, keep (shape `(rows, num)`): See [`sample_anchors`].
        block_size (`int`): Rows of a block.
        mask_token_id (`int`): Input token of the rows after the anchor.
        first_draft_row (`int`): Row of a block that predicts the token after the anchor: 0 in layout A, 1 in layout F,
            where nothing is learned at row 0.
    """
    length = input_ids.shape[1]
    offsets = torch.arange(block_size, device=input_ids.device)
    positions = anchors[..., None] + offsets  # (rows, num, block_size): the block's own rows
    targets = positions + 1 - first_draft_row
    before = torch.maximum(targets - 1, anchors[..., None])
    inside = (before.clamp(max=length - 1).flatten(1), targets.clamp(max=length - 1).flatten(1))
    previous, labels = (input_ids.gather(1, index).view_as(positions) for index in inside)
    learned = (loss_mask > 0).gather(1, inside[1]).view_as(positions) & (targets < length) & keep[..., None]
    ids = torch.full_like(positions, mask_token_id)
    ids[..., 0] = previous[..., 0]
    valid = torch.zeros_like(learned)
    valid[..., first_draft_row:] = learned[..., first_draft_row:].long().cumprod(dim=-1).bool()  # none behind a gap
    return Blocks(anchors, ids.flatten(1), positions.flatten(1), previous, labels, valid)


def block_mask(blocks: Blocks, length: int) -> torch.Tensor:
    """
    What each packed row sees: the context before its anchor, and every row of its own block.

    Returns:
        `torch.BoolTensor` of shape `(rows, 1, num * gamma, length + num * gamma)`.
    """
    rows, num, gamma = blocks.labels.shape
    anchors = blocks.anchors.repeat_interleave(gamma, dim=1)
    context = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = torch.arange(num, device=anchors.device).repeat_interleave(gamma)
    return torch.cat((context, (own[:, None] == own).expand(rows, -1, -1)), dim=-1)[:, None]
