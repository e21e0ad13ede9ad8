"""One checkpoint of each published family against its canonical twin, and checkpoints that lie."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DFlashCache

from tests.checkpoints.families import HEADS, ROPE, SHAPE, TAPS, TWINS, canonical, tensors_of, write
from tests.golden import FAMILIES
from tests.reference import Reference
from transformers_dspark import DSparkDrafter
from transformers_dspark.checkpoints import family_of


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).eval()


@torch.no_grad()
def drafted(drafter: DSparkDrafter, target, length: int = 11):
    drafter.bind_target(target)
    taps = torch.randn(2, length, drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    context, places = drafter.new_context(), torch.arange(length).expand(2, -1)
    for part in ([0, 7], [7, 8], [8, length]):
        drafter.extend_context(context, taps[:, slice(*part)], places[:, slice(*part)])
    return drafter.propose(torch.tensor([3, 9]), torch.full((2,), length), context)


def assert_drafts_alike(one: DSparkDrafter, other: DSparkDrafter, target) -> None:
    ours, theirs = drafted(one, target), drafted(other, target)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert (ours.confidence is None) == (theirs.confidence is None)
    assert torch.equal(ours.logits, theirs.logits)
    if ours.confidence is not None:  # the sum depends on where in the file its few weights lie
        torch.testing.assert_close(ours.confidence, theirs.confidence, rtol=0, atol=3e-7)


IGNORED = {"layout_source", "_name_or_path", "architectures", "transformers_version", "dtype"}


@pytest.mark.parametrize("name", TWINS)
def test_twin(name, target, tmp_path):
    twin = TWINS[name]
    expected = canonical(twin)
    assert family_of(twin.raw).name == twin.family
    # a folder's name tells nothing
    path = write(tmp_path / "dflash_eagle3_qwen3_dspark", twin.raw, tensors_of(twin, expected))
    drafter = DSparkDrafter.from_pretrained(path)
    assert_drafts_alike(drafter, expected, target)
    ours, theirs = drafter.config.to_dict(), expected.config.to_dict()
    differing = {field for field in theirs if ours[field] != theirs[field]} - IGNORED
    assert not differing, {field: (ours[field], theirs[field]) for field in differing}
    drafter.save_pretrained(tmp_path / "canonical")
    again = DSparkDrafter.from_pretrained(tmp_path / "canonical")
    assert again.config.layout_source == drafter.config.layout_source
    assert_drafts_alike(again, expected, target)


@pytest.mark.parametrize("name", TWINS)
def test_training_sees_what_drafting_sees(name, target):
    """The block states of a packed forward are those of the cached context."""
    drafter = canonical(TWINS[name]).bind_target(target)
    config, length = drafter.config, 11
    taps, places = torch.randn(1, length, drafter.fc.in_features), torch.arange(length)[None]
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = 3
    context = drafter.new_context()
    with torch.no_grad():
        drafter.extend_context(context, taps, places)
        states = drafter.block_states(torch.tensor([3]), torch.tensor([length]), context)
        packed = drafter(taps, places, block, length + torch.arange(config.block_size)[None])
    torch.testing.assert_close(packed, states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TWINS)
def test_the_targets_own_text_through_generate(name, target, tmp_path):
    twin = TWINS[name]
    drafter = DSparkDrafter.from_pretrained(write(tmp_path / "d", twin.raw, tensors_of(twin, canonical(twin))))
    prompt = torch.tensor([[5, 17, 3, 40, 8, 8, 21]])
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = target.generate(prompt, **options)
    outputs = target.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(outputs.sequences, plain)
    assert max(outputs.dspark.verify_lengths[0]) == drafter.config.num_draft_tokens


# ---- families whose numbers others' code can tell


@torch.no_grad()
def test_muse_as_transformers_computes_it(tmp_path):
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(**TWINS["Muse"].raw, attn_implementation="eager")
    model = MuseGlimmerAssistantModel(config).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 61}))
    drafter = DSparkDrafter.from_pretrained(tmp_path)
    target = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"num_hidden_layers": 6}))
    drafter.bind_target(target)
    taps, block = torch.randn(1, 11, drafter.fc.in_features), torch.tensor([[3, 60, 60, 60]])
    cache = DFlashCache(config=config)  # without one, the model makes masks for the block only
    cache.set_previous_accepted_tokens(11)
    theirs = model(
        noise_embeds=target.get_input_embeddings()(block),
        context_hidden_states=taps,
        position_ids=torch.arange(15)[None],
        cache=cache,
    ).last_hidden_state
    context = drafter.new_context()
    drafter.extend_context(context, taps, torch.arange(11)[None])
    ours = drafter.block_states(torch.tensor([3]), torch.tensor([11]), context)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_raw_embedding_leaves_out_the_norm():
    class Normed(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 100

    target = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6}))
    target.set_input_embeddings(Normed(SHAPE["vocab_size"], SHAPE["hidden_size"]))
    ids = torch.tensor([[3, 60]])
    table = target.get_input_embeddings().weight[ids]
    for name, factor in (("Muse", 1), ("z-lab DFlash", 100)):
        drafter = canonical(TWINS[name]).bind_target(target)
        torch.testing.assert_close(drafter.embed(ids), table * factor)


def test_logits_are_scaled_as_the_targets():
    target = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6}))
    drafter = canonical(TWINS["Muse"]).bind_target(target)
    hidden, plain = torch.randn(1, 3, SHAPE["hidden_size"]), None
    plain = drafter.unembed(hidden)
    target.config.output_multiplier = 0.25
    torch.testing.assert_close(canonical(TWINS["Muse"]).bind_target(target).unembed(hidden), plain * 0.25)


@pytest.mark.parametrize("name", ["specforge_dspark", "speculators_dspark_a"])
def test_published_configurations_with_other_weights(name, tmp_path):
    """Configurations as those projects saved them, over weights whose drafts Transformers' own layers compute."""
    raw = json.loads((FAMILIES / "configs" / f"{name}.json").read_text())
    torch.manual_seed(0)
    yarn = {"rope_parameters": raw["rope_parameters"]} if "rope_parameters" in raw else {}
    facts = {"intermediate_size": 96, "target_layer_ids": [0, 2, 4], "max_position_embeddings": 64}
    reference = Reference(**facts, **yarn)
    tensors = {n: t for n, t in reference.tensors().items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    drafter = DSparkDrafter.from_pretrained(write(tmp_path, raw, tensors))
    assert (drafter.config.sample_from_anchor, drafter.config.target_layer_ids) == (True, [0, 2, 4])
    sizes = {name: getattr(reference.config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, num_attention_heads=2))
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(reference.embed_tokens.weight)
        target.get_output_embeddings().weight.copy_(reference.lm_head.weight)
    drafter.bind_target(target)
    taps, context = torch.randn(2, 40, reference.fc.in_features), drafter.new_context()
    _, _, ids, corrected, confidences = reference.draft(taps, torch.tensor([3, 9]))
    with torch.no_grad():
        drafter.extend_context(context, taps, torch.arange(40).expand(2, -1))
        proposal = drafter.propose(torch.tensor([3, 9]), torch.tensor([40, 40]), context)
    assert torch.equal(proposal.tokens, ids)
    torch.testing.assert_close(proposal.logits, corrected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(proposal.confidence, confidences.sigmoid(), rtol=1e-4, atol=1e-5)


# ---- the same checkpoint in other clothes


def changed(name: str, folder, raw: dict | None = None, gone: tuple = (), change=None):
    """Writes a twin with fields and tensors changed."""
    twin, drafter = TWINS[name], canonical(TWINS[name])
    tensors = tensors_of(twin, drafter)
    if change is not None:
        change(tensors)
    fields = {key: value for key, value in twin.raw.items() if key not in gone} | (raw or {})
    return write(folder, fields, tensors), drafter


def fuse(tensors: dict) -> None:
    for layer in ("layers.0.", "layers.1."):
        for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            stem = layer + fused.split(".")[0]
            pieces = [tensors.pop(f"{stem}.{part}_proj.weight") for part in parts]
            tensors[f"{layer}{fused}.weight"] = torch.cat(pieces)


def prefix(tensors: dict) -> None:
    for name in list(tensors):
        tensors["model." + name] = tensors.pop(name)


def litter(tensors: dict) -> None:
    tensors |= {
        "t2d": torch.ones(61, dtype=torch.bool),
        "verifier_norm.weight": torch.ones(32),
        "verifier_lm_head.weight": torch.ones(61, 32),
        "rotary_emb.inv_freq": torch.ones(4),
    }


def own_parts(tensors: dict) -> None:
    tensors |= {"embed_tokens.weight": torch.ones(61, 32), "lm_head.weight": torch.ones(61, 32)}


def rename_sinks(tensors: dict) -> None:
    for name in [name for name in tensors if name.endswith("attention_sink_bias")]:
        tensors[name.replace("attention_sink_bias", "sinks")] = tensors.pop(name)


CLOTHES = {
    "foreign architecture": ("SpecForge", {"architectures": ["Qwen3DSparkModel"]}, (), None),
    "no architecture": ("DeepSpec", {}, ("architectures", "model_type"), None),
    "a target's architecture": ("DeepSpec", {"architectures": ["Qwen3ForCausalLM"]}, (), None),
    "z-lab without architecture": ("z-lab DFlash", {}, ("architectures",), None),
    "speculators by its inner config": ("speculators DSpark", {}, ("speculators_model_type", "architectures"), None),
    "flags inside": (
        "DeepSpec",
        {"dspark_config": HEADS, "text_config": SHAPE},
        (*HEADS, *SHAPE),
        None,
    ),
    "silent heads": ("DeepSpec", {}, tuple(HEADS), None),
    "silent confidence": ("speculators DSpark", {}, ("confidence_head_with_markov",), None),
    "fused matrices": ("DeepSpec", {}, (), fuse),
    "fused and interleaved": ("LFM2.5", {}, (), fuse),
    "prefixes": ("Nemotron", {}, (), prefix),
    "sinks by another name": ("Nemotron", {}, (), rename_sinks),
    "silent sinks": (
        "Nemotron",
        {"attention_sink_bias": None, "dflash_config": TAPS | {"swa_window_size": 5}},
        (),
        None,
    ),
    "what belongs to the target": ("speculators DSpark", {}, (), litter),
    "an embedding and a head": ("z-lab DFlash", {}, (), own_parts),
    "no head width": ("z-lab DFlash", {}, ("head_dim",), None),
    "silent vocabulary": ("speculators DSpark, reduced", {}, ("draft_vocab_size",), None),
    "a map without need": (
        "speculators DSpark",
        {},
        (),
        lambda tensors: tensors.update(d2t=torch.zeros(61, dtype=torch.long)),
    ),
    "a map of 32 bits": (
        "speculators DSpark, reduced",
        {},
        (),
        lambda tensors: tensors.update(d2t=tensors["d2t"].int()),
    ),
}


@pytest.mark.parametrize("case", CLOTHES)
def test_other_clothes(case, target, tmp_path):
    name, raw, gone, change = CLOTHES[case]
    path, expected = changed(name, tmp_path / "d", raw, gone, change)
    assert_drafts_alike(DSparkDrafter.from_pretrained(path), expected, target)


def test_a_mix_of_dtypes(target, tmp_path):
    def mix(tensors: dict) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.float16 if "_head" in name else torch.bfloat16)

    path, _ = changed("SpecForge", tmp_path / "d", change=mix)
    drafter = DSparkDrafter.from_pretrained(path)
    assert drafter.dtype == torch.bfloat16
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    wide = DSparkDrafter.from_pretrained(path, dtype=torch.float32)
    assert drafted(wide, target).logits.isfinite().all()


@pytest.mark.parametrize("trained", [False, True])
def test_an_embedding_without_a_head(trained, target, tmp_path):
    """It is a copy of the target's and is borrowed, unless the file says that it was trained."""
    rows = torch.randn(61, 32)
    path, expected = changed(
        "Nemotron",
        tmp_path / "d",
        {"train_embed_tokens": trained},
        change=lambda tensors: tensors.update({"embed_tokens.weight": rows}),
    )
    borrowed = DSparkDrafter.from_pretrained(path)
    kept = DSparkDrafter.from_pretrained(path, own_embeddings=True)
    assert (borrowed.config.own_embeddings, borrowed.config.own_head) == (trained, False)
    assert (kept.config.own_embeddings, kept.config.own_head) == (True, False)
    kept.bind_target(target)
    assert torch.equal(kept.embed(torch.tensor([3])), rows[3:4])
    assert torch.equal(kept.unembed(rows), expected.bind_target(target).unembed(rows))
    kept.save_pretrained(tmp_path / "canonical")
    assert_drafts_alike(DSparkDrafter.from_pretrained(tmp_path / "canonical"), kept, target)


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("name", ["DeepSpec", "SpecForge", "speculators DSpark"])
def test_norms_kept_as_offsets_from_one(name, offsets, target, tmp_path):
    """Drafters for Qwen3.5 may use its norms, which multiply by 1 + weight, or Qwen3's."""

    def subtract(tensors: dict) -> None:
        tensors |= {key: tensor - 1 for key, tensor in tensors.items() if key.endswith("norm.weight")}

    body = TWINS[name].raw.get("transformer_layer_config")
    raw = {"model_type": "qwen3_5"} if body is None else {"transformer_layer_config": body | {"model_type": "qwen3_5"}}
    path, expected = changed(name, tmp_path / "d", raw, change=subtract if offsets else None)
    drafter = DSparkDrafter.from_pretrained(path)
    torch.testing.assert_close(dict(drafter.named_parameters()), dict(expected.named_parameters()))
    torch.testing.assert_close(drafted(drafter, target).logits, drafted(expected, target).logits, rtol=1e-4, atol=1e-4)


# ---- layouts


def test_the_callers_word_goes_first(target, tmp_path):
    path, expected = changed("DeepSpec", tmp_path / "d", {"sample_from_anchor": True})
    drafter = DSparkDrafter.from_pretrained(path, sample_from_anchor=False)
    assert (drafter.config.sample_from_anchor, drafter.config.layout_source) == (False, "argument")
    assert drafted(drafter, target).tokens.shape == (2, 3)
    expected.save_pretrained(tmp_path / "canonical")
    again = DSparkDrafter.from_pretrained(tmp_path / "canonical", sample_from_anchor=False)
    assert (again.config.sample_from_anchor, again.config.layout_source) == (False, "argument")
    assert_drafts_alike(again, drafter, target)


def test_a_file_that_leaves_the_layout_open_is_warned_about(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    path, _ = changed(
        "speculators DFlash",
        tmp_path / "d",
        {"speculators_config": {"algorithm": "dflash", "proposal_methods": []}},
    )
    drafter = DSparkDrafter.from_pretrained(path)
    assert drafter.config.layout_source == "family (speculators is filler first)"
    assert "sample_from_anchor=True" in caplog.text


# ---- lies


def truncate(path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("name", TWINS)
def test_truncated_file(name, tmp_path):
    path, _ = changed(name, tmp_path / "d")
    truncate(path)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        DSparkDrafter.from_pretrained(path)


@pytest.mark.parametrize("name", TWINS)
def test_extra_and_missing_tensors(name, tmp_path):
    path, _ = changed(name, tmp_path / "d")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: extra\.weight"):
        DSparkDrafter.from_pretrained(path)
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: layers\.1\.mlp\.up_proj\.weight"):
        DSparkDrafter.from_pretrained(path)


def set_map(index: int, value: int):
    return lambda tensors: tensors["d2t"].__setitem__(index, value)


REDUCED = "speculators DSpark, reduced"
LIES = {
    "map beyond the end": (REDUCED, {}, set_map(29, 40), r"d2t does not lead to ascending target ids within 0\.\.60"),
    "map before the start": (REDUCED, {}, set_map(0, -1), "d2t does not lead"),
    "map not ascending": (REDUCED, {}, set_map(3, 1), "d2t does not lead"),
    "map of target ids": (REDUCED, {}, lambda t: t["d2t"].add_(torch.arange(30)), "d2t does not lead"),
    "no map": (REDUCED, {}, lambda t: t.pop("d2t"), "missing: d2t"),
    "map of numbers": (REDUCED, {}, lambda t: t.update(d2t=t["d2t"].float()), "d2t must hold one whole number"),
    "short map": (REDUCED, {}, lambda t: t.update(d2t=t["d2t"][:20]), r"d2t has shape \(20,\) instead of \(30,\)"),
    "map of the whole": (
        "speculators DSpark",
        {},
        lambda t: t.update(d2t=torch.ones(61, dtype=torch.long)),
        "d2t maps ids although",
    ),
    "vocabulary": (REDUCED, {"draft_vocab_size": 31}, None, r"markov_w2\.weight has shape"),
    "one tap more": (
        "speculators DFlash",
        {"aux_hidden_state_layer_ids": [1, 3, 5, 6]},
        None,
        "4 taps of hidden size",
    ),
    "negative tap": ("speculators DFlash", {"aux_hidden_state_layer_ids": [-1, 3, 5]}, None, "aux_hidden_state_layer"),
    "taps twice": ("Nemotron", {"target_layer_ids": [0, 1, 4]}, None, r"target_layer_ids is \[0, 1, 4\] at the top"),
    "blocks twice": ("z-lab DFlash", {"block_size": 5}, None, "block_size is 5 at the top and 4 inside"),
    "flags apart": (
        "Nemotron",
        {"dspark_bonus_anchor": False},
        None,
        "contradicts itself about its layout .*dspark_bonus_anchor=False",
    ),
    "sinks that are not there": ("SpecForge", {"attention_sink_bias": True}, None, "missing: .*attention_sink_bias"),
    "window that is not there": ("SpecForge", {"sliding_window": None}, None, "sliding_window=None"),
    "layer types": ("SpecForge", {"layer_types": ["full_attention"]}, None, "layer_types="),
    "mask": (
        "z-lab DFlash",
        {"dflash_config": TAPS | {"mask_token_id": 61, "block_size": 4}},
        None,
        "mask_token_id=61",
    ),
    "no mask": (
        "z-lab DFlash",
        {"dflash_config": {"target_layer_ids": [0]}, "block_size": 4},
        None,
        "lacks mask_token",
    ),
    "no body": ("speculators DFlash", {"transformer_layer_config": None}, None, "lacks vocab_size, hidden_size"),
    "a list": ("z-lab DFlash", {"dflash_config": [1]}, None, "dflash_config="),
    "a word": ("speculators DSpark", {"transformer_layer_config": "x"}, None, "transformer_layer_config="),
    "a number": ("SpecForge", {"sliding_window": "5"}, None, "sliding_window='5'"),
    "a flag": ("DeepSpec", {"sample_from_anchor": "yes"}, None, "sample_from_anchor='yes'"),
    "a block of the anchor": ("speculators DFlash", {"block_size": 1}, None, "block_size=1 must be at least 2"),
    "uneven fusion": (
        "DeepSpec",
        {},
        lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": torch.ones(5, 32)}),
        "qkv_proj.weight has 5 rows",
    ),
    "no confidence for the rank": (
        "SpecForge",
        {},
        lambda t: t.pop("markov_head.markov_w1.weight"),
        "missing: markov",
    ),
    "confidence inputs": (
        "SpecForge",
        {},
        lambda t: t.update({"confidence_head.proj.weight": torch.ones(1, 32)}),
        "confidence_head.proj.weight has 32 inputs",
    ),
    "numbers in disguise": (
        "Muse",
        {},
        lambda t: t.update({"norm.weight": torch.ones(32).char()}),
        "norm.weight holds",
    ),
}


@pytest.mark.parametrize("case", LIES)
def test_lies(case, tmp_path):
    name, raw, change, message = LIES[case]
    path, _ = changed(name, tmp_path / "d", raw, change=change)
    with pytest.raises(ValueError, match=message):
        DSparkDrafter.from_pretrained(path)


# ---- refused by name


def add(name: str):
    return lambda tensors: tensors.update({name: torch.ones(2)})


NVFP4 = {"quantization_config": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None}}
REFUSED = {
    "DFlash2": ("z-lab DFlash", {"architectures": ["DFlash2DraftModel"]}, None, "DFlash2, .* codebooks"),
    "DFlash2 by its options": (
        "z-lab DFlash",
        {"dflash_config": TAPS | {"block_size": 4, "selector_top_k": 16}},
        None,
        "DFlash2",
    ),
    "DFlash2 of speculators": ("speculators DFlash", {"speculators_model_type": "dflash2"}, None, "DFlash2"),
    "DFlash2 in secret": ("z-lab DFlash", {}, add("candidate_selector.predecessor_codebook"), "DFlash2"),
    "MLA": ("SpecForge", {"kv_lora_rank": 512}, None, "MLA drafters, .* latent"),
    "MLA by its mode": (
        "SpecForge",
        {"dflash_config": TAPS | {"projector_type": "dspark", "attention_mode": "mla"}},
        None,
        "MLA drafters",
    ),
    "MLA in secret": ("SpecForge", {}, add("layers.0.self_attn.kv_a_proj_with_mqa.weight"), "MLA drafters"),
    "NVFP4": ("Nemotron", NVFP4, None, "Nemotron DSpark is one of drafters with NVFP4 weights"),
    "NVFP4 in secret": ("Nemotron", {}, add("layers.0.mlp.up_proj.weight_scale_2"), r"quantized drafters \(NVFP4"),
    "FP8": ("DeepSpec", {"quantization_config": {"quant_method": "fp8"}}, None, "needs quantization_config="),
    "Eagle3": ("speculators DSpark", {"speculators_model_type": "eagle3"}, None, r"EAGLE \(eagle3\), .* has no block"),
    "Eagle3 by its architecture": ("DeepSpec", {"architectures": ["LlamaForCausalLMEagle3"]}, None, "EAGLE"),
    "another algorithm": ("speculators DSpark", {"speculators_model_type": "mtp"}, None, r"speculators \(mtp\)"),
    "another projector": (
        "SpecForge",
        {"dflash_config": TAPS | {"projector_type": "domino"}},
        None,
        r"SpecForge \(domino\)",
    ),
    "a scale on values": (
        "z-lab DFlash",
        {"dflash_config": TAPS | {"block_size": 4, "attention_value_scale": 0.6}},
        None,
        "attention_value_scale=0.6",
    ),
    "a mask embedding": ("z-lab DFlash", {}, add("mask_embedding"), "MiMo DFlash"),
    "rotations that differ": (
        "z-lab DFlash",
        {
            "rope_parameters": {
                "full_attention": ROPE["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
        None,
        "differ between layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_the_reason(case, tmp_path):
    name, raw, change, message = REFUSED[case]
    path, _ = changed(name, tmp_path / "d", raw, change=change)
    with pytest.raises(NotImplementedError, match=message) as error:
        DSparkDrafter.from_pretrained(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
