"""Anchors, blocks, losses and the objective against naive formulas, and training against inference."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.training.anchors import Blocks, block_mask, pack_blocks, sample_anchors
from transformers_dspark.training.held_out import target_states
from transformers_dspark.training.losses import LossWeights, loss_sums
from transformers_dspark.training.objective import Objective
from transformers_dspark.training.packing import Packed, flex_masks


GAMMA, MASK = 4, 49
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def make(**changes) -> DSparkDrafter:
    torch.manual_seed(0)
    options = {
        "num_hidden_layers": 2,
        "block_size": GAMMA,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "markov_rank": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "initializer_range": 0.3,
    }
    drafter = DSparkDrafter(DSparkConfig(**SHAPE | options | changes))
    if drafter.config.has_reduced_vocabulary:
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
    return drafter


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(**SHAPE, num_hidden_layers=3, initializer_range=0.3)
    return LlamaForCausalLM(config).requires_grad_(False).eval()


def batch(rows: int = 2, length: int = 18) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 48, (rows, length), generator=generator)
    mask = torch.zeros(rows, length)
    for row, (start, end) in enumerate([(3, 18), (5, 12), (16, 18)][:rows]):
        mask[row, start:end] = 1
    return ids, mask


def generators(rows: int, seed: int = 3) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, row)) for row in range(rows)]


def blocks_of(ids: torch.Tensor, mask: torch.Tensor, num: int = 6) -> Blocks:
    anchors, keep = sample_anchors(mask, num, generators(len(mask)))
    return pack_blocks(ids, mask, anchors, keep, GAMMA, MASK)


# ---- anchors


def test_anchors():
    mask = torch.zeros(3, 40)
    mask[0, 5:30] = 1
    mask[0, 12] = 0  # a gap
    mask[1, 10:14] = 1
    mask[2, 39] = 1  # its next token does not exist
    counts = torch.zeros(3, 40)
    for seed in range(60):
        anchors, keep = sample_anchors(mask, 8, generators(3, seed))
        again, _ = sample_anchors(torch.cat((mask[:, :40], mask[:, :4] * 0), dim=1), 8, generators(3, seed))
        assert torch.equal(anchors[keep], again[keep])  # whatever the padding
        assert anchors.shape == keep.shape == (3, 8)
        assert keep.sum(dim=1).tolist() == [8, 3, 0]
        for row in range(3):
            kept = anchors[row][keep[row]]
            assert kept.tolist() == sorted(set(kept.tolist()))
            assert bool((mask[row, kept] * mask[row, kept + 1] > 0).all())
            counts[row, kept] += 1
    allowed = torch.zeros(3, 40, dtype=torch.bool)
    allowed[:, :-1] = (mask[:, :-1] * mask[:, 1:]) > 0
    assert torch.equal(counts > 0, allowed)  # every candidate comes up
    wide, keep = sample_anchors(mask, 100, generators(3))
    assert wide.shape == (3, 22)
    assert keep.sum(dim=1).tolist() == [22, 3, 0]


def test_blocks_against_a_loop():
    ids, mask = batch(rows=3)
    anchors, keep = sample_anchors(mask, 6, generators(3))
    blocks = pack_blocks(ids, mask, anchors, keep, GAMMA, MASK)
    seen = block_mask(blocks, ids.shape[1])
    rows, length = ids.shape
    num = anchors.shape[1]
    assert seen.shape == (rows, 1, num * GAMMA, length + num * GAMMA)
    for row in range(rows):
        for block in range(num):
            anchor, learning = int(anchors[row, block]), bool(keep[row, block])
            for k in range(GAMMA):
                query, position = block * GAMMA + k, anchor + k
                assert blocks.ids[row, query] == (ids[row, anchor] if k == 0 else MASK)
                assert blocks.position_ids[row, query] == position
                learning = learning and position + 1 < length and bool(mask[row, position + 1])
                assert bool(blocks.valid[row, block, k]) == learning
                if learning:
                    assert blocks.labels[row, block, k] == ids[row, position + 1]
                    assert blocks.previous[row, block, k] == ids[row, position]
                visible = [j < anchor for j in range(length)]
                visible += [j // GAMMA == block for j in range(num * GAMMA)]
                assert seen[row, 0, query].tolist() == visible


def test_blocks_are_isolated():
    ids, mask = batch(rows=1)
    blocks = blocks_of(ids, mask)
    drafter = make(own_embeddings=True)
    taps = torch.randn(1, ids.shape[1], 32)
    positions = torch.arange(ids.shape[1])[None]

    def states(taps: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = block_mask(blocks, ids.shape[1])
            return drafter(taps, positions, inputs, blocks.position_ids, seen)[0].view(-1, GAMMA, 16)

    before = states(taps, blocks.ids)
    for block in range(blocks.anchors.shape[1]):
        anchor = int(blocks.anchors[0, block])
        future = taps.clone()
        future[:, anchor:] += 1.0  # the anchor's own state and all later ones
        assert torch.equal(states(future, blocks.ids)[block], before[block])
        past = taps.clone()
        past[:, anchor - 1] += 1.0
        assert not torch.equal(states(past, blocks.ids)[block], before[block])
        others = blocks.ids.view(-1, GAMMA).clone()
        others[torch.arange(len(others)) != block] = 7
        assert torch.equal(states(taps, others.view(1, -1))[block], before[block])
        own = blocks.ids.view(-1, GAMMA).clone()
        own[block, -1] = 7  # rows see each other in both directions
        assert not torch.equal(states(taps, own.view(1, -1))[block, 0], before[block, 0])


# ---- losses


@pytest.mark.parametrize("reduced", [False, True], ids=["full vocabulary", "reduced vocabulary"])
def test_losses_against_a_formula(reduced):
    torch.manual_seed(0)
    n, vocab = 5, 7
    kept = torch.tensor([0, 2, 5]) if reduced else torch.arange(vocab)
    draft, full = torch.randn(n, len(kept)), torch.randn(n, vocab) * 2
    labels, confidence = torch.tensor([0, 1, 2, 1, 0]), torch.randn(n)
    weights = torch.tensor([1.0, 0.5, 0.0, 0.25, 2.0])
    known = torch.tensor([True, False, True, True, True]) if reduced else None
    sums = loss_sums(draft, full, labels, confidence, weights, kept if reduced else None, known)
    cross_entropy = l1 = bce = 0.0
    for i in range(n):
        draft_probs = torch.zeros(vocab).index_put((kept,), draft[i].exp() / draft[i].exp().sum())
        target_probs = full[i].exp() / full[i].exp().sum()
        if known is None or known[i]:
            cross_entropy -= weights[i] * draft_probs[kept[labels[i]]].log()
        distance = (draft_probs - target_probs).abs().sum()
        l1 += weights[i] * distance
        accepted, believed = 1 - distance / 2, confidence[i].sigmoid()
        bce -= weights[i] * (accepted * believed.log() + (1 - accepted) * (1 - believed).log())
    torch.testing.assert_close(torch.stack(sums), torch.stack((cross_entropy, l1, bce)), rtol=1e-5, atol=1e-5)
    total = sums.total(LossWeights(), torch.tensor(3.0))
    torch.testing.assert_close(total, (0.1 * cross_entropy + 0.9 * l1 + 1.0 * bce) / 3, rtol=1e-5, atol=1e-5)


def test_acceptance_is_the_overlap():
    """`1 - distance / 2`, which the confidence learns, is the probability that rejection sampling accepts."""
    torch.manual_seed(0)
    draft, full = torch.randn(1, 6), torch.randn(1, 6)
    l1 = loss_sums(draft, full, torch.zeros(1, dtype=torch.long), None, torch.ones(1)).l1
    draft_probs, target_probs = draft.softmax(-1), full.softmax(-1)
    accepted = (draft_probs * (target_probs / draft_probs).clamp(max=1)).sum()
    torch.testing.assert_close(1 - l1 / 2, accepted)


def test_position_weights():
    assert LossWeights(decay=4.0).positions(3).tolist() == pytest.approx([1.0, 0.7788008, 0.6065307])


# ---- the objective


HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "none": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
}


def naive_loss(drafter: DSparkDrafter, target, ids, mask, blocks: Blocks, weights: LossWeights) -> torch.Tensor:
    """Block by block over its own context, position by position, through the step-by-step chain."""
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True)
    total, denominator = 0.0, 0.0
    kept = drafter.draft_vocabulary()
    for row in range(len(ids)):
        for anchor, valid in zip(blocks.anchors[row].tolist(), blocks.valid[row], strict=True):
            if not valid.any():
                continue
            taps = torch.cat([outputs.hidden_states[i + 1][row, :anchor] for i in (0, 1)], dim=-1)[None]
            block = torch.full((1, GAMMA), MASK)
            block[0, 0] = ids[row, anchor]
            places = torch.arange(anchor, anchor + GAMMA)[None]
            hidden = drafter(taps, torch.arange(anchor)[None], block, places)
            truth = ids[row, anchor + 1 : anchor + 1 + int(valid.sum())]
            chain = drafter.chain(
                block[:, 0], hidden[:, : len(truth)], select=lambda k, logits, _, t=truth: (t[k : k + 1], logits)
            )
            for k, token in enumerate(truth):
                weight = float(torch.exp(torch.tensor(-k / weights.decay)))
                draft_probs = chain.logits[0, k].softmax(-1)
                target_probs = outputs.logits[row, anchor + k].softmax(-1)
                distance = (draft_probs - target_probs).abs().sum()
                loss = weights.l1 * distance
                if token in kept:
                    loss = loss - weights.cross_entropy * draft_probs[token].log()
                if chain.confidence is not None:
                    wanted = 1 - 0.5 * distance.detach()
                    believed = chain.confidence[0, k]
                    bce = -(wanted * believed.log() + (1 - wanted) * (1 - believed).log())
                    loss = loss + weights.confidence * bce
                total, denominator = total + weight * loss, denominator + weight
    return total / denominator


@pytest.mark.parametrize("heads", HEADS)
def test_objective_against_the_step_by_step_chain(target, heads):
    """One packed pass under teacher forcing equals separate blocks through the chain that inference runs."""
    ids, mask = batch(rows=3)
    blocks, weights = blocks_of(ids, mask), LossWeights()
    drafter = make(**HEADS[heads]).bind_target(target)
    naive = naive_loss(drafter, target, ids, mask, blocks, weights)
    naive.backward()
    expected = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    with torch.no_grad():
        taps, last_hidden = target_states(target, ids, [0, 1])
    for chunk in (1, 5, 1024):
        drafter.zero_grad()
        loss = Objective(drafter, weights, chunk)(taps, last_hidden, blocks)
        loss.total.backward()
        torch.testing.assert_close(loss.total, naive.detach(), rtol=1e-5, atol=1e-5)
        assert loss.positions == blocks.valid.sum()
        mixed = weights.cross_entropy * loss.cross_entropy + weights.l1 * loss.l1
        torch.testing.assert_close(loss.total, mixed + weights.confidence * loss.confidence)
        for name, parameter in drafter.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=f"{name}, {chunk}")
    assert all(parameter.grad is None for parameter in target.parameters())


def test_nothing_to_learn(target):
    ids, mask = batch(rows=2)
    drafter = make().bind_target(target)
    with torch.no_grad():
        taps, last_hidden = target_states(target, ids, [0, 1])
    loss = Objective(drafter)(taps, last_hidden, blocks_of(ids, mask * 0))
    loss.total.backward()
    assert loss.total == 0
    assert loss.positions == 0
    # every parameter has its gradient of zero: processes that average theirs wait for all of them
    assert all(not parameter.grad.any() for parameter in drafter.parameters())


@pytest.mark.parametrize("backbone", ["qwen3", "gemma4"])
def test_packed_states_equal_cached_ones(target, backbone):
    ids, mask = batch()
    blocks = blocks_of(ids, mask)
    drafter = make(backbone_type=backbone).bind_target(target)
    with torch.no_grad():
        taps, _ = target_states(target, ids, [0, 1])
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        packed = drafter(taps, positions, blocks.ids, blocks.position_ids, block_mask(blocks, ids.shape[1]))
        packed = packed.view(*blocks.labels.shape, 16)
        for row in range(len(ids)):
            context = drafter.new_context()
            for number, anchor in enumerate(blocks.anchors[row].tolist()):
                new = slice(context.length, anchor)
                drafter.extend_context(context, taps[row : row + 1, new], positions[row : row + 1, new])
                cached = drafter.block_states(ids[row, anchor : anchor + 1], torch.tensor([anchor]), context)
                torch.testing.assert_close(cached[0], packed[row, number], rtol=1e-5, atol=1e-5)


def test_taps_of_every_layer(target):
    """The embedding output is -1; the last layer is read before the final norm."""
    ids, _ = batch()
    with torch.no_grad():
        taps, last_hidden = target_states(target, ids, [-1, 0, 1, 2])
        states = target(ids, output_hidden_states=True).hidden_states
    parts = taps.split(16, dim=-1)
    for part, state in zip(parts[:3], states[:3], strict=True):
        assert torch.equal(part, state)
    assert torch.equal(parts[0], target.get_input_embeddings()(ids))
    torch.testing.assert_close(target.model.norm(parts[3]), states[3])
    assert torch.equal(last_hidden, states[3])


# ---- packing and flex attention


MASKED = {
    "plain": {},
    "window at the query": {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    },
    "window at the anchor": {
        "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 3,
        "sliding_window_from": "anchor",
    },
    "causal": {"causal_layer_types": ["full_attention"]},
}  # fmt: skip


def long_batch(target) -> tuple[torch.Tensor, torch.Tensor, Blocks]:
    """Taps, last states and blocks with more queries and keys than a tile of flex attention holds."""
    ids, mask = batch(rows=1)
    ids, mask = ids.repeat(5, 12), torch.ones(5, 216)
    mask[1, :100] = mask[3, 150:] = 0
    with torch.no_grad():
        taps, last_hidden = target_states(target, ids.to(target.device), [0, 1])
    return taps, last_hidden, blocks_of(ids, mask, num=40).to(target.device)


@pytest.mark.parametrize("kind", MASKED)
@torch.no_grad()
def test_flex_attention_against_the_plain_mask(target, kind):
    """PyTorch has its backward on CUDA only; there the next test compares gradients too."""
    taps, last_hidden, blocks = long_batch(target)
    drafter = make(**MASKED[kind]).bind_target(target)
    states = []

    def keeping(*inputs) -> torch.Tensor:
        states.append(drafter(*inputs))
        return states[-1]

    for flex in (False, True):
        Objective(drafter, flex=flex)(taps, last_hidden, blocks, backbone=keeping)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)
    if kind != "plain":
        drafter.config.layer_types = ["full_attention"] * len(drafter.layers)
        drafter.config.causal_layer_types = []
        Objective(drafter, flex=True)(taps, last_hidden, blocks, backbone=keeping)
        assert not torch.allclose(states[2], states[0], rtol=1e-4, atol=1e-5)  # the rules of the layer do something


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MASKED)
def test_flex_attention_on_cuda(kind):
    torch.compiler.reset()  # each kind is compiled anew: of one function only so many forms are
    torch.manual_seed(1)
    shape = SHAPE | {"hidden_size": 128, "intermediate_size": 128}
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=3)).requires_grad_(False).eval().cuda()
    taps, last_hidden, blocks = long_batch(target)
    drafter, found = make(**shape | MASKED[kind] | {"initializer_range": 0.05}).cuda().bind_target(target), []
    for flex in (False, True):
        drafter.zero_grad()
        loss = Objective(drafter, flex=flex)(taps, last_hidden, blocks)
        loss.total.backward()
        found.append((loss.total.detach(), [parameter.grad.clone() for parameter in drafter.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-4)


def test_the_tiles_of_flex_attention():
    """Tiles that are skipped hold nothing to see, and those taken whole hold nothing to hide."""
    ids, mask = batch(rows=1, length=18)
    mask = torch.ones(3, 540)
    mask[0, :300] = mask[1, 40:] = 0
    packed = Packed.of(blocks_of(ids.repeat(3, 30), mask, num=100), 540)
    visible = packed.visible()
    attend = flex_masks(packed, make().config)["full_attention"]
    block_mask = attend.args[1]
    reference = create_block_mask(block_mask.mask_mod, 1, 1, *visible.shape[2:], device="cpu")
    assert torch.equal(block_mask.to_dense(), reference.to_dense())
    assert torch.equal(block_mask.full_kv_num_blocks, reference.full_kv_num_blocks)
    assert reference.full_kv_num_blocks.sum() > 0
    assert reference.to_dense().float().mean() < 0.8
    queries, keys = torch.meshgrid(*map(torch.arange, visible.shape[2:]), indexing="ij")
    assert torch.equal(block_mask.mask_mod(0, 0, queries, keys), visible[0, 0])


def test_attention_sinks_have_no_flex_form():
    with pytest.raises(NotImplementedError, match="leave flex=True out"):
        Objective(make(has_attention_sinks=True), flex=True)


def test_packing_drops_what_nobody_needs(target):
    ids, mask = batch(rows=3)
    packed = Packed.of(blocks := blocks_of(ids, mask), ids.shape[1])
    assert len(packed.used) == int(blocks.valid.any(dim=-1).sum()) < blocks.anchors.numel()
    last = [int(row[valid.any(dim=-1)].max()) for row, valid in zip(blocks.anchors, blocks.valid, strict=True)]
    assert packed.seen.tolist() == [row * 18 + place for row in range(3) for place in range(last[row])]


# ---- options


def test_confidence_can_leave_the_rest_alone(target):
    ids, mask = batch()
    with torch.no_grad():
        taps, last_hidden = target_states(target, ids, [0, 1])
    only = LossWeights(cross_entropy=0.0, l1=0.0, confidence=1.0)
    drafter, moved = make().bind_target(target), {}
    for detached in (False, True):
        drafter.zero_grad()
        Objective(drafter, only, detach_confidence=detached)(taps, last_hidden, blocks_of(ids, mask)).total.backward()
        moved[detached] = {n.split(".")[0] for n, parameter in drafter.named_parameters() if parameter.grad.any()}
    assert moved[True] == {"confidence_head"}
    assert moved[False] > {"layers", "fc", "markov_head", "confidence_head"}


def test_checkpointed_layers_have_the_same_gradients(target):
    ids, mask = batch()
    with torch.no_grad():
        taps, last_hidden = target_states(target, ids, [0, 1])
    drafter, found = make().bind_target(target), []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.activation_checkpointing_enable()
        calls = []
        hook = drafter.layers[1].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        drafter.train().zero_grad()
        Objective(drafter)(taps, last_hidden, blocks_of(ids, mask)).total.backward()
        hook.remove()
        assert len(calls) == 1 + checkpointing
        found.append([parameter.grad.clone() for parameter in drafter.parameters()])
    torch.testing.assert_close(found[1], found[0])
