"""Accepted length on held-out greedy answers: decoded, or replayed, since the target's tokens are already known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..target import TargetTaps
from ..telemetry import GenerationStats
from .anchors import block_mask, pack_blocks
from .data import AnswerDataset, Sequences


@torch.inference_mode()
def held_out_accepted_length(
    drafter: DSparkDrafter, target: PreTrainedModel, sequences: Sequences, anchors_at_once: int = 128
) -> GenerationStats:
    """
    Walks each answer as greedy decoding would: draft at the anchor, count the leading drafts that the target wrote,
    jump behind them and the bonus token.

    Args:
        drafter (`DSparkDrafter`): Bound to `target`.
        sequences (`Sequences`): Answers written at temperature 0.
        anchors_at_once (`int`): Blocks packed in one pass.

    Returns:
        `GenerationStats`: What greedy decoding of these answers would report, each answer being a row; no times.
    """
    config = drafter.config
    gamma, first_row = config.num_draft_tokens, config.first_draft_row
    rows, answers = [], AnswerDataset(sequences)
    for row in range(len(sequences)):
        ids, mask = (answers[row][name][None].to(drafter.device) for name in ("input_ids", "loss_mask"))
        start, length = int(sequences.starts[row]), ids.shape[1]
        if length < start + 2:  # the prefill alone gives an answer of one token
            continue
        taps, _ = target_states(target, ids, config.target_layer_ids)
        matches = []
        for first in range(start, length - 1, anchors_at_once):
            anchors = torch.arange(first, min(first + anchors_at_once, length - 1), device=ids.device)[None]
            keep = torch.ones_like(anchors, dtype=torch.bool)
            blocks = pack_blocks(ids, mask, anchors, keep, config.block_size, config.mask_token_id, first_row)
            positions = torch.arange(length, device=ids.device)[None]
            states = drafter(taps, positions, blocks.ids, blocks.position_ids, block_mask(blocks, length))
            proposal = drafter.chain(blocks.previous[0, :, 0], states.view(anchors.shape[1], config.block_size, -1))
            labels, valid = blocks.labels[0, :, first_row:], blocks.valid[0, :, first_row:]
            matches.append(((proposal.tokens == labels) & valid).long().cumprod(dim=-1).sum(dim=-1))
        accepted = torch.cat(matches).tolist()
        stats, place = GenerationStats(), 0
        while place < len(accepted):
            known = len(accepted) - place  # tokens of the answer behind the anchor
            drafts = accepted[place]
            stats.record_round([min(gamma, known)], [drafts], [min(drafts + 1, known)])
            place += drafts + 1
        rows.append(stats)
    return GenerationStats.merge(rows)


def decoded_accepted_length(
    drafter: DSparkDrafter, target: PreTrainedModel, sequences: Sequences, rows_at_once: int = 8
) -> GenerationStats:
    """
    Decodes the prompts of answers greedily with the drafter, each for as many tokens as its answer has, or more where
    answers of other lengths share its batch.

    Returns:
        `GenerationStats`: What `generate` reports.
    """
    device, calls = target.get_input_embeddings().weight.device, []
    for first in range(0, len(sequences), rows_at_once):
        rows = range(first, min(first + rows_at_once, len(sequences)))
        starts = [int(sequences.starts[row]) for row in rows]
        ids = torch.zeros(len(rows), max(starts), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[place, max(starts) - start :] = torch.from_numpy(sequences.ids[row][:start].astype(np.int64))
            mask[place, max(starts) - start :] = 1
        output = target.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            assistant_model=drafter,
            max_new_tokens=max(len(sequences.ids[row]) - start for row, start in zip(rows, starts, strict=True)),
            do_sample=False,
            return_dict_in_generate=True,
        )
        calls.append(output.dspark)
    return GenerationStats.merge(calls)


def backbone_of(target: PreTrainedModel) -> PreTrainedModel:
    """The target without its head; with the adapters that `peft` may have put into its layers."""
    return (target.get_base_model() if hasattr(target, "get_base_model") else target).base_model


def target_states(
    target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Taps `(rows, length, num_taps * hidden)` and normed last states `(rows, length, hidden)` of right-padded sequences.

    Raises:
        NotImplementedError: the target does not return them.
    """
    taps = TargetTaps(backbone_of(target), layer_ids)
    with taps:
        outputs = taps.run(input_ids, use_cache=False, **taps.forward_kwargs)
        if any(outputs.get(name) is None for name in ("hidden_states", "last_hidden_state")):
            raise NotImplementedError(
                f"{type(backbone_of(target)).__name__} does not return its hidden states; no drafter can read it."
            )
        return taps.read(outputs, target.device, target.dtype), outputs.last_hidden_state
