"""Golden parity with other projects: what their own code made of the same weights, float32, 1e-4 relative."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.golden import FAMILIES, close
from transformers_dspark import DSparkDrafter


FOLDERS = sorted(path for path in FAMILIES.iterdir() if (path / "drafter").is_dir())
FORMS = [(folder, None) for folder in FOLDERS]
FORMS += [(folder, variant) for folder in FOLDERS for variant in sorted(folder.glob("variants/*.json"))]
EXPECTED = {
    "zlab_dflash": ("family (z-lab DFlash is filler first)", [0, 2, 4], []),
    "speculators_dspark_f_reduced": ("flag", [0, 1, 3], ["sliding_attention"]),
    "config.block_size_nested.json": ("family (z-lab DFlash is filler first)", [0, 2, 4], []),
    "config.no_flag.json": ("proposal width", [0, 1, 3], ["sliding_attention"]),
}


def stand_in(golden: dict[str, torch.Tensor], config) -> Qwen3ForCausalLM:
    """A target of which only the parts that a drafter borrows are those of the golden run."""
    torch.manual_seed(0)
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.target_hidden_size, "intermediate_size": 32}
    layers = max(config.target_layer_ids) + 2
    target = Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    )
    with torch.no_grad():
        target.get_input_embeddings().weight[golden["target.embedding_ids"]] = golden["target.embedding_rows"]
        if "target.head" in golden:
            target.get_output_embeddings().weight.copy_(golden["target.head"])
    return target


@pytest.mark.parametrize(("folder", "variant"), FORMS, ids=[f"{f.name} {v.name if v else ''}" for f, v in FORMS])
@torch.inference_mode()
def test_rounds(folder, variant, tmp_path):
    shutil.copyfile(variant or folder / "drafter" / "config.json", tmp_path / "config.json")
    shutil.copyfile(folder / "drafter" / "model.safetensors", tmp_path / "model.safetensors")
    facts, golden = json.loads((folder / "golden.json").read_text()), load_file(folder / "golden.safetensors")
    drafter = DSparkDrafter.from_pretrained(tmp_path)
    config = drafter.config
    found = (config.layout_source, config.target_layer_ids, config.causal_layer_types)
    assert found == EXPECTED[variant.name if variant else folder.name]
    assert config.sample_from_anchor == (facts["layout"] == "A")
    drafter.bind_target(stand_in(golden, config))
    for number, prompt in enumerate(facts["prompts"]):
        context, output = drafter.new_context(), golden[f"p{number}.output_ids"][0]
        for index, facts_of_round in enumerate(prompt["rounds"]):
            key, start = f"p{number}.r{index}.", facts_of_round["start"]
            expected = {name.removeprefix(key): t for name, t in golden.items() if name.startswith(key)}
            drafter.extend_context(context, expected["context_features"], torch.arange(context.length, start)[None])
            anchor, place = torch.tensor([facts_of_round["anchor"]]), torch.tensor([start])
            hidden = drafter.block_states(anchor, place, context)
            proposal = drafter.propose(anchor, place, context)
            assert close(hidden, expected["block_hidden"])
            assert torch.equal(proposal.tokens, expected["draft_ids"])
            assert close(proposal.logits[..., drafter.draft_vocabulary()], expected["corrected_logits"])
            assert bool(proposal.logits.isfinite().sum() == expected["corrected_logits"].numel())
            if "base_logits" in expected:
                assert close(drafter.unembed(hidden[:, config.first_draft_row :]), expected["base_logits"])
            assert (proposal.confidence is None) == ("confidence_logits" not in expected)
            if proposal.confidence is not None:
                assert close(proposal.confidence.logit(), expected["confidence_logits"])
            greedy = output[start + 1 : start + 1 + config.num_draft_tokens]
            accepted = (proposal.tokens[0, : len(greedy)] == greedy).long().cumprod(dim=0).sum()
            assert accepted == facts_of_round["accepted_draft"]
