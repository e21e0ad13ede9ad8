"""Training and held-out replay see the same blocks as drafting, for each published family: layouts, windows, maps."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints.families import SHAPE, TWINS, canonical
from transformers_dspark.training.anchors import block_mask, pack_blocks
from transformers_dspark.training.held_out import target_states
from transformers_dspark.training.losses import LossWeights
from transformers_dspark.training.objective import Objective


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).eval().requires_grad_(False)


def test_blocks_of_the_filler_layout():
    ids, mask = torch.arange(10, 20)[None], torch.ones(1, 10)
    mask[0, 7] = 0
    anchors, keep = torch.tensor([[2, 5, 8]]), torch.tensor([[True, True, True]])
    blocks = pack_blocks(ids, mask, anchors, keep, 4, 60, 1)
    assert blocks.ids.tolist() == [[12, 60, 60, 60, 15, 60, 60, 60, 18, 60, 60, 60]]
    assert blocks.position_ids.tolist() == [[2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11]]
    assert blocks.previous[0, 0].tolist() == [12, 12, 13, 14]  # row 0 and row 1 follow the anchor
    assert blocks.labels[0, 0].tolist() == [12, 13, 14, 15]
    # row 0 learns nothing; neither does what lies behind a gap or the end
    assert blocks.valid[0].int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("name", TWINS)
@torch.no_grad()
def test_packed_blocks_draft_as_the_loop_does(name, target):
    drafter = canonical(TWINS[name]).bind_target(target)
    config, ids = drafter.config, torch.randint(0, 60, (1, 14), generator=torch.Generator().manual_seed(3))
    taps, _ = target_states(target, ids, config.target_layer_ids)
    anchors = torch.arange(1, 13)[None]
    blocks = pack_blocks(
        ids,
        torch.ones_like(ids),
        anchors,
        torch.ones_like(anchors, dtype=torch.bool),
        config.block_size,
        config.mask_token_id,
        config.first_draft_row,
    )
    states = drafter(taps, torch.arange(14)[None], blocks.ids, blocks.position_ids, block_mask(blocks, 14))
    packed = drafter.chain(ids[0, anchors[0]], states.view(anchors.shape[1], config.block_size, -1))
    for index, anchor in enumerate(anchors[0].tolist()):
        context = drafter.new_context()
        drafter.extend_context(context, taps[:, :anchor], torch.arange(anchor)[None])
        proposal = drafter.propose(ids[:, anchor], torch.tensor([anchor]), context)
        assert torch.equal(proposal.tokens[0], packed.tokens[index])
        torch.testing.assert_close(proposal.logits[0], packed.logits[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TWINS)
def test_loss_by_hand(name, target):
    """Cross entropy and total variation at the rows that draft, in the layout's own order."""
    drafter = canonical(TWINS[name]).bind_target(target)
    config, first = drafter.config, drafter.config.first_draft_row
    ids = torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(3)) * 2  # all of them can be drafted
    mask = torch.ones(1, 12)
    taps, last = target_states(target, ids, config.target_layer_ids)
    anchors, size = torch.tensor([[3, 6]]), config.block_size
    blocks = pack_blocks(ids, mask, anchors, torch.tensor([[True, True]]), size, config.mask_token_id, first)
    weights = LossWeights(cross_entropy=0.7, l1=0.3, confidence=0.0, decay=2.0)
    loss = Objective(drafter, weights)(taps, last, blocks)
    loss.total.backward()
    states = drafter(taps, torch.arange(12)[None], blocks.ids, blocks.position_ids, block_mask(blocks, 12))
    vocabulary, total, denominator = drafter.draft_vocabulary(), 0.0, 0.0
    if config.has_reduced_vocabulary:
        assert set(ids.flatten().tolist()) <= set(vocabulary.tolist())
    with torch.no_grad():
        for block, anchor in enumerate(anchors[0].tolist()):
            rows, state = states[0, block * size : (block + 1) * size], None
            if first and drafter.markov_head is not None:
                embedded = drafter.markov_head.embed(ids[0, anchor])
                _, state = drafter.markov_head.features(embedded, rows[0], None)
            for k in range(config.num_draft_tokens):
                logits = drafter.unembed(rows[first + k])
                if drafter.markov_head is not None:
                    embedded = drafter.markov_head.embed(ids[0, anchor + k])
                    features, state = drafter.markov_head.features(embedded, rows[first + k], state)
                    logits = logits + drafter.markov_head.markov_w2(features)
                draft_probs = torch.zeros(config.vocab_size)
                draft_probs[vocabulary] = logits.softmax(dim=-1)
                target_probs = target.lm_head(last[0, anchor + k]).softmax(dim=-1)
                weight = math.exp(-k / 2.0)
                cross_entropy = -draft_probs[ids[0, anchor + k + 1]].log()
                total += weight * (0.7 * cross_entropy + 0.3 * (draft_probs - target_probs).abs().sum())
                denominator += weight
    assert loss.total.item() == pytest.approx(float(total / denominator), rel=1e-4)
    assert loss.positions == 2 * config.num_draft_tokens
    assert drafter.fc.weight.grad.abs().sum() > 0
