"""Blocks of several sequences in one row, without padding: what each of them sees, as a mask or for flex attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

from ..configuration_dspark import SLIDING, DSparkConfig
from ..masks_dspark import Masks
from .anchors import Blocks


TILE = 128  # flex attention decides for tiles of so many queries and keys whether to look at them


@dataclass(frozen=True)
class Packed:
    """
    The blocks that learn something, and the context that one of them sees.

    Args:
        used (`torch.LongTensor` of shape `(n,)`): Which of the blocks, counted over all rows.
        seen (`torch.LongTensor` of shape `(tokens,)`): Which tokens, counted over all rows with their padding.
        starts (`torch.LongTensor` of shape `(n,)`): Where the context of each block begins among these tokens.
        anchors (`torch.LongTensor` of shape `(n,)`): How long it is.
        position_ids (`torch.LongTensor` of shape `(1, tokens)`): Positions of the tokens in their sequences.
        block_ids, block_position_ids (`torch.LongTensor` of shape `(1, n * block_size)`): Input of the blocks.
        block_size (`int`): Rows of a block.
    """

    used: torch.Tensor
    seen: torch.Tensor
    starts: torch.Tensor
    anchors: torch.Tensor
    position_ids: torch.Tensor
    block_ids: torch.Tensor
    block_position_ids: torch.Tensor
    block_size: int

    @classmethod
    def of(cls, blocks: Blocks, length: int) -> Packed:
        """Packs the blocks of rows of `length` tokens. If none learns, one stays to be run."""
        rows, num, size = blocks.labels.shape
        used = blocks.valid.flatten(0, 1).any(dim=-1).nonzero().squeeze(1)
        used = used if len(used) else used.new_zeros(1)
        row, anchors = used // num, blocks.anchors.flatten()[used]
        visible = anchors.new_zeros(rows).scatter_reduce(0, row, anchors, "amax")  # tokens of each row
        positions = torch.arange(length, device=used.device).expand(rows, -1)
        seen = (positions < visible[:, None]).flatten().nonzero().squeeze(1)
        return cls(
            used=used,
            seen=seen,
            starts=(visible.cumsum(0) - visible)[row],
            anchors=anchors,
            position_ids=positions.reshape(-1)[seen][None],
            block_ids=blocks.ids.view(-1, size)[used].view(1, -1),
            block_position_ids=blocks.position_ids.view(-1, size)[used].view(1, -1),
            block_size=size,
        )

    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Keys that each query sees: starts and ends `(2, queries)` of its context and of its block. The tokens come
        first among the keys, the blocks behind them.
        """
        block = torch.arange(len(self.used), device=self.used.device).repeat_interleave(self.block_size)
        own = self.seen.shape[0] + block * self.block_size
        starts = torch.stack((self.starts[block], own))
        return starts, torch.stack((self.starts[block] + self.anchors[block], own + self.block_size))

    def visible(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(1, 1, queries, tokens + queries)`: a mask of what each query sees."""
        starts, ends = self.ranges()
        keys = torch.arange(self.seen.shape[0] + starts.shape[1], device=starts.device)
        context, own = (
            (keys >= start) & (keys < end) for start, end in zip(starts[..., None], ends[..., None], strict=True)
        )
        return (context | own)[None, None]


def flex_masks(packed: Packed, config: DSparkConfig, kernel: Callable[..., torch.Tensor] = flex_attention) -> Masks:
    """
    The masks of packed blocks as functions that attend with flex attention, which skips tiles that nobody sees;
    windows and causality of the layers are included.

    Args:
        packed (`Packed`): The blocks.
        config (`DSparkConfig`): Of the drafter.
        kernel (`Callable`): `flex_attention` or a compiled form of it.
    """
    starts, ends = packed.ranges()
    queries, keys = starts.shape[1], packed.seen.shape[0] + starts.shape[1]
    places = torch.cat((packed.position_ids, packed.block_position_ids), dim=1)[0]
    query_places, anchors = packed.block_position_ids[0], packed.anchors.repeat_interleave(packed.block_size)
    (context_start, own_start), (context_end, own_end) = starts, ends
    window = config.sliding_window or 0

    def inside(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        context = (k >= context_start[q]) & (k < context_end[q])
        return context | ((k >= own_start[q]) & (k < own_end[q]))

    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return places[k] <= query_places[q]

    def from_anchor(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return places[k] >= anchors[q] - window

    def from_query(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return places[k] > query_places[q] - window

    touched, whole = _tiles(starts, ends, keys)
    masks: Masks = {}
    for kind in dict.fromkeys(config.layer_types):
        rules = [inside]
        if kind in config.causal_layer_types:
            rules.append(causal)
        if kind == SLIDING:
            rules.append(from_anchor if config.sliding_window_from == "anchor" else from_query)
        full = whole if len(rules) == 1 else torch.zeros_like(whole)
        block_mask = BlockMask.from_kv_blocks(
            *_listed(touched & ~full),
            *_listed(full),
            BLOCK_SIZE=TILE,
            mask_mod=and_masks(*rules) if len(rules) > 1 else inside,
            seq_lengths=(queries, keys),
        )
        masks[kind] = functools.partial(_attend, kernel, block_mask)
    return masks


def _attend(
    kernel: Callable[..., torch.Tensor],
    block_mask: BlockMask,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return kernel(queries, keys, values, block_mask=block_mask, scale=scale, enable_gqa=True)


def _tiles(starts: torch.Tensor, ends: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles `(query tiles, key tiles)` of which something is seen, and those of which everything is."""
    first = torch.arange(0, keys, TILE, device=starts.device)
    touched = torch.zeros(starts.shape[1], len(first), dtype=torch.bool, device=starts.device)
    whole = torch.zeros_like(touched)
    for start, end in zip(starts[..., None], ends[..., None], strict=True):
        touched |= (start < first + TILE) & (end > first) & (start < end)
        whole |= (start <= first) & (end >= first + TILE)
    missing = -starts.shape[1] % TILE
    by_tile = [F.pad(t, (0, 0, 0, missing)).view(-1, TILE, len(first)) for t in (touched, whole)]
    return by_tile[0].any(dim=1), by_tile[1].all(dim=1)


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key tiles each query tile has, and which, in the form of `BlockMask`."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32)[None, None], order.int()[None, None]


__all__ = ["Packed", "flex_masks"]
