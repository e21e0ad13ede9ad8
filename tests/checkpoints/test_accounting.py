"""Every tensor and field is accounted for: one clear error that names what is wrong."""

import json

import pytest
import torch

from tests.reference import Reference
from transformers_dspark import DSparkConfig, DSparkDrafter


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.manual_seed(0)
    return Reference()


def canonical(path, **changes) -> DSparkDrafter:
    torch.manual_seed(0)
    config = DSparkConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mask_token_id": 39,
            "markov_rank": 4,
        }
        | changes
    )
    drafter = DSparkDrafter(config)
    if config.has_reduced_vocabulary:
        drafter.d2t.copy_(torch.arange(config.draft_vocab_size))  # every second token
    drafter.save_pretrained(path)
    return drafter


def rewrite(path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "missing": (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"missing: layers\.1\.mlp\.up_proj\.weight"),
    "two missing": (
        lambda t: (t.pop("norm.weight"), t.pop("markov_head.markov_w2.weight")),
        r"missing: markov_head\.markov_w2\.weight, norm\.weight",
    ),
    "no context projection": (lambda t: t.pop("fc.weight"), r"missing: fc\.weight"),
    "missing bias": (lambda t: t.pop("confidence_head.proj.bias"), r"missing: confidence_head\.proj\.bias"),
    "unexpected": (lambda t: t.update(extra=torch.ones(2)), r"unexpected: extra"),
    "unexpected layer": (
        lambda t: t.update({"layers.2.input_layernorm.weight": torch.ones(64)}),
        r"unexpected: layers\.2\.input_layernorm\.weight",
    ),
    "mis-shaped": (
        lambda t: t.update({"layers.0.self_attn.q_proj.weight": torch.ones(4, 64)}),
        r"layers\.0\.self_attn\.q_proj\.weight has shape \(4, 64\) instead of \(96, 64\)",
    ),
    "transposed head": (
        lambda t: t.update({"markov_head.markov_w2.weight": torch.ones(16, 311)}),
        r"markov_head\.markov_w2\.weight has shape \(16, 311\) instead of \(311, 16\)",
    ),
    "taps": (lambda t: t.update({"fc.weight": torch.ones(64, 192)}), r"fc\.weight reads 192 features, but 2 taps"),
    "confidence inputs": (
        lambda t: t.update({"confidence_head.proj.weight": torch.ones(1, 64)}),
        r"confidence_head\.proj\.weight has 64 inputs",
    ),
    "twice": (lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}), r"holds norm\.weight twice"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors(reference, name, tmp_path):
    change, message = CHANGES[name]
    tensors = reference.tensors()
    change(tensors)
    path = reference.save(tmp_path / "d", tensors=tensors)
    with pytest.raises(ValueError, match=message):
        DSparkDrafter.from_pretrained(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"missing: norm\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected: extra"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"norm\.weight has shape \(3,\) instead of \(16,\)"),
        (lambda t: t.pop("d2t"), "missing: d2t"),
        (lambda t: t["d2t"].__setitem__(19, 21), r"d2t does not lead to ascending target ids within 0\.\.39"),
        (lambda t: t["d2t"].__setitem__(0, -1), "d2t does not"),
        (lambda t: t["d2t"].__setitem__(3, 1), "d2t does not"),
    ],
    ids=[
        "missing",
        "unexpected",
        "shape",
        "no map",
        "map beyond the end",
        "map before the start",
        "map not ascending",
    ],
)
def test_tensors_of_the_canonical_form(change, message, tmp_path):
    canonical(tmp_path, draft_vocab_size=20)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["official", "canonical"])
