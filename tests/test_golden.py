"""Golden parity: the official implementation's numbers on the same weights, float32, 1e-4 relative."""

import pytest
import torch

from tests.golden import FOLDERS, WITH_TARGET, close, read, with_embeddings
from transformers_dspark.training.anchors import pack_blocks
from transformers_dspark.training.held_out import target_states
from transformers_dspark.training.losses import LossWeights
from transformers_dspark.training.objective import Objective


def by_name(folder):
    return folder.name


@pytest.fixture(scope="module", params=FOLDERS, ids=by_name)
def anyone(request):
    return request.param, read(request.param)


@pytest.fixture(scope="module", params=WITH_TARGET, ids=by_name)
def pair(request):
    golden = read(request.param)
    return golden, golden.drafter(request.param / "drafter", own_embeddings=False)


@pytest.mark.parametrize("own", [False, True], ids=["borrowed", "own"])
@torch.inference_mode()
def test_rounds(anyone, own, tmp_path):
    folder, golden = anyone
    if not own and golden.target is None:
        pytest.skip("no target to borrow from")
    path = with_embeddings(folder, golden, tmp_path / "drafter") if own else folder / "drafter"
    drafter = golden.drafter(path, own_embeddings=own)
    current = None
    for number, key, facts in golden.rounds():
        if number != current:
            current, context = number, drafter.new_context()
        expected = {name.removeprefix(key): t for name, t in golden.tensors.items() if name.startswith(key)}
        taps = expected["context_features"]
        positions = torch.arange(context.length, context.length + taps.shape[1])[None]
        drafter.extend_context(context, taps, positions)
        assert context.length == facts["start"]
        anchor, place = torch.tensor([facts["anchor"]]), torch.tensor([facts["start"]])
        hidden = drafter.block_states(anchor, place, context)
        proposal = drafter.propose(anchor, place, context)
        assert torch.equal(proposal.tokens, expected["draft_ids"])
        assert close(hidden, expected["block_hidden"])
        assert close(proposal.logits, expected["corrected_logits"])
        if "base_logits" in expected:
            assert close(drafter.unembed(hidden), expected["base_logits"])
        assert (proposal.confidence is None) == ("confidence_logits" not in expected)
        if proposal.confidence is not None:
            assert close(proposal.confidence, expected["confidence_logits"].sigmoid())
            assert close(proposal.confidence.logit(), expected["confidence_logits"], 1e-3)


@torch.inference_mode()
def test_rounds_with_the_target(pair):
    """Taps, drafts, accepted lengths and output ids through a loop that knows nothing but the target and `propose`."""
    golden, drafter = pair
    for number, prompt in enumerate(golden.facts["prompts"]):
        ids, output = (golden.tensors[f"p{number}.{name}_ids"] for name in ("prompt", "output"))
        context, accepted = drafter.new_context(), []
        while ids.shape[1] < output.shape[1]:
            states = golden.target(ids, output_hidden_states=True)
            ids = torch.cat((ids, states.logits[:, -1:].argmax(dim=-1)), dim=1)  # the anchor
            new = slice(context.length, ids.shape[1] - 1)
            taps = torch.cat([states.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
            if (features := golden.tensors.get(f"p{number}.r{len(accepted)}.context_features")) is not None:
                assert close(taps[:, new], features)
            drafter.extend_context(context, taps[:, new], torch.arange(new.start, new.stop)[None])
            drafts = drafter.propose(ids[:, -1], torch.tensor([new.stop]), context).tokens
            judged = golden.target(torch.cat((ids, drafts), dim=1)).logits.argmax(dim=-1)[:, ids.shape[1] - 1 : -1]
            count = int((drafts == judged).long().cumprod(dim=1).sum())
            accepted.append(count)
            ids = torch.cat((ids, drafts[:, :count]), dim=1)
        assert torch.equal(ids[:, : output.shape[1]], output)
        assert accepted == prompt["accepted_draft_lengths"][: len(accepted)]
        assert len(accepted) >= len(prompt["accepted_draft_lengths"]) - 1


def test_generate(pair):
    golden, drafter = pair
    for number, prompt in enumerate(golden.facts["prompts"]):
        ids, output = (golden.tensors[f"p{number}.{name}_ids"] for name in ("prompt", "output"))
        generated = golden.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            max_new_tokens=output.shape[1] - ids.shape[1],
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert torch.equal(generated.sequences, output)
        (lengths,) = generated.dspark.accepted_lengths
        whole = len(lengths) - 1  # max_new_tokens may cut the last round
        assert lengths[:whole] == prompt["acceptance_lengths"][:whole]
        assert whole >= len(prompt["acceptance_lengths"]) - 2


@pytest.mark.parametrize("blocks_per_chunk", [3, 1024])
def test_training(pair, blocks_per_chunk):
    golden, drafter = pair
    facts, config = golden.facts["train"], drafter.config
    given = {name.removeprefix("train."): t for name, t in golden.tensors.items() if name.startswith("train.")}
    ids, mask = given["input_ids"], given["loss_mask"]
    anchors, keep = given["anchor_positions"], given["block_keep_mask"]
    blocks = pack_blocks(ids, mask, anchors, keep, config.block_size, config.mask_token_id)
    assert torch.equal(blocks.valid, given["eval_mask"])
    assert torch.equal(blocks.labels[blocks.valid], given["target_ids"][blocks.valid])

    golden.target.requires_grad_(False)
    with torch.no_grad():
        taps, last_hidden = target_states(golden.target, ids, config.target_layer_ids)
    weights = LossWeights(
        facts["ce_loss_alpha"], facts["l1_loss_alpha"], facts["confidence_head_alpha"], facts["loss_decay_gamma"]
    )
    drafter.zero_grad()
    loss = Objective(drafter, weights, blocks_per_chunk)(taps, last_hidden, blocks)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(facts["loss"], rel=1e-4)
    for name, ours in (("ce_loss", loss.cross_entropy), ("l1_loss", loss.l1), ("confidence_loss", loss.confidence)):
        if name + "_num" in facts:
            wanted = facts[name + "_num"] / max(facts[name + "_den"], 1e-6)
            assert ours.item() == pytest.approx(wanted, rel=1e-4), name
    gradients = {name.removeprefix("grad."): t for name, t in given.items() if name.startswith("grad.")}
    assert gradients
    for name, theirs in gradients.items():
        (ours,) = (p.grad for full, p in drafter.named_parameters() if full in (name, f"markov_head.{name}"))
        assert close(ours, theirs), name
