"""Official checkpoints of every kind, with or without golden data, against a drafter of Transformers' own layers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.golden import DATA
from tests.reference import QWEN3, SIZES, Reference
from transformers_dspark import DSparkDrafter


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no heads": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    "confidence of states only": {"confidence_head_with_markov": False},
    "confidence without a sequential head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "biases": {"attention_bias": True},
    "one key head": {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 10},
    "embedding as a tap": {"target_layer_ids": [-1, 1, 3]},
    "yarn": {"rope_parameters": YARN},
    "gemma4": {"backbone": "Gemma4"},
    "gemma4 without a cap": {"backbone": "Gemma4", "final_logit_softcapping": None, "markov_head_type": "rnn"},
    "gemma4, values are keys": {"backbone": "Gemma4", "attention_k_eq_v": True, "markov_head_type": "gated"},
    "gemma4, values are keys, two heads": {
        "backbone": "Gemma4",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
}


def make(**changes) -> Reference:
    torch.manual_seed(0)
    return Reference(**changes)


def inputs(reference: Reference, rows: int = 2, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(rows, length, reference.fc.in_features, generator=generator)
    return taps, torch.randint(0, 300, (rows,), generator=generator)


def assert_drafts_alike(drafter: DSparkDrafter, reference: Reference) -> None:
    taps, anchors = inputs(reference)
    states, base, ids, corrected, confidences = reference.draft(taps, anchors)
    context, length = drafter.new_context(), taps.shape[1]
    positions = torch.arange(length).expand(len(taps), -1)
    with torch.no_grad():
        for part in ([0, 7], [7, 8], [8, length]):  # committed in portions
            drafter.extend_context(context, taps[:, slice(*part)], positions[:, slice(*part)])
        place = torch.full((len(taps),), length)
        hidden = drafter.block_states(anchors, place, context)
        proposal = drafter.propose(anchors, place, context)
        narrow = drafter.propose(anchors, place, context, width=2)
    torch.testing.assert_close(hidden, states, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(drafter.unembed(hidden), base, rtol=1e-4, atol=5e-5)
    torch.testing.assert_close(proposal.logits, corrected, rtol=1e-4, atol=5e-5)
    assert torch.equal(proposal.tokens, ids)
    assert torch.equal(narrow.tokens, ids[:, :2])
    if confidences is None:
        assert proposal.confidence is None
    else:
        torch.testing.assert_close(proposal.confidence, confidences.sigmoid(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_as_the_reference(kind, tmp_path):
    reference = make(**KINDS[kind])
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d"), own_embeddings=True)
    assert_drafts_alike(drafter, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_canonical_form_keeps_every_bit(kind, tmp_path):
    drafter = DSparkDrafter.from_pretrained(make(**KINDS[kind]).save(tmp_path / "d"), own_embeddings=True)
    drafter.save_pretrained(tmp_path / "canonical")
    again = DSparkDrafter.from_pretrained(tmp_path / "canonical")
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    differing = {name for name, value in drafter.config.to_dict().items() if again.config.to_dict()[name] != value}
    assert differing <= {"_name_or_path", "architectures", "transformers_version", "auto_map"}


# ---- embeddings


def tiny_target(reference: Reference) -> Qwen3ForCausalLM:
    target = Qwen3ForCausalLM(Qwen3Config(**SIZES | QWEN3 | {"num_hidden_layers": 4}))
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(reference.embed_tokens.weight)
        target.get_output_embeddings().weight.copy_(reference.lm_head.weight)
    return target


def test_borrows_by_reference(tmp_path):
    reference = make()
    target = tiny_target(reference)
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d")).bind_target(target)
    assert_drafts_alike(drafter, reference)
    assert not [name for name in drafter.state_dict() if "embed_tokens" in name or "lm_head" in name]
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.5)
        reference.lm_head.weight.mul_(0.5)
    assert_drafts_alike(drafter, reference)


def test_unbound_says_what_to_do(tmp_path):
    drafter = DSparkDrafter.from_pretrained(make().save(tmp_path / "d"))
    with pytest.raises(RuntimeError, match="bind_target"):
        drafter.embed(torch.tensor([1]))


@pytest.mark.parametrize("own", [False, True], ids=["borrowed", "own"])
@pytest.mark.parametrize("copy", [False, True], ids=["no head in the file", "a copy in the file"])
def test_tied_embeddings(own, copy, tmp_path):
    reference = make(tie_word_embeddings=True)
    with torch.no_grad():
        reference.lm_head.weight.copy_(reference.embed_tokens.weight)
    tensors = reference.tensors()
    if not copy:
        del tensors["lm_head.weight"]
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d", tensors=tensors), own_embeddings=own)
    if own:
        assert drafter.lm_head.weight is drafter.embed_tokens.weight
    else:
        drafter.bind_target(tiny_target(reference))
    assert_drafts_alike(drafter, reference)
    drafter.save_pretrained(tmp_path / "canonical")
    again = DSparkDrafter.from_pretrained(tmp_path / "canonical")
    assert_drafts_alike(again if own else again.bind_target(tiny_target(reference)), reference)


def test_head_that_differs_is_not_tied(tmp_path):
    reference = make(tie_word_embeddings=True)
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d"), own_embeddings=True)
    assert_drafts_alike(drafter, reference)


def test_own_embeddings_that_are_not_there(tmp_path):
    reference = make()
    tensors = {n: t for n, t in reference.tensors().items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    path = reference.save(tmp_path / "d", tensors=tensors)
    with pytest.raises(ValueError, match=r"no embed_tokens\.weight"):
        DSparkDrafter.from_pretrained(path, own_embeddings=True)
    DSparkDrafter.from_pretrained(path).save_pretrained(tmp_path / "canonical")
    with pytest.raises(ValueError, match="no embedding of its own"):
        DSparkDrafter.from_pretrained(tmp_path / "canonical", own_embeddings=True)


def test_gemma4_borrows_scale_and_cap(tmp_path):
    """The target's embedding module scales its rows itself; its cap is applied before the sequential bias."""
    target = AutoModelForCausalLM.from_pretrained(DATA / "gemma4_vanilla" / "target")
    reference = make(backbone="Gemma4", final_logit_softcapping=20.0, target_layer_ids=[-1, 2])
    with torch.no_grad():
        reference.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        reference.lm_head.weight.copy_(target.get_output_embeddings().weight)
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d")).bind_target(target)
    assert_drafts_alike(drafter, reference)
    # the embedding output, as the tap -1 reads it, is scaled as well
    ids = torch.tensor([[5, 7, 9]])
    states = target(ids, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(states, drafter.embed(ids))
    torch.testing.assert_close(states, reference.embed_tokens(ids) * 8.0)


# ---- the same checkpoint in other clothes


def opened(path, **kwargs) -> dict:
    drafter = DSparkDrafter.from_pretrained(path, own_embeddings=True, **kwargs)
    config = drafter.config.to_dict()
    return drafter.state_dict() | {name: value for name, value in config.items() if name != "_name_or_path"}


def assert_opens_alike(changed: dict, plain: dict) -> None:
    assert changed.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(changed[name], value) if isinstance(value, torch.Tensor) else changed[name] == value, name


@pytest.fixture
def plain(tmp_path):
    reference = make()
    return reference, opened(reference.save(tmp_path / "plain"))


@pytest.mark.parametrize("prefix", ["model.", "draft_model."])
def test_prefixed_names_and_rotary_buffers(plain, prefix, tmp_path):
    reference, expected = plain
    tensors = {prefix + name: tensor for name, tensor in reference.tensors().items()}
    tensors["rotary_emb.inv_freq"] = torch.ones(12)
    tensors["model.rotary_emb.full_attention_original_inv_freq"] = torch.ones(12)
    assert_opens_alike(opened(reference.save(tmp_path / "d", tensors=tensors)), expected)


def test_shards(plain, tmp_path):
    reference, expected = plain
    path = reference.save(tmp_path / "d")
    (path / "model.safetensors").unlink()
    names, shards = sorted(reference.tensors()), {}
    for number in range(3):
        shards[f"model-{number + 1:05d}-of-00003.safetensors"] = names[number::3]
    for file, part in shards.items():
        save_file({name: reference.tensors()[name] for name in part}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_opens_alike(opened(path), expected)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        opened(path)
    (path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        opened(path)


@pytest.mark.parametrize(
    ("gone", "added"),
    [
        (["rope_parameters"], {"rope_theta": 10000.0, "rope_scaling": None}),
        ([], {"partial_rotary_factor": 0.25, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
        (["rope_parameters"], {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
        (
            ["rope_parameters"],
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                }
            },
        ),
        (["markov_rank", "enable_confidence_head"], {}),  # heads exist if their tensors do
        (["confidence_head_with_markov"], {"dspark_config": {"confidence_head_with_markov": True}}),
        ([], {"sample_from_anchor": True, "num_anchors": 512, "enable_moe_block": False}),
    ],
    ids=["old theta", "leftovers beside", "old mrope", "leftovers inside", "silent heads", "nested flag", "true flag"],
)
def test_older_and_leftover_fields(plain, gone, added, tmp_path):
    reference, expected = plain
    raw = {name: value for name, value in reference.raw_config().items() if name not in gone} | added
    changed = opened(reference.save(tmp_path / "d", config=raw))
    changed["layout_source"] = expected["layout_source"]
    assert_opens_alike(changed, expected)


def test_old_scaling_field_is_kept(tmp_path):
    reference = make(rope_parameters=YARN)
    old = {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")} | {"type": "yarn"}
    raw = reference.raw_config() | {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": old}
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d", config=raw), own_embeddings=True)
    assert_drafts_alike(drafter, reference)


@pytest.mark.parametrize("k_eq_v", [False, True])
def test_gemma4_geometry_in_both_forms(k_eq_v, tmp_path):
    """Transformers 5.10 writes `global_head_dim` and `num_global_key_value_heads`, 5.24 writes `per_layer_config`."""
    reference = make(backbone="Gemma4", attention_k_eq_v=k_eq_v)
    new = reference.raw_config()
    assert "per_layer_config" in new
    assert "global_head_dim" not in new
    old = {name: value for name, value in new.items() if name != "per_layer_config"}
    old |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    expected = opened(reference.save(tmp_path / "new"))
    assert_opens_alike(opened(reference.save(tmp_path / "old", config=old)), expected)


# ---- dtypes


@pytest.mark.parametrize("head", [torch.float32, torch.float16])
def test_heads_of_another_dtype_are_loaded(head, tmp_path):
    reference = make()
    tensors = {
        name: tensor.to(head if "_head" in name else torch.bfloat16) for name, tensor in reference.tensors().items()
    }
    path = reference.save(tmp_path / "d", tensors=tensors)
    drafter = DSparkDrafter.from_pretrained(path)
    assert drafter.dtype == torch.bfloat16
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight"):
        assert torch.equal(drafter.get_parameter(name), tensors[name].bfloat16())
    exact = DSparkDrafter.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(exact.markov_head.markov_w2.weight, tensors["markov_head.markov_w2.weight"].float())
    drafter.bind_target(tiny_target(reference).to(torch.bfloat16))
    taps, anchors = inputs(reference, rows=1)
    context = drafter.new_context()
    drafter.extend_context(context, taps, torch.arange(taps.shape[1])[None])
    proposal = drafter.propose(anchors, torch.tensor([taps.shape[1]]), context)
    assert proposal.logits.dtype == torch.float32
    assert proposal.logits.isfinite().all()


def test_dtype_is_the_checkpoints_by_default(tmp_path):
    reference = make()
    # the configuration may say otherwise: exporters write "bfloat16" whatever the tensors are
    raw = reference.raw_config() | {"dtype": "bfloat16"}
    path = reference.save(tmp_path / "d", config=raw)
    assert DSparkDrafter.from_pretrained(path).dtype == torch.float32
    assert DSparkDrafter.from_pretrained(path, dtype="auto").dtype == torch.float32
    assert DSparkDrafter.from_pretrained(path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert DSparkDrafter.from_pretrained(path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    low = {name: tensor.bfloat16() for name, tensor in reference.tensors().items()}
    drafter = DSparkDrafter.from_pretrained(reference.save(tmp_path / "d", tensors=low))
    assert drafter.dtype == torch.bfloat16
    drafter.save_pretrained(tmp_path / "canonical")
    for kwargs, dtype in (({}, torch.bfloat16), ({"dtype": torch.float32}, torch.float32)):
        again = DSparkDrafter.from_pretrained(tmp_path / "canonical", device_map="cpu", **kwargs)
        assert again.dtype == dtype
        assert again.device.type == "cpu"


def test_device_map_and_loading_info(tmp_path):
    path = make().save(tmp_path / "d")
    drafter, info = DSparkDrafter.from_pretrained(path, device_map="cpu", output_loading_info=True)
    assert not info["missing_keys"]
    assert drafter.device.type == "cpu"
    assert drafter.name_or_path == str(path)
    meta = DSparkDrafter.from_pretrained(path, device_map="meta")
    assert meta.device.type == "meta"
