import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from transformers_dspark import DSparkConfig, DSparkDrafter, DSparkGenerationConfig, StepCostTable
from transformers_dspark.generation_config import DraftingOptions
from transformers_dspark.packaging import options_beside
from transformers_dspark.step_costs import StepCost


DRAFTER = SimpleNamespace(config=SimpleNamespace(num_draft_tokens=5, enable_confidence_head=True))


def completed(config):
    """As `generate` hands it on: Transformers' global defaults filled in."""
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GenerationConfig(), DraftingOptions(5)),
        (GenerationConfig(num_assistant_tokens=3), DraftingOptions(3)),
        (GenerationConfig(num_assistant_tokens=9), DraftingOptions(5)),
        (GenerationConfig(assistant_confidence_threshold=0.3), DraftingOptions(5, 0.3)),
        (DSparkGenerationConfig(), DraftingOptions(5)),
        (DSparkGenerationConfig(assistant_confidence_threshold=0.4), DraftingOptions(5, 0.4)),
        (DSparkGenerationConfig(max_verify_tokens=2, seed=9), DraftingOptions(2, 0.0, 9)),
        (DSparkGenerationConfig(max_verify_tokens=4, num_assistant_tokens=1), DraftingOptions(1)),
        (DSparkGenerationConfig(max_verify_tokens=0), DraftingOptions(0)),
    ],
)
def test_what_counts_as_given(config, expected):
    assert DraftingOptions.resolve(completed(config), DRAFTER) == expected


def test_options_saved_beside_the_drafter():
    drafter = SimpleNamespace(
        config=DRAFTER.config, generation_config=DSparkGenerationConfig(max_verify_tokens=3, seed=1)
    )
    assert DraftingOptions.resolve(completed(GenerationConfig()), drafter) == DraftingOptions(3, 0.0, 1)
    ours = completed(DSparkGenerationConfig(max_verify_tokens=2))
    assert DraftingOptions.resolve(ours, drafter) == DraftingOptions(2, 0.0, 1)


def test_a_table_saved_beside_the_drafter_can_be_switched_off():
    saved = DSparkGenerationConfig(step_cost_table="costs.json")
    drafter = SimpleNamespace(config=DRAFTER.config, generation_config=saved)
    assert DraftingOptions.resolve(completed(GenerationConfig()), drafter).verify_mode == "compact"
    off = completed(DSparkGenerationConfig(step_cost_table=False))
    assert DraftingOptions.resolve(off, drafter) == DraftingOptions(5)
    assert off.to_dict()["step_cost_table"] is False


def test_save_and_load(tmp_path):
    config = DSparkGenerationConfig(max_verify_tokens=3, seed=7, assistant_confidence_threshold=0.25, max_new_tokens=9)
    config.save_pretrained(tmp_path)
    assert DSparkGenerationConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 9


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"seed": np.int64(5), "max_new_tokens": np.int32(9)}, {"seed": 5, "max_new_tokens": 9}),
        ({"seed": [np.int64(5), 6]}, {"seed": [5, 6]}),
        ({"assistant_confidence_threshold": np.float32(0.5)}, {"assistant_confidence_threshold": 0.5}),
        ({"step_cost_table": Path("costs.json")}, {"step_cost_table": "costs.json"}),
        ({"step_cost_table": {"steps": [np.float64(2)]}}, {"step_cost_table": {"steps": [2.0]}}),
    ],
)
def test_what_is_given_can_be_written(given, written):
    config = DSparkGenerationConfig(**given)
    assert written.items() <= json.loads(config.to_json_string()).items()
    assert repr(config)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dspark_loop": "batch"}, ValueError),
        ({"verify_mode": "eager"}, ValueError),
        ({"scheduler": "greedy"}, ValueError),
        ({"seed": ["a", "b"]}, ValueError),
        ({"seed": 1.5}, ValueError),
        ({"seed": [1, None]}, ValueError),
        ({"seed": 2**63}, ValueError),
        ({"step_cost_table": 3}, ValueError),
        ({"step_cost_table": ["costs.json"]}, ValueError),
        ({"max_verify_tokens": -1}, ValueError),
        ({"assistant_confidence_threshold": 2}, ValueError),
    ],
)
def test_out_of_range(options, error):
    with pytest.raises(error, match=next(iter(options))):
        DSparkGenerationConfig(**options)


