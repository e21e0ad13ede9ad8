"""The trainer: golden losses, resume, budgets, logs, evaluation, and that a drafter learns."""

import copy
import functools
import json
import math

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.golden import DATA, WITH_TARGET, close, read
from tests.training.tiny import greedy_answers
from transformers_dspark import DSparkDrafter
from transformers_dspark.modeling_dspark import Proposal
from transformers_dspark.training import (
    AnswerDataset,
    DrafterShape,
    DSparkTrainer,
    DSparkTrainingArguments,
    new_drafter,
    pace,
)
from transformers_dspark.training.anchors import pack_blocks
from transformers_dspark.training.data import Sequences, split
from transformers_dspark.training.held_out import decoded_accepted_length, held_out_accepted_length


SHAPE = DrafterShape(num_layers=1, block_size=4, markov_rank=8)
SMALL_RUN = {
    "num_train_epochs": 2,
    "tokens_per_batch": 256,
    "anchors": 8,
    "learning_rate": 3e-3,
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "report_to": "none",
}


def trainer_of(target, answers, out, shape=SHAPE, held_out=4, drafter=None, **changes) -> DSparkTrainer:
    train, aside = split(answers, held_out, 0)
    return DSparkTrainer(
        drafter or new_drafter(target, shape, train, 0),
        DSparkTrainingArguments(str(out), **SMALL_RUN | changes),
        target=target,
        train_dataset=AnswerDataset(train),
        eval_dataset=AnswerDataset(aside),
    )


# ---- golden values


@pytest.mark.parametrize("folder", WITH_TARGET, ids=lambda folder: folder.name)
def test_golden_loss_and_gradients(folder, tmp_path):
    """What the official code makes of a batch, through a step of the trainer, in one batch and in two."""
    golden = read(folder)
    facts, drafter = golden.facts["train"], golden.drafter(folder / "drafter", own_embeddings=False)
    given = {name.removeprefix("train."): t for name, t in golden.tensors.items() if name.startswith("train.")}
    names = ("input_ids", "loss_mask", "anchor_positions", "block_keep_mask")
    rows = list(zip(*(given[name].split(1) for name in names), strict=True))
    assert len(rows) > 1
    arguments = DSparkTrainingArguments(
        str(tmp_path),
        cross_entropy=facts["ce_loss_alpha"],
        l1=facts["l1_loss_alpha"],
        confidence=facts["confidence_head_alpha"],
        position_decay=facts["loss_decay_gamma"],
        **SMALL_RUN,
    )
    trainer = DSparkTrainer(drafter, arguments, target=golden.target)
    config = drafter.config
    form = config.block_size, config.mask_token_id
    for cuts in ([len(rows)], [1, len(rows) - 1]):
        parts = [rows[: cuts[0]], rows[cuts[0] :]][: len(cuts)]
        batches = []
        for part in parts:
            ids, mask, anchors, keep = (torch.cat(tensors) for tensors in zip(*part, strict=True))
            batches.append({"input_ids": ids, "blocks": pack_blocks(ids, mask, anchors, keep, *form)})
        samples, weights = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
        drafter.zero_grad()
        trainer.current_gradient_accumulation_steps = len(samples)
        loss = sum(trainer.training_step(drafter, sample, weights) for sample in samples)
        assert loss.item() == pytest.approx(facts["loss"], rel=1e-4)
        gradients = {name.removeprefix("grad."): t for name, t in given.items() if name.startswith("grad.")}
        for name, theirs in gradients.items():
            (ours,) = (p.grad for full, p in drafter.named_parameters() if full in (name, f"markov_head.{name}"))
            assert close(ours, theirs), name


# ---- the run


def test_new_drafter_fits_any_depth():
    for layers, taps in ((1, [-1]), (2, [0]), (3, [1]), (5, [1, 2]), (36, [1, 9, 17, 25, 33])):
        config = LlamaConfig(
            vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=2
        )
        drafter = new_drafter(LlamaForCausalLM(config), SHAPE, Sequences([], np.array([]), np.array([])), 0)
        assert drafter.config.target_layer_ids == taps


