"""`dspark export`: folders that open again, uploads, and refusals in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints.families import SHAPE, TWINS, canonical, tensors_of, write
from tests.checkpoints.test_families import assert_drafts_alike
from tests.hub import LocalHub
from transformers_dspark import DSparkDrafter, cli


@pytest.fixture
def source(tmp_path):
    twin = TWINS["DeepSpec"]
    drafter = canonical(twin)
    extra = {name: torch.randn(61, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    return write(tmp_path / "d", twin.raw, tensors_of(twin, drafter) | extra)


@pytest.fixture
def target(tmp_path) -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).eval()
    model.save_pretrained(tmp_path / "target")
    return model


@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("deepspec", "DeepSpec"),
        ("specforge", "SpecForge DSpark"),
        ("speculators", "speculators"),
        ("canonical", "canonical"),
    ],
)
def test_forms(form, family, source, target, tmp_path, capsys):
    words = ["export", str(source), str(tmp_path / "out"), "--to", form, "--json", str(tmp_path / "report.json")]
    assert cli.main(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["family"] == family
    assert report["problem"] is None
    assert family in capsys.readouterr().out
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "out" / "model.safetensors").keys()
    assert_drafts_alike(DSparkDrafter.from_pretrained(tmp_path / "out"), DSparkDrafter.from_pretrained(source), target)


def test_whose_embeddings(source, target, tmp_path, capsys):
    words = ["export", str(source), "--to", "deepspec"]
    assert cli.main([*words, str(tmp_path / "own"), "--own-embeddings"]) == 0
    assert cli.main([*words, str(tmp_path / "targets"), "--target", str(tmp_path / "target")]) == 0
    files = {name: load_file(tmp_path / name / "model.safetensors") for name in ("d", "own", "targets")}
    for name, part in (("embed_tokens.weight", target.model.embed_tokens), ("lm_head.weight", target.lm_head)):
        assert torch.equal(files["own"][name], files["d"][name])
        assert torch.equal(files["targets"][name], part.weight)
    kept = DSparkDrafter.from_pretrained(tmp_path / "own")
    assert kept.config.own_embeddings
    assert_drafts_alike(kept, DSparkDrafter.from_pretrained(source, own_embeddings=True), target)
    capsys.readouterr()


def test_upload(source, tmp_path, capsys, monkeypatch):
    hub = LocalHub(tmp_path / "hub", monkeypatch)
    words = ["export", str(source), str(tmp_path / "out"), "--to", "speculators", "--push-to-hub", "org/drafter"]
    assert cli.main(words) == 0
    assert hub.commits == [("org/drafter", ["config.json", "model.safetensors"])]
    DSparkDrafter.from_pretrained(tmp_path / "hub" / "org" / "drafter")
    assert "Uploaded to org/drafter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["OUT", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["OUT"], "--to"),
        (["SOURCE", "--to", "deepspec"], "is not empty: name a new folder"),
        (["OUT", "--to", "deepspec", "--target", "t", "--own-embeddings"], "give one of them"),
        (["OUT", "--to", "deepspec", "--own-embeddings"], "holds no embed_tokens.weight"),
    ],
)
def test_refusals_are_one_line(words, part, tmp_path, capsys):
    twin = TWINS["z-lab DFlash"]
    source = write(tmp_path / "d", twin.raw, tensors_of(twin, canonical(twin)))
    places = {"SOURCE": str(source), "OUT": str(tmp_path / "out")}
    assert cli.main(["export", str(source), *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_the_form_cannot_say_is_one_line(tmp_path, capsys):
    twin = TWINS["z-lab DFlash"]
    source = write(tmp_path / "d", twin.raw, tensors_of(twin, canonical(twin)))
    assert cli.main(["export", str(source), str(tmp_path / "out"), "--to", "speculators"]) == 2
    error = capsys.readouterr().err
    assert "its windows begin at the anchor, here at the query" in error
    assert error.count("\n") == 1