def test_options_of_a_call_are_looked_at_as_well():
    for name, value in (("num_assistant_tokens", torch.tensor([1, 2])), ("step_cost_table", 3), ("seed", [1, None])):
        config = completed(DSparkGenerationConfig())
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            DraftingOptions.resolve(config, DRAFTER)


def test_seeds_of_rows():
    assert DraftingOptions(5, seed=np.int64(7)).seed_of(2) == 9
    assert DraftingOptions(5, seed=[7, np.int64(1)]).seed_of(1) == 1


def greedy_lengths(target, drafter, prompt):
    out = target.generate(
        prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    return out.dspark.verify_lengths[0]


def test_options_in_the_drafters_folder(tmp_path):
    """What is saved beside the weights is loaded with them, holds in `generate`, and is saved again."""
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, eos_token_id=None)).eval()
    prompt = torch.tensor([[3, 1, 4]])
    drafter = DSparkDrafter(DSparkConfig(**shape, num_hidden_layers=1, target_layer_ids=[0], block_size=4))
    drafter.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "generation_config.json").exists()
    plain = DSparkDrafter.from_pretrained(tmp_path / "plain")
    assert plain.generation_config is None
    assert max(greedy_lengths(target, plain, prompt)) == 4

    DSparkGenerationConfig(max_verify_tokens=2, seed=7).save_pretrained(tmp_path / "plain")
    for folder in (tmp_path / "plain", tmp_path / "again"):
        carrying = DSparkDrafter.from_pretrained(folder)
        assert carrying.generation_config.max_verify_tokens == 2
        assert max(greedy_lengths(target, carrying, prompt)) == 2
        sampled = [
            target.generate(prompt, assistant_model=carrying, max_new_tokens=12, do_sample=True).tolist()
            for _ in range(2)
        ]
        assert sampled[0] == sampled[1]  # its seed
        carrying.save_pretrained(tmp_path / "again")
    call = DSparkGenerationConfig(max_verify_tokens=1, max_new_tokens=6, return_dict_in_generate=True)
    out = target.generate(prompt, assistant_model=carrying, generation_config=call)
    assert max(out.dspark.verify_lengths[0]) == 1


def test_a_table_itself_is_saved_beside_the_drafter(tmp_path):
    """The loaded options hold its numbers, and calls schedule by them."""
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, eos_token_id=None)).eval()
    drafter = DSparkDrafter(
        DSparkConfig(**shape, num_hidden_layers=1, target_layer_ids=[0], block_size=4, enable_confidence_head=True)
    )
    table = StepCostTable([StepCost(1, tokens, 0, 1.0 + tokens) for tokens in (1, 5)])
    drafter.generation_config = DSparkGenerationConfig(step_cost_table=table)
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert StepCostTable.load(loaded.generation_config.step_cost_table).to_dict() == table.to_dict()
    out = target.generate(
        torch.tensor([[3, 1, 4]]), assistant_model=loaded, max_new_tokens=8, return_dict_in_generate=True
    )
    assert out.dspark.schedule["rounds"] == out.dspark.rounds


def test_options_on_the_hub(tmp_path, monkeypatch):
    asked = []

    def download(repo, name, **hub):
        asked.append((repo, name, hub))
        if repo == "org/without":
            raise EntryNotFoundError("no such file")
        return str(tmp_path / name)

    monkeypatch.setattr("transformers_dspark.packaging.hf_hub_download", download)
    DSparkGenerationConfig(seed=3).save_pretrained(tmp_path)
    assert options_beside("org/with", revision="r", dtype="auto").seed == 3
    assert options_beside("org/without") is None
    assert asked[0] == ("org/with", "generation_config.json", {"subfolder": None, "revision": "r"})


def test_damaged_options_are_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OSError, match=r"generation_config\.json"):
        options_beside(tmp_path)