def test_the_saved_drafter_is_canonical(tiny, answers, tmp_path):
    trainer = trainer_of(
        tiny, answers, tmp_path, shape=DrafterShape(num_layers=1, block_size=4, sample_from_anchor=False)
    )
    trainer.train()
    trainer.save_model(tmp_path / "drafter")
    drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.config.first_draft_row == 1
    assert "use_cache" not in json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert sum(p.numel() for p in drafter.parameters()) == sum(p.numel() for p in trainer.drafter.parameters())
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())
    assert not any(p.requires_grad or p.grad is not None for p in tiny.parameters())


class Stopped(Exception):
    pass


@pytest.mark.parametrize("changes", [
    {"drafter_optimizer": "muon", "gradient_accumulation_steps": 2},
    {"tokens_per_batch": None, "per_device_train_batch_size": 6, "activation_checkpointing": True},
], ids=["muon", "adamw"])  # fmt: skip
def test_resume_is_exact(tiny, answers, tmp_path, monkeypatch, changes):
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "logging_steps": 1, "evaluations": 3}
    options["num_train_epochs"] = 4
    whole = trainer_of(tiny, answers, tmp_path / "whole", **options | changes)
    whole.train()
    steps = whole.state.max_steps
    assert steps >= 6
    step = DSparkTrainer.training_step

    def failing(self, *args):
        if self.state.global_step == steps // 2 + 1:  # in the second epoch
            raise Stopped
        return step(self, *args)

    broken = trainer_of(tiny, answers, tmp_path / "parts", **options | changes)
    monkeypatch.setattr(DSparkTrainer, "training_step", failing)
    with pytest.raises(Stopped):
        broken.train()
    monkeypatch.undo()
    resumed = trainer_of(tiny, answers, tmp_path / "parts", **options | changes)
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name
    logs = [[r for r in trainer.state.log_history if "train_loss" not in r] for trainer in (whole, resumed)]
    assert logs[0] == logs[1]
    assert sum("loss" in record for record in logs[0]) == steps
    assert sum("eval_accepted_length" in record for record in logs[0]) == 2


def test_accumulation_changes_nothing(tiny, answers, tmp_path):
    """Batches of a step are one batch: the same blocks, the same divisor."""
    found = []
    for size, accumulate in ((12, 1), (4, 3)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        options |= {"tokens_per_batch": None, "train_sampling_strategy": "sequential", "logging_steps": 1}
        trainer = trainer_of(tiny, answers, tmp_path, num_train_epochs=1, **options)
        trainer.train()
        found.append(
            [[record[name] for name in ("loss", "cross_entropy", "l1", "confidence", "grad_norm")]
             for record in trainer.state.log_history if "loss" in record]
        )  # fmt: skip
    assert len(found[0]) >= 3
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-4, atol=1e-5)
    loss, cross_entropy, l1, confidence, _ = torch.tensor(found[0]).T
    torch.testing.assert_close(loss, 0.1 * cross_entropy + 0.9 * l1 + confidence, rtol=1e-4, atol=1e-5)


def test_anchors_are_drawn_anew_each_step(tiny, answers, tmp_path):
    trainer = trainer_of(tiny, answers, tmp_path)
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    first = trainer.with_blocks(batch)["blocks"].anchors
    assert torch.equal(first, trainer.with_blocks(batch)["blocks"].anchors)
    trainer.state.global_step = 1
    assert not torch.equal(first, trainer.with_blocks(batch)["blocks"].anchors)


@pytest.mark.parametrize("precision", [{"bf16": True}, {"pure_bf16": True}], ids=["autocast", "pure"])
def test_low_precision(tiny, answers, tmp_path, precision):
    plain = trainer_of(tiny, answers, tmp_path, num_train_epochs=1, logging_steps=1)
    low = trainer_of(copy.deepcopy(tiny).to(torch.bfloat16), answers, tmp_path, num_train_epochs=1, logging_steps=1,
                     **precision)  # fmt: skip
    losses = []
    for trainer in (plain, low):
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert low.drafter.dtype == (torch.float32 if "bf16" in precision else torch.bfloat16)
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert low.evaluate()["eval_rounds"] > 0


