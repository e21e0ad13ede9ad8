"""The probe tells the layout that a drafter was trained for, and says when it is read in the other."""

import json
import logging

import pytest
import torch

from tests.golden import DATA, read
from transformers_dspark import DSparkDrafter
from transformers_dspark.evaluation.layout_probe import probe_layout


FOLDER = DATA / "qwen3_vanilla"


@pytest.fixture(scope="module")
def golden():
    return read(FOLDER)


@pytest.mark.parametrize("declared", [True, False])
def test_probe(golden, declared, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers_dspark"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    prompts = [golden.tensors[f"p{number}.prompt_ids"][0] for number in range(len(golden.facts["prompts"]))]
    drafter = DSparkDrafter.from_pretrained(FOLDER / "drafter", sample_from_anchor=declared)
    drafter.config.confidence_temperatures = [1.0] * drafter.config.num_draft_tokens
    before = json.dumps(drafter.config.to_dict(), sort_keys=True)
    probe = probe_layout(drafter, golden.target, prompts, max_new_tokens=24)
    assert json.dumps(drafter.config.to_dict(), sort_keys=True) == before
    assert probe.sample_from_anchor
    assert probe.anchor_first > 2
    assert probe.filler < 1.5
    assert ("open it with sample_from_anchor=True" in caplog.text) == (not declared)


def test_no_prompts(golden):
    with pytest.raises(ValueError, match="no prompts"):
        probe_layout(DSparkDrafter.from_pretrained(FOLDER / "drafter"), golden.target, [])


def test_what_it_counts_is_what_generate_reports(golden):
    """Per prompt, the mean accepted length of a call with the drafter over the same tokens."""
    prompt = golden.tensors["p0.prompt_ids"]
    drafter = DSparkDrafter.from_pretrained(FOLDER / "drafter")
    probe = probe_layout(drafter, golden.target, [prompt[0]], max_new_tokens=24)
    outputs = golden.target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert probe.anchor_first == pytest.approx(outputs.dspark.mean_accepted_length)
