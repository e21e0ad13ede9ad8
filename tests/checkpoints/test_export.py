"""Drafters written in the other projects' forms and opened again: the same bits; or a reason why not."""

import itertools
import json
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from tests.checkpoints.families import HEADS, ROPE, SHAPE, TAPS, TWINS, YARN, canonical, tensors_of, write
from tests.checkpoints.test_families import IGNORED, assert_drafts_alike, drafted
from tests.golden import FAMILIES
from tests.reference import Reference
from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.checkpoints.forms import FORMS
from transformers_dspark.checkpoints.tensors import EMBEDDING, HEAD
from transformers_dspark.exporting import export_drafter


FAMILY_OF = {"deepspec": "DeepSpec", "specforge": "SpecForge DSpark", "speculators": "speculators"}
GEMMA = {
    "backbone_type": "gemma4",
    "hidden_act": "gelu_pytorch_tanh",
    "embedding_scale": 32**0.5,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).eval()


def made(**fields) -> DSparkDrafter:
    """A drafter with random weights; a reduced vocabulary is every second token."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(DSparkConfig(**SHAPE | ROPE | TAPS | {"block_size": 4} | fields)).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
        if drafter.config.tie_word_embeddings:
            drafter.lm_head.weight = drafter.embed_tokens.weight
        if drafter.config.has_reduced_vocabulary:
            drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
    return drafter


def variants(form: str, count: int = 24) -> list[dict]:
    """Random combinations of everything that the form can say."""
    axes = {
        "markov": [{}] + [HEADS | {"markov_head_type": kind} for kind in ("vanilla", "gated", "rnn")],
        "confidence": [
            {},
            {"confidence_head_with_markov": False},
            {"enable_confidence_head": False, "confidence_head_with_markov": False},
        ],
        "layout": [{"sample_from_anchor": True}, {"sample_from_anchor": False}],
        "vocabulary": [{}, {"draft_vocab_size": 30}, {"draft_vocab_size": 30, "own_head": True}],
        "embedding": [{}, {"own_embeddings": True}],
        "rope": [{}, {"rope_parameters": YARN}],
        "taps": [{}, {"target_layer_ids": [-1, 0, 5]}],
        "depth": [{}, {"num_target_layers": 6}],
        "window": [{}],
    }
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    causal = {"causal_layer_types": ["sliding_attention"]}
    if form == "specforge":
        axes["window"] += [windows | causal]
    if form == "speculators":
        axes["window"] += [windows | causal | {"sliding_window_from": "anchor"}]
        axes["window"] += [windows | {"sliding_window_from": "anchor"}]
    everything = list(itertools.product(*axes.values()))
    chosen = random.Random(form).sample(everything, count)
    return [dict(pair for part in parts for pair in part.items()) for parts in chosen]


def differing(one: DSparkConfig, other: DSparkConfig) -> dict:
    ours, theirs = one.to_dict(), other.to_dict()
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name] and name not in IGNORED}


@pytest.mark.parametrize("form", FORMS)
def test_round_trips(form, target, tmp_path):
    for number, fields in enumerate(variants(form)):
        drafter, folder = made(**fields), tmp_path / str(number)
        export_drafter(drafter, folder, form)
        again = DSparkDrafter.from_pretrained(folder)
        assert not differing(drafter.config, again.config), fields
        assert again.config.layout_source == "flag"
        assert_drafts_alike(again, drafter, target)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TWINS)
def test_every_family_in_every_form(form, name, target, tmp_path):
    """What the form can say arrives unchanged; the rest is refused by what it cannot say."""
    twin = TWINS[name]
    drafter = DSparkDrafter.from_pretrained(write(tmp_path / "d", twin.raw, tensors_of(twin, canonical(twin))))
    refused = {
        "Nemotron": ("sinks", "sinks", "sinks"),
        "Muse": ("no sliding windows", "here they see all of it", "begin at the anchor, here at the query"),
        "speculators DFlash": ("no sliding windows", "begin at the query, here at the anchor", None),
        "speculators DSpark, reduced": ("no sliding windows", "begin at the query, here at the anchor", None),
        "SpecForge": ("no sliding windows", None, "begin at the anchor, here at the query"),
        "z-lab DFlash": ("no sliding windows", None, "begin at the anchor, here at the query"),
    }.get(name, (None, None, None))[list(FORMS).index(form)]
    if refused:
        with pytest.raises(NotImplementedError, match=f"cannot be written in the form of .*{refused}"):
            export_drafter(drafter, tmp_path / "out", form)
        assert not (tmp_path / "out").exists()
    else:
        export_drafter(drafter, tmp_path / "out", form)
        again = DSparkDrafter.from_pretrained(tmp_path / "out")
        assert not differing(drafter.config, again.config)
        assert_drafts_alike(again, drafter, target)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"causal_layer_types": ["full_attention"]}, "its full attention sees the whole block"),
        ({"raw_embedding": True}, "with the norm behind it"),
        ({"own_head": True}, "comes with an embedding of its own"),
        ({"own_embeddings": True, "embedding_scale": 3.0}, "scales its own embedding by 1, here by 3"),
        ({"own_embeddings": True, "final_logit_softcapping": 9.0}, "no softcap"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_no_form_can_say(form, fields, reason, tmp_path):
    with pytest.raises(NotImplementedError, match=reason):
        export_drafter(made(**fields), tmp_path / "out", form)


def test_gemma4_only_as_deepspec(tmp_path):
    for fields in ({}, {"sample_from_anchor": False}, {"attention_k_eq_v": True}):
        drafter = made(**GEMMA | HEADS | fields, own_embeddings=True)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        export_drafter(drafter, folder, "deepspec")
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Gemma4DSparkModel"]
        again = DSparkDrafter.from_pretrained(folder)
        assert not differing(drafter.config, again.config)
        assert_drafts_alike(again, drafter, LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})))
    for form in ("specforge", "speculators"):
        with pytest.raises(NotImplementedError, match="no backbone_type='gemma4'"):
            export_drafter(drafter, tmp_path / form, form)


def test_everything_is_said(tmp_path):
    """Layout, number of drafted tokens and taps stand in every file, in the words of each project."""
    drafter = made(**HEADS, sample_from_anchor=False, draft_vocab_size=30, own_head=True)
    raw = {}
    for form in FORMS:
        export_drafter(drafter, tmp_path / form, form)
        raw[form] = json.loads((tmp_path / form / "config.json").read_text())
        assert raw[form]["sample_from_anchor"] is False
        assert raw[form]["block_size"] == 4
        assert raw[form]["draft_vocab_size"] == 30
        assert raw[form]["dtype"] == "float32"
        Qwen3Config(**(raw[form].get("transformer_layer_config") or raw[form]))  # as engines read it
    assert raw["deepspec"]["target_layer_ids"] == raw["specforge"]["dflash_config"]["target_layer_ids"] == [0, 2, 4]
    assert raw["deepspec"]["speculative_tokens"] == raw["specforge"]["speculative_tokens"] == 3
    assert raw["specforge"]["dflash_config"]["projector_type"] == "dspark"
    assert raw["speculators"]["aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert raw["speculators"]["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    t2d = load_file(tmp_path / "speculators" / "model.safetensors")["t2d"]
    assert t2d.dtype == torch.bool
    assert torch.equal(t2d.nonzero()[:, 0], drafter.draft_vocabulary())


def test_the_proposal_width_alone_tells_the_layout(tmp_path):
    for form, anchor in itertools.product(FORMS, (True, False)):
        folder = tmp_path / f"{form}-{anchor}"
        export_drafter(made(**HEADS, sample_from_anchor=anchor), folder, form)
        raw = json.loads((folder / "config.json").read_text())
        for level in (raw, raw.get("dflash_config", {})):
            level.pop("sample_from_anchor", None)
            level.pop("dspark_bonus_anchor", None)
        (folder / "config.json").write_text(json.dumps(raw))
        config = DSparkDrafter.from_pretrained(folder).config
        assert (config.sample_from_anchor, config.layout_source) == (anchor, "proposal width")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [61, 30])
def test_with_the_targets_embedding_and_head(form, size, target, tmp_path):
    drafter = made(**HEADS, draft_vocab_size=size)
    export_drafter(drafter, tmp_path / "out", form, target)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.model.embed_tokens.weight)
    rows = drafter.draft_vocabulary() if size < 61 else torch.arange(61)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[rows])
    again = DSparkDrafter.from_pretrained(tmp_path / "out")
    assert not again.config.own_embeddings  # a copy is no reason to hold it twice
    alone = DSparkDrafter.from_pretrained(tmp_path / "out", own_embeddings=True)
    for other in (again, alone):
        ours, theirs = drafted(drafter, target), drafted(other, target)
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-5)


def test_a_target_whose_scales_no_file_can_say(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = SHAPE | {"num_hidden_layers": 6}
    for scales in ({"embedding_multiplier": 3.0}, {"logits_scaling": 2.0}):
        granite = GraniteForCausalLM(GraniteConfig(**shape, **scales))
        with pytest.raises(NotImplementedError, match="for which the file has no field"):
            export_drafter(made(), tmp_path / "out", "deepspec", granite)
    other = LlamaForCausalLM(LlamaConfig(**shape | {"vocab_size": 60}))
    with pytest.raises(ValueError, match="does not fit"):
        export_drafter(made(), tmp_path / "out", "deepspec", other)
    with pytest.raises(ValueError, match="form='gguf' must be one of"):
        export_drafter(made(), tmp_path / "out", "gguf")


def test_tied_and_calibrated(target, tmp_path):
    drafter = made(
        **HEADS, own_embeddings=True, tie_word_embeddings=True, confidence_temperatures=[0.5, 1.0, 2.0, 3.0]
    )
    for form in FORMS:
        export_drafter(drafter, tmp_path / form, form)
        again = DSparkDrafter.from_pretrained(tmp_path / form)
        assert not differing(drafter.config, again.config)
        assert again.lm_head.weight is again.embed_tokens.weight
        assert_drafts_alike(again, drafter, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype, tmp_path):
    drafter = made(**HEADS).to(dtype)
    for form in FORMS:
        export_drafter(drafter, tmp_path / form, form)
        again = DSparkDrafter.from_pretrained(tmp_path / form)
        assert again.dtype == dtype
        assert all(torch.equal(t, again.state_dict()[name]) for name, t in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("specforge", "specforge_dspark"),
        ("speculators", "speculators_dspark_a"),
        ("speculators", "speculators_dspark_f_reduced"),
    ],
)
def test_fields_are_those_that_the_projects_write(form, name, tmp_path):
    """Every field of a published file that decides how it is read comes back where it stood."""
    folder = FAMILIES / name / "drafter"
    if folder.exists():
        theirs = json.loads((folder / "config.json").read_text())
    else:
        theirs = json.loads((FAMILIES / "configs" / f"{name}.json").read_text())
        yarn = {"rope_parameters": theirs["rope_parameters"]} if "rope_parameters" in theirs else {}
        tensors = Reference(intermediate_size=96, target_layer_ids=[0, 2, 4], **yarn).tensors()
        folder = write(tmp_path / "source", theirs, {n: tensors[n] for n in tensors.keys() - {EMBEDDING, HEAD}})
    export_drafter(DSparkDrafter.from_pretrained(folder), tmp_path / "out", form)
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    unread = {"auto_map", "transformers_version", "confidence_head_alpha", "max_window_layers", "verifier"}
    for levels in ((), ("dflash_config",), ("transformer_layer_config",), ("speculators_config",)):
        one, other = (raw.get(levels[0], {}) if levels else raw for raw in (theirs, ours))
        lost = {
            name: (value, other.get(name))
            for name, value in one.items()
            if name not in unread and other.get(name) != value and not (name.endswith("_config") and value)
        }
        assert not lost
    assert set(load_file(folder / "model.safetensors")) == set(load_file(tmp_path / "out" / "model.safetensors"))