# ---- budgets of time


def test_rate_by_the_nearer_budget(tiny, answers, tmp_path):
    options = {"num_train_epochs": 10, "learning_rate": 1.0, "warmup_steps": 0.1, "final_rate": 0.05}
    trainer = trainer_of(tiny, answers, tmp_path, max_seconds=100.0, **options)
    trainer.state.max_steps, rates = 60, []
    for step in range(61):
        trainer.state.global_step = step
        rates.append(trainer.rate())
    assert 0 < rates[0] < 0.1
    peak = rates.index(max(rates))
    assert peak == pytest.approx(6, abs=1)
    assert max(rates) == pytest.approx(1.0, abs=0.02)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)
    trainer.state.global_step, trainer.pace.seconds = 0, 100.0
    assert trainer.rate() == pytest.approx(0.05)


def test_time_budget(tiny, answers, tmp_path, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(clock))  # every step takes one second
    trainer = trainer_of(
        tiny, answers, tmp_path, num_train_epochs=1000, max_seconds=6.0, evaluations=3, save_seconds=2.0
    )
    trainer.train()
    assert trainer.state.global_step == 6
    evaluated = [record["step"] for record in trainer.state.log_history if "eval_accepted_length" in record]
    assert evaluated == [2, 4]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    rates = [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]
    assert all(0 <= rate <= 3e-3 for rate in rates)

    # a resumed run has the seconds that are left
    monkeypatch.setattr(pace.time, "perf_counter", iter(range(10**6)).__next__)
    resumed = trainer_of(
        tiny, answers, tmp_path, num_train_epochs=1000, max_seconds=6.0, evaluations=3, save_seconds=2.0
    )
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert resumed.pace.seconds == 6.0


# ---- evaluation


