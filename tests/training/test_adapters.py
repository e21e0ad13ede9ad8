"""Adapters of `peft`: on a drafter and on its target; trained, saved, loaded, merged, generated with."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.training.test_trainer import SHAPE, trainer_of
from transformers_dspark import DSparkDrafter
from transformers_dspark.training import new_drafter
from transformers_dspark.training.adapters import with_lora
from transformers_dspark.training.held_out import target_states


# peft asks by a name that Transformers renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
PROMPT = torch.tensor([[5, 9, 17, 3]])


def generated(target, drafter, **options) -> torch.Tensor:
    return target.generate(
        input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=16, do_sample=False, **options
        | ({} if drafter is None else {"assistant_model": drafter}),
    )  # fmt: skip


def test_adapters_of_a_drafter(tiny, answers, tmp_path):
    published = new_drafter(tiny, SHAPE, answers, 0)
    published.save_pretrained(tmp_path / "published")
    before = {name: tensor.clone() for name, tensor in published.state_dict().items()}
    model = with_lora(published, 2)
    trainer = trainer_of(tiny, answers, tmp_path / "run", drafter=model, save_strategy="epoch", logging_steps=1)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < losses[0]
    for name, tensor in model.get_base_model().state_dict().items():  # what is not an adapter stays as it was
        if (plain := name.replace(".base_layer", "")) in before and "modules_to_save" not in name:
            assert torch.equal(tensor, before[plain]), name
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()

    opened = DSparkDrafter.from_pretrained(tmp_path / "published")
    adapted = PeftModel.from_pretrained(opened, tmp_path / "adapter").eval()
    alone = generated(tiny, None)
    assert torch.equal(generated(tiny, adapted), alone)
    merged = adapted.merge_and_unload().bind_target(tiny)
    merged.save_pretrained(tmp_path / "merged")
    again = DSparkDrafter.from_pretrained(tmp_path / "merged").bind_target(tiny)
    assert again.state_dict().keys() == before.keys()
    assert torch.equal(generated(tiny, again), alone)

    # merging changes nothing but rounding, and something was learned
    taps, _ = target_states(tiny, answers_row := torch.from_numpy(answers.ids[0])[None], SHAPE_TAPS)
    proposals = []
    for drafter in (trainer.drafter.eval(), again, DSparkDrafter.from_pretrained(tmp_path / "published")):
        drafter.bind_target(tiny)
        context = drafter.new_context()
        drafter.extend_context(context, taps, torch.arange(taps.shape[1])[None])
        proposals.append(drafter.propose(answers_row[:, -1], torch.tensor([taps.shape[1]]), context).logits)
    torch.testing.assert_close(proposals[0], proposals[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(proposals[1], proposals[2], rtol=1e-2, atol=1e-2)

    # a stopped run goes on with its adapters
    resumed = trainer_of(
        tiny, answers, tmp_path / "run", num_train_epochs=3, save_strategy="epoch",
        drafter=with_lora(DSparkDrafter.from_pretrained(tmp_path / "published"), 2, seed=9),
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step > trainer.state.global_step


SHAPE_TAPS = [1]


def test_a_target_with_adapters(tiny, answers, tmp_path):
    """Taps, labels and verification are those of the adapted target."""
    torch.manual_seed(0)
    plain = generated(tiny, None)
    target = get_peft_model(
        copy.deepcopy(tiny), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    ).eval()
    alone = generated(target, None)
    assert not torch.equal(alone, plain)
    ids = torch.from_numpy(answers.ids[0])[None]
    taps, last = target_states(target, ids, [1])
    states = target(ids, output_hidden_states=True).hidden_states
    assert torch.equal(taps, states[2])
    assert torch.equal(last, states[3])
    assert not torch.equal(taps, target_states(tiny, ids, [1])[0])
    drafter = new_drafter(target, SHAPE, answers, 0)
    trainer = trainer_of(target, answers, tmp_path, drafter=drafter, logging_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_rounds"] > 0
    drafter.eval()
    assert torch.equal(generated(target, drafter), alone)