def test_damaged_file(reference, kind, tmp_path):
    if kind == "official":
        reference.save(tmp_path)
    else:
        canonical(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        DSparkDrafter.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_empty_folder(tmp_path):
    with pytest.raises(OSError, match=r"config\.json"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_head_that_the_tensors_lack(reference, tmp_path):
    tensors = {name: t for name, t in reference.tensors().items() if "markov_head" not in name}
    path = reference.save(tmp_path / "d", tensors=tensors)
    with pytest.raises(ValueError, match="missing: markov_head"):
        DSparkDrafter.from_pretrained(path)
    without = reference.raw_config() | {"markov_rank": 0}
    path = reference.save(tmp_path / "d", tensors=tensors, config=without)
    with pytest.raises(ValueError, match="confidence_head_with_markov=True needs a sequential head"):
        DSparkDrafter.from_pretrained(path)


@pytest.mark.parametrize("field", ["mask_token_id", "target_layer_ids", "block_size", "hidden_size"])
def test_field_that_is_not_there(reference, field, tmp_path):
    raw = {name: value for name, value in reference.raw_config().items() if name != field}
    with pytest.raises(ValueError, match=f"lacks {field}"):
        DSparkDrafter.from_pretrained(reference.save(tmp_path / "d", config=raw))


# ---- families


@pytest.mark.parametrize(
    "option",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"enable_moe_block": True},
        {"hidden_size_per_layer_input": 256},
        {"num_kv_shared_layers": 1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_others_under_the_official_name(reference, option, tmp_path):
    path = reference.save(tmp_path / "d", config=reference.raw_config() | option)
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        DSparkDrafter.from_pretrained(path)


def test_gemma4_with_a_window(tmp_path):
    gemma4 = Reference(backbone="Gemma4")
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(NotImplementedError, match=r"layer_types=.* of a Gemma4 drafter"):
        DSparkDrafter.from_pretrained(gemma4.save(tmp_path / "d", config=gemma4.raw_config() | kinds))


def test_not_a_drafter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ValueError, match="is not a drafter: model_type='qwen3'"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_recognised_by_content_not_by_the_folders_name(reference, tmp_path):
    """The official "dflash" release has no heads and is anchor first all the same."""
    torch.manual_seed(0)
    bare = Reference(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    drafter = DSparkDrafter.from_pretrained(bare.save(tmp_path / "dflash_qwen3_4b_block7"))
    assert drafter.config.sample_from_anchor
    assert drafter.config.layout_source == "family (DeepSpec is anchor first)"
    assert drafter.markov_head is None
    assert drafter.confidence_head is None


# ---- configurations and files that lie


LIES = {
    "hidden_size": ["32", True, 2.5],
    "target_layer_ids": [3, ["1"], [True]],
    "mask_token_id": ["2", 2.5],
    "rope_parameters": ["default", {"rope_type": 3, "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": "x"}],
    "rope_type": [{"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}],
    "hidden_act": ["foo", 3],
    "dflash_config": [True],
    "architectures": [5],
    "layer_types": [3],
    "block_size": [True, "4"],
    "final_logit_softcapping": ["x"],
    "rms_norm_eps": ["x"],
    "num_attention_heads": [[2]],
    "markov_rank": ["4"],
    "attention_bias": ["yes"],
}
CASES = [(field, lie) for field, lies in LIES.items() for lie in lies]


@pytest.mark.parametrize(("field", "lie"), CASES, ids=[f"{field}={lie}" for field, lie in CASES])
@pytest.mark.parametrize("form", ["official", "canonical"])
def test_fields_that_lie(reference, form, field, lie, tmp_path):
    if form == "official":
        reference.save(tmp_path)
    else:
        canonical(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | (lie if field == "rope_type" else {field: lie})))
    expected = "rope_" if field == "rope_parameters" else field
    with pytest.raises(ValueError, match=expected):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(("field", "lie"), [("hidden_size", -1), ("per_layer_config", {"0": 3})])
def test_fields_of_gemma4_that_lie(field, lie, tmp_path):
    gemma4 = Reference(backbone="Gemma4")
    path = gemma4.save(tmp_path / "d", config=gemma4.raw_config() | {field: lie})
    with pytest.raises(ValueError, match=field.replace("_", "[_ ]")):
        DSparkDrafter.from_pretrained(path)


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("mask_token_id", None),
        ("rms_norm_eps", None),
        ("dtype", "float7"),
        ("confidence_temperatures", 3),
        ("confidence_temperatures", ["x"] * 7),
        ("rope_parameters", {"rope_type": "yarn"}),
    ],
)
def test_fields_of_the_canonical_form_that_lie(field, lie, tmp_path):
    canonical(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: lie}))
    with pytest.raises(ValueError, match=f"{field}="):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["null", "3", '"x"', "[]", "[1]"])
def test_configuration_that_is_no_object(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json of .* must hold an object"):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": []}', '{"weight_map": {"fc.weight": 3}}', "3", "{}", "x"])
@pytest.mark.parametrize("form", ["official", "canonical"])
def test_index_that_is_none(reference, form, text, tmp_path):
    if form == "official":
        reference.save(tmp_path)
    else:
        canonical(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is damaged or incomplete"):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"])
def test_matrices_with_one_dimension(reference, name, tmp_path):
    path = reference.save(tmp_path / "d", tensors=reference.tensors() | {name: torch.ones(64)})
    with pytest.raises(ValueError, match=rf"{name} has shape \(64,\), but must have two"):
        DSparkDrafter.from_pretrained(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_quantized_in_secret(reference, dtype, tmp_path):
    tensors = reference.tensors()
    tensors["fc.weight"] = tensors["fc.weight"].to(dtype)
    with pytest.raises(ValueError, match=rf"fc\.weight holds {dtype}"):
        DSparkDrafter.from_pretrained(reference.save(tmp_path / "d", tensors=tensors))