def test_the_best_checkpoint_is_that_of_the_longest_accepted_length(walker, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    options |= {"metric_for_best_model": "eval_accepted_length", "load_best_model_at_end": True}
    trainer = trainer_of(walker, greedy_answers(walker), tmp_path, num_train_epochs=6, learning_rate=1e-2, **options)
    trainer.train()
    lengths = {r["step"]: r["eval_accepted_length"] for r in trainer.state.log_history if "eval_accepted_length" in r}
    assert len(lengths) >= 3
    assert trainer.state.best_metric == max(lengths.values())
    assert trainer.evaluate()["eval_accepted_length"] == max(lengths.values())


def test_evaluation_by_decoding(tiny, answers, tmp_path):
    """Replayed and decoded answers have the same accepted lengths; so do several datasets at once."""
    figures = []
    for how in ("replay", "generate"):
        # answers of one length: a batch decodes as many tokens of each row
        same = answers.pick(
            np.flatnonzero([len(ids) - start == 12 for ids, start in zip(answers.ids, answers.starts, strict=True)])
        )
        trainer = trainer_of(tiny, answers, tmp_path, eval_decoding=how, per_device_eval_batch_size=3)
        figures.append(trainer.evaluate({"a": AnswerDataset(same), "b": AnswerDataset(same.pick(np.arange(2)))}))
    assert len(same) >= 4
    lengths = [{name: value for name, value in found.items() if "length" in name} for found in figures]
    assert lengths[0] == lengths[1]
    assert figures[0].keys() >= {"eval_a_accepted_length", "eval_b_accepted_length", "eval_a_acceptance_1"}
    with pytest.raises(ValueError, match="requires an eval_dataset"):
        DSparkTrainer(trainer.drafter, trainer.args, target=tiny).evaluate()


SMALL = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
OTHERS = {
    "gemma3": Gemma3TextConfig(
        **SMALL, hidden_size=36, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2": GPT2Config(**SMALL, n_embd=36, n_layer=3, n_head=4, n_positions=128),
    "gpt_neox": GPTNeoXConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gpt2", "gpt_neox"])
def test_targets_of_other_families(answers, tmp_path, kind):
    """Two steps, a figure and a drafter on disk, whatever the target's configuration calls its sizes."""
    torch.manual_seed(0)
    if kind == "gemma4":
        other = AutoModelForCausalLM.from_pretrained(DATA / "gemma4_vanilla" / "target").eval()
    else:
        other = AutoModelForCausalLM.from_config(OTHERS[kind]).eval()
    shape = DrafterShape(num_layers=1, block_size=3, markov_rank=4)
    trainer = trainer_of(other, answers, tmp_path, shape, num_train_epochs=1, tokens_per_batch=600)
    trainer.train()
    assert trainer.state.global_step >= 2
    assert trainer.evaluate()["eval_rounds"] > 0
    trainer.save_model(tmp_path)
    config = DSparkDrafter.from_pretrained(tmp_path).bind_target(other).config
    expected = {
        # heads, key-value heads, head size, inner size, positions, theta
        "gemma3": (4, 2, 8, 48, 131072, 1e6),
        "gemma4": (4, 2, 16, 128, 512, 1e6),
        "gpt2": (4, 4, 8, 144, 128, 1e4),
        "gpt_neox": (4, 4, 8, 48, 128, 1e4),
    }[kind]
    assert expected == (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.max_position_embeddings,
        config.rope_parameters["rope_theta"],
    )


def test_a_target_that_hides_its_states(tiny, answers, tmp_path, monkeypatch):
    trainer = trainer_of(tiny, answers, tmp_path)
    plain = type(tiny.model).forward

    def hiding(self, *args, output_hidden_states, **kwargs):
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny.model), "forward", hiding)
    with pytest.raises(NotImplementedError, match="LlamaModel does not return its hidden states"):
        trainer.train()


def test_answers_longer_than_the_context(answers, tmp_path):
    small = AutoModelForCausalLM.from_config(GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    with pytest.raises(ValueError, match=r"has \d+ tokens, the target's context 16: set max_length"):
        trainer_of(small, answers, tmp_path)


def test_answers_of_another_vocabulary(tiny, answers, tmp_path):
    foreign = Sequences(
        [*answers.ids, np.array([5, 64, 7])], np.append(answers.starts, 1), np.append(answers.greedy, False)
    )
    with pytest.raises(ValueError, match="hold token 64, the target has 64"):
        trainer_of(tiny, foreign, tmp_path)


@pytest.mark.parametrize("reduced", [None, 20], ids=["full vocabulary", "reduced vocabulary"])
def test_a_drafter_learns(walker, tmp_path, reduced):
    """The accepted length on held-out answers rises from almost nothing to most of the block."""
    target, answers = walker, greedy_answers(walker)
    shape = DrafterShape(num_layers=1, block_size=4, markov_rank=8, target_layer_ids=(-1, 2), draft_vocab_size=reduced)
    trainer = trainer_of(
        target, answers, tmp_path, shape, held_out=8, num_train_epochs=30, anchors=16, learning_rate=1e-2
    )
    before = trainer.accepted_length(trainer.eval_dataset)
    trainer.train()
    after = trainer.accepted_length(trainer.eval_dataset)
    assert before.mean_accepted_length < 2
    assert after.mean_accepted_length > before.mean_accepted_length + 1
    assert after.rounds < before.rounds

    # the figure is what decoding the same answers gives
    trainer.save_model(tmp_path)
    answers = answers.pick(np.arange(10))
    saved = DSparkDrafter.from_pretrained(tmp_path, dtype=torch.float32).bind_target(target)
    for drafter in (saved, new_drafter(target, shape, answers, seed=5).eval()):
        replayed = held_out_accepted_length(drafter, target, answers, anchors_at_once=7)
        decoded = [decoded_accepted_length(drafter, target, answers.pick(np.arange(n, n + 1))) for n in range(10)]
        assert replayed.accepted_lengths == [stats.accepted_lengths[0] for stats in decoded]
    assert max(map(max, replayed.accepted_lengths)) <= shape.block_size + 1


def test_teacher_forced_acceptance_is_that_of_decoding(walker, tmp_path):
    """What the losses count as overlap, 1 - distance / 2, against what decoding accepts."""
    answers = greedy_answers(walker)
    trainer = trainer_of(walker, answers, tmp_path, num_train_epochs=20, anchors=16, learning_rate=1e-2)
    trainer.train()
    trainer.args.anchors = 1000
    batch = trainer.with_blocks(trainer.data_collator([trainer.train_dataset[row] for row in range(30)]))
    with torch.no_grad():
        _, loss = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    train = trainer.train_dataset.sequences.pick(np.arange(30))
    stats = decoded_accepted_length(trainer.drafter.eval(), walker, train, 30)
    weights = trainer.objective.weights.positions(4)
    tested = torch.tensor([share or 0.0 for share in stats.acceptance_by_position])
    decoded = float((tested * weights).sum() / weights.sum())
    assert 1 - loss.l1.item() / 2 == pytest.approx(decoded, abs=0.05)


def test_a_perfect_block_counts_its_bonus(walker, monkeypatch):
    """Drafts that are all right commit gamma tokens and the target's own."""
    answers = greedy_answers(walker).pick(np.arange(1))
    drafter = new_drafter(
        walker, DrafterShape(num_layers=1, block_size=4, target_layer_ids=(0,), markov_rank=8), answers, 0
    ).eval()
    truth = torch.from_numpy(answers.ids[0].astype(np.int64))

    def right(anchor_ids, hidden, **options):
        anchors = torch.arange(int(answers.starts[0]), len(truth) - 1)
        padded = torch.cat((truth, truth.new_zeros(4)))
        return Proposal(torch.stack([padded[a + 1 : a + 5] for a in anchors]), hidden, None)

    monkeypatch.setattr(drafter, "chain", right)
    lengths = held_out_accepted_length(drafter, walker, answers).accepted_lengths[0]
    assert lengths[:-1] == [5] * (len(lengths) - 1)
    assert sum(lengths) == len(truth) - 1 - answers.starts[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_train_epochs": 0}, "num_train_epochs=0 must be more than 0"),
        ({"learning_rate": -1.0}, r"learning_rate=-1\.0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"learning_rate": math.inf}, "learning_rate=inf must be finite"),
        ({"l1": -1.0}, r"l1=-1\.0 must be 0 or more"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"final_rate": 1.0}, r"final_rate=1\.0"),
        ({"drafter_optimizer": "sgd"}, "drafter_optimizer='sgd' must be one of"),
        ({"block_attention": "fast"}, "block_attention='fast'"),
        ({"bf16": True, "pure_bf16": True}, "exclude each other"),
        ({"anchors": 0, "max_seconds": 0}, "anchors=0 must be more than 0; max_seconds=0 must be more than 0"),
    ],
)
def test_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        DSparkTrainingArguments("out", **changes)


def test_layers_of_a_target_are_compiled_once(answers, tmp_path, monkeypatch):
    """One compiled layer serves all of them, with a tap on the last one too, and is taken out after each forward."""
    torch.manual_seed(0)
    text = LlamaConfig(**SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4)
    target, losses, shape = LlamaForCausalLM(text).eval(), [], DrafterShape(num_layers=1, target_layer_ids=(1, 4))
    # what is traced is what counts here; generating code for it takes most of a minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        trainer = trainer_of(target, answers, tmp_path, shape, compile_target=compiled, logging_steps=1, max_steps=2)
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
        assert not any("forward" in vars(layer) for layer in target.model.layers)
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] < 5


@pytest.mark.gpu
def test_training_on_cuda(answers, tmp_path):
    """With all that is only done there, the losses of the CPU up to rounding."""
    torch.manual_seed(0)
    text = LlamaConfig(**SMALL, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    target, shape, losses = LlamaForCausalLM(text).eval(), DrafterShape(num_layers=2, block_size=4, markov_rank=8), []
    options = {"drafter_optimizer": "muon", "tokens_per_batch": 600, "logging_steps": 1, "max_steps": 4}
    for changes in ({}, {"use_cpu": False, "bf16": True, "compile_target": True}):
        trainer = trainer_of(target, answers, tmp_path, shape, **options | changes)
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
        assert trainer.drafter.device.type == ("cuda" if changes else "cpu")
        assert trainer.evaluate()["eval_rounds"] > 0
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
