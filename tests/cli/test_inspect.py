"""What `dspark inspect` says of every family, of what is refused, and of what is broken."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints.families import SHAPE, TWINS, canonical, tensors_of, write
from tests.deepseek_v4.tiny import write_checkpoint
from transformers_dspark import DSparkDrafter, cli
from transformers_dspark.evaluation import layout_probe


def inspected(path, tmp_path, *more, code=0):
    file = tmp_path / "report.json"
    assert cli.main(["inspect", str(path), "--json", str(file), *more]) == code
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", TWINS)
def test_families(name, tmp_path, capsys):
    twin = TWINS[name]
    drafter = canonical(twin)
    path = write(tmp_path / "d", twin.raw, tensors_of(twin, drafter))
    report = inspected(path, tmp_path)
    config = drafter.config
    assert report["family"] == twin.family
    assert report["recognised_by"]
    assert report["problem"] is None
    assert report["layout"]["sample_from_anchor"] == config.sample_from_anchor
    assert report["layout"]["source"] != "canonical"
    assert (report["block_size"], report["drafted_tokens"]) == (4, config.num_draft_tokens)
    assert report["taps"] == [0, 2, 4]
    assert report["heads"]["markov"] == (config.markov_head_type if config.markov_rank else None)
    assert report["heads"]["confidence"] == config.enable_confidence_head
    assert report["vocabulary"] == {"size": 61, "proposed": config.draft_vocab_size}
    assert report["backbone"]["sliding_window"] == config.sliding_window
    assert report["target"]["hidden_size"] == 32
    assert report["target"]["layers"] == config.num_target_layers
    assert report["target"]["layers_at_least"] == 5
    assert report["size"]["bytes_in_file"] == report["size"]["bytes_kept"]
    shown = " ".join(capsys.readouterr().out.split())
    assert twin.family in shown
    assert f"{config.num_draft_tokens} drafted tokens" in shown


def test_what_stays_in_the_file_and_whose_target(tmp_path, capsys):
    twin = TWINS["speculators DSpark, reduced"]
    verifier = {"verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}}
    raw = twin.raw | {"speculators_config": twin.raw["speculators_config"] | verifier}
    extra = {"t2d": torch.ones(61, dtype=torch.bool), "verifier_norm.weight": torch.ones(32)}
    extra["embed_tokens.weight"] = torch.ones(61, 32)
    report = inspected(write(tmp_path / "d", raw, tensors_of(twin, canonical(twin)) | extra), tmp_path)
    assert report["left_out"] == sorted(extra)
    assert report["target"]["name"] == "org/target"
    assert (report["embedding"], report["head"]) == ("the target's", "its own")
    assert report["size"]["bytes_in_file"] == report["size"]["bytes_kept"] + sum(t.nbytes for t in extra.values())
    assert "org/target" in capsys.readouterr().out


def test_canonical_names_its_target_in_the_card(tmp_path, capsys):
    canonical(TWINS["DeepSpec"]).save_pretrained(tmp_path / "d")
    (tmp_path / "d" / "README.md").write_text("---\nbase_model: org/other\n---\n")
    report = inspected(tmp_path / "d", tmp_path)
    assert (report["family"], report["recognised_by"]) == ("canonical", "model_type dspark")
    assert report["target"]["name"] == "org/other"
    capsys.readouterr()


def test_refused_families_are_described(tmp_path, capsys):
    raw = TWINS["speculators DSpark"].raw | {"speculators_model_type": "eagle3"}
    path = write(tmp_path / "eagle", raw, {"x": torch.ones(1)})
    report = inspected(path, tmp_path, code=1)
    assert report["family"] == "EAGLE (eagle3)"
    assert "cannot run yet: it drafts one token after another" in report["problem"]
    twin = TWINS["DeepSpec"]
    path = write(tmp_path / "mla", twin.raw | {"kv_lora_rank": 8}, tensors_of(twin, canonical(twin)))
    report = inspected(path, tmp_path, code=1)
    assert report["family"] == "DeepSpec"
    assert "MLA" in report["problem"]
    assert "refused" in capsys.readouterr().out


def test_a_target_with_a_drafter_inside(tmp_path, capsys):
    path = write_checkpoint(tmp_path / "d")
    report = inspected(path, tmp_path)
    assert report["family"] == "DSpark embedded in a DeepSeek-V4 target"
    assert report["recognised_by"] == "field dspark_block_size"
    assert (report["block_size"], report["drafted_tokens"], report["taps"]) == (5, 5, [1, 2, 3])
    assert report["backbone"]["type"] == "deepseek_v4"
    assert report["heads"]["markov_rank"] == 6
    assert "in 2 files" in report["plan"]
    drafter = DSparkDrafter.from_pretrained(path)
    assert report["size"]["parameters"] == sum(p.numel() for p in drafter.parameters())
    assert "to load it" in capsys.readouterr().out


def test_a_target_without_its_drafters_tensors(tmp_path, capsys):
    raw = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5}
    report = inspected(write(tmp_path / "d", raw, {"x": torch.ones(1)}), tmp_path, code=1)
    assert "the files hold no mtp.* tensors" in report["problem"]
    capsys.readouterr()


def test_broken_checkpoints_say_what_is_missing(tmp_path, capsys):
    twin = TWINS["DeepSpec"]
    tensors = tensors_of(twin, canonical(twin))
    del tensors["norm.weight"]
    report = inspected(write(tmp_path / "d", twin.raw, tensors), tmp_path, code=1)
    assert "missing: norm.weight" in report["problem"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere at all"], "no drafter at 'nowhere at all'"),
        (["PATH"], "This is not a drafter"),
        (["PATH", "--probe", "org/target"], "--probe TARGET and --prompts FILE go together"),
        (["PATH", "--prompts", "FILE"], "--probe TARGET and --prompts FILE go together"),
    ],
)
def test_bad_input_is_one_line(words, part, tmp_path, capsys):
    write(tmp_path / "llama", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {"x": torch.ones(1)})
    assert cli.main(["inspect", *(word.replace("PATH", str(tmp_path / "llama")) for word in words)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_probe(tmp_path, capsys, monkeypatch):
    """The target's own words are drafted in both layouts; the figures are those of `probe_layout`."""
    from tests.cli.tokenizer import word_tokenizer

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).save_pretrained(tmp_path / "target")
    word_tokenizer(61).save_pretrained(tmp_path / "target")
    twin = TWINS["DeepSpec"]
    path = write(tmp_path / "d", twin.raw, tensors_of(twin, canonical(twin)))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["t05 t17 t03"]}\n{"turns": ["t09"]}\n')
    seen = []

    def measured(drafter, target, prompts, max_new_tokens):
        seen.append(original(drafter, target, prompts, max_new_tokens))
        return seen[-1]

    original = layout_probe.probe_layout
    monkeypatch.setattr(layout_probe, "probe_layout", measured)
    more = ["--probe", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "8"]
    report = inspected(path, tmp_path, *more, "--device", "cpu")
    assert report["probe"]["prompts"] == 2
    assert report["probe"]["anchor_first"] == seen[0].anchor_first >= 1
    assert report["probe"]["filler"] == seen[0].filler >= 1
    assert "in layout F" in capsys.readouterr().out
