"""Accepted length on held-out greedy answers, replayed without decoding: the target's tokens are already known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..target import TargetTaps
from .anchors import block_mask, pack_blocks
from .data import Sequences, collate


@dataclass(frozen=True)
class HeldOut:
    """`accepted_length` includes the bonus token; `by_position`: conditional acceptance at each block position."""

    accepted_length: float
    by_position: list[float]
    rounds: int


@torch.inference_mode()
def held_out_accepted_length(
    drafter: DSparkDrafter, target: PreTrainedModel, sequences: Sequences, anchors_at_once: int = 128
) -> HeldOut:
    """
    Walks each answer as greedy decoding would: draft at the anchor, count the leading drafts that the target wrote,
    jump behind them and the bonus token.

    Args:
        drafter (`DSparkDrafter`): Bound to `target`.
        sequences (`Sequences`): Answers written at temperature 0.
        anchors_at_once (`int`): Blocks packed in one pass.
    """
    gamma = drafter.config.block_size
    rounds, committed = 0, 0
    tried, passed = torch.zeros(gamma), torch.zeros(gamma)
    for row in range(len(sequences)):
        ids, mask = (t.to(drafter.device) for t in collate(sequences.pick(torch.tensor([row]).numpy())))
        start, length = int(sequences.starts[row]), ids.shape[1]
        if length < start + 2:  # the prefill alone gives an answer of one token
            continue
        taps, _ = target_states(target, ids, drafter.config.target_layer_ids)
        matches = []
        for first in range(start, length - 1, anchors_at_once):
            anchors = torch.arange(first, min(first + anchors_at_once, length - 1), device=ids.device)[None]
            blocks = pack_blocks(
                ids, mask, anchors, torch.ones_like(anchors, dtype=torch.bool), gamma, drafter.config.mask_token_id
            )
            positions = torch.arange(length, device=ids.device)[None]
            states = drafter(taps, positions, blocks.ids, blocks.position_ids, block_mask(blocks, length))
            proposal = drafter.chain(blocks.previous[0, :, 0], states.view(anchors.shape[1], gamma, -1))
            matches.append(
                ((proposal.tokens == blocks.labels[0]) & blocks.valid[0]).long().cumprod(dim=-1).sum(dim=-1)
            )
        accepted = torch.cat(matches).tolist()
        place = 0
        while place < len(accepted):
            room = min(gamma, len(accepted) - place)  # drafts whose truth is known
            tried[: min(accepted[place] + 1, room)] += 1
            passed[: accepted[place]] += 1
            rounds += 1
            committed += min(accepted[place] + 1, room)
            place += accepted[place] + 1
    return HeldOut(committed / max(rounds, 1), (passed / tried.clamp(min=1)).tolist(), rounds)


def target_states(
    target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Taps `(rows, length, num_taps * hidden)` and normed last states `(rows, length, hidden)` of right-padded sequences.
    """
    taps = TargetTaps(target, layer_ids)
    with taps:
        outputs = target.base_model(input_ids, use_cache=False, **taps.forward_kwargs)
        return taps.read(outputs, target.device, target.dtype), outputs.last_hidden_state
