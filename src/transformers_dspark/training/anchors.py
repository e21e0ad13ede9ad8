"""Anchors and packed blocks: which positions are trained, and what each block may see. Tensors in, tensors out."""

from __future__ import annotations

from dataclasses import dataclass

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


def sample_anchors(
    loss_mask: torch.Tensor, num: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draws up to `num` distinct anchors a row among the positions where both the token and the next one are learned.

    Args:
        loss_mask (`torch.Tensor` of shape `(rows, length)`): Nonzero at tokens that the target wrote.
        num (`int`): Anchors a row.
        generator (`torch.Generator`, *optional*): On `loss_mask`'s device.

    Returns:
        Positions `(rows, num)`, ascending, and a mask `(rows, num)` that is False for rows with fewer candidates.

    Source: DSpark paper, training (random anchors of each sequence).
    """
    learned = loss_mask > 0
    candidates = torch.zeros_like(learned)
    candidates[:, :-1] = learned[:, :-1] & learned[:, 1:]
    num = min(num, candidates.shape[1])
    keys = torch.rand(candidates.shape, generator=generator, device=candidates.device).masked_fill(~candidates, -1.0)
    top, positions = keys.topk(num, dim=1)
    keep = top >= 0
    positions, order = positions.masked_fill(~keep, candidates.shape[1] - 1).sort(dim=1)
    return positions, keep.gather(1, order)


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
