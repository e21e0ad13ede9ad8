"""The training loop: batches, budget, schedule, resume, and that a drafter learns."""

import copy
import json

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

from tests.golden import DATA
from transformers_dspark import DSparkDrafter
from transformers_dspark.cli import main
from transformers_dspark.modeling_dspark import Proposal
from transformers_dspark.training import trainer as trainer_module
from transformers_dspark.training.answers import Answer, AnswerWriter
from transformers_dspark.training.arguments import DrafterShape, TrainArguments
from transformers_dspark.training.data import (
    Sequences,
    batch_indices,
    batches,
    collate,
    count_batches,
    frequent_tokens,
    load_sequences,
    split,
)
from transformers_dspark.training.held_out import held_out_accepted_length
from transformers_dspark.training.trainer import LOG_NAME, STATE_NAME, Trainer, new_drafter


SHAPE = DrafterShape(num_layers=1, block_size=4, markov_rank=8)
ARGUMENTS = TrainArguments(
    epochs=2, tokens_per_batch=256, anchors=8, learning_rate=3e-3, held_out=4, evaluations=1, save_seconds=1e9
)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def greedy_answers(target: LlamaForCausalLM) -> Sequences:
    """The target's own greedy answers to random prompts of several lengths."""
    torch.manual_seed(1)
    ids, starts = [], []
    for number in range(44):
        prompt = torch.randint(2, 64, (1, 3 + number % 4))
        answer = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12 + number % 9, do_sample=False
        )
        if answer.shape[1] >= prompt.shape[1] + 2:
            ids.append(answer[0].numpy())
            starts.append(prompt.shape[1])
    return Sequences(ids, np.array(starts), np.ones(len(ids), dtype=bool))


@pytest.fixture(scope="module")
def answers(target) -> Sequences:
    return greedy_answers(target)


@pytest.fixture(scope="module")
def walker(target) -> LlamaForCausalLM:
    """A target that walks in a circle of twelve tokens: a law that a drafter can learn."""
    model = copy.deepcopy(target)
    torch.manual_seed(3)
    table = torch.nn.functional.normalize(torch.randn(64, 32), dim=-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_().index_add_(0, 2 + (torch.arange(64) + 1) % 12, 5 * table)
    return model


# ---- data


def test_batches_cover_every_sequence_once_within_the_budget(answers):
    lengths = np.array([len(ids) for ids in answers.ids])
    for seed in range(5):
        groups = batch_indices(lengths, 100, np.random.default_rng(seed))
        assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
        assert all(len(group) * lengths[group].max() <= 100 for group in groups)
    # a sequence beyond the budget is a batch of its own
    groups = batch_indices(np.array([5, 500, 5]), 100, np.random.default_rng(0))
    assert sorted(map(len, groups)) == [1, 2]


def test_epochs_differ_and_repeat(answers):
    first = [ids.tolist() for ids, _ in batches(answers, 100, seed=0, epoch=0)]
    assert first == [ids.tolist() for ids, _ in batches(answers, 100, seed=0, epoch=0)]
    assert first != [ids.tolist() for ids, _ in batches(answers, 100, seed=0, epoch=1)]
    assert len(first) == count_batches(answers, 100, seed=0)


def test_collate():
    sequences = Sequences([np.array([5, 6, 7]), np.array([8, 9])], np.array([1, 1]), np.array([True, True]))
    ids, mask = collate(sequences)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert mask.tolist() == [[0, 1, 1], [0, 1, 0]]


def test_split_keeps_greedy_answers_aside(answers):
    mixed = Sequences(answers.ids, answers.starts, np.arange(len(answers)) % 2 == 0)
    train, held_out = split(mixed, 256, seed=0)
    assert len(held_out) == 4  # at most a tenth
    assert held_out.greedy.all()
    assert len(train) + len(held_out) == len(mixed)
    ours = {ids.tobytes() for ids in held_out.ids}
    assert not ours & {ids.tobytes() for ids in train.ids}


def test_frequent_tokens():
    sequences = Sequences([np.array([9, 9, 9, 3, 3, 5, 2])], np.array([3]), np.array([True]))
    assert frequent_tokens(sequences, 2, 10).tolist() == [2, 3]  # the prompt does not count, ties go to the smaller id


# ---- the loop


def test_new_drafter_fits_any_depth():
    for layers, taps in ((1, [-1]), (2, [0]), (3, [1]), (5, [1, 2]), (36, [1, 9, 17, 25, 33])):
        config = LlamaConfig(
            vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=2
        )
        drafter = new_drafter(LlamaForCausalLM(config), SHAPE, Sequences([], np.array([]), np.array([])), 0)
        assert drafter.config.target_layer_ids == taps


def test_learning_rate(target, answers, tmp_path):
    arguments = TrainArguments(
        epochs=10, tokens_per_batch=256, learning_rate=1.0, warmup=0.1, final_rate=0.05, max_seconds=100.0
    )
    trainer = Trainer(target, answers, tmp_path, SHAPE, arguments)
    rates = []
    for step in range(trainer.max_steps + 1):
        trainer.step = step
        rates.append(trainer.learning_rate())
    assert 0 < rates[0] < 0.1
    peak = rates.index(max(rates))
    assert peak == pytest.approx(0.1 * trainer.max_steps, abs=1)
    assert max(rates) == pytest.approx(1.0, abs=0.02)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)
    trainer.step, trainer.seconds = 0, 100.0  # the nearer budget counts
    assert trainer.progress() == 1.0
    assert trainer.learning_rate() == pytest.approx(0.05)


def test_time_budget(target, answers, tmp_path, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: next(clock))  # every step takes one second
    arguments = TrainArguments(epochs=1000, tokens_per_batch=256, anchors=4, max_seconds=5.0, held_out=1)
    trainer = Trainer(target, answers, tmp_path, SHAPE, arguments)
    trainer.train()
    assert trainer.step <= 6
    assert (tmp_path / "model.safetensors").exists()
    logged = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert sum("held_out_accepted_length" in record for record in logged) == arguments.evaluations


class Stopped(Exception):
    pass


def test_resume_is_exact(target, answers, tmp_path, monkeypatch):
    arguments = TrainArguments(**ARGUMENTS.to_dict() | {"save_seconds": 0.0, "losses": ARGUMENTS.losses})
    whole = Trainer(target, answers, tmp_path / "whole", SHAPE, arguments)
    expected = whole.train()
    assert whole.max_steps > 6
    assert not (tmp_path / "whole" / STATE_NAME).exists()

    step = Trainer._step

    def failing(self, *args):
        if self.step == 4:
            raise Stopped
        return step(self, *args)

    broken = Trainer(target, answers, tmp_path / "parts", SHAPE, arguments)
    monkeypatch.setattr(Trainer, "_step", failing)
    with pytest.raises(Stopped):
        broken.train()
    monkeypatch.setattr(Trainer, "_step", step)
    assert (tmp_path / "parts" / STATE_NAME).exists()

    for other, named in (
        ({"shape": DrafterShape(num_layers=2, block_size=4, markov_rank=8)}, "num_layers"),
        ({"shape": DrafterShape(num_layers=1, block_size=4, markov_rank=8, draft_vocab_size=32)}, "draft_vocab_size"),
        ({"arguments": ARGUMENTS}, "save_seconds"),
        ({"sequences": answers.pick(np.arange(30))}, "answers"),
    ):
        given = {"sequences": answers, "shape": SHAPE, "arguments": arguments} | other
        with pytest.raises(ValueError, match=f"belongs to a run with other settings .*{named}"):
            Trainer(target, out=tmp_path / "parts", **given).train()

    resumed = Trainer(target, answers, tmp_path / "parts", SHAPE, arguments)
    assert resumed.train() == expected
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name
    logs = [
        [json.loads(line) for line in (tmp_path / p / LOG_NAME).read_text().splitlines()] for p in ("whole", "parts")
    ]
    for record in logs[0] + logs[1]:
        del record["seconds"]
    assert logs[0] == logs[1]


def test_a_torn_line_of_the_log_does_not_stop_a_resume(target, answers, tmp_path):
    trainer = Trainer(target, answers, tmp_path, SHAPE, ARGUMENTS)
    trainer.step = 2
    trainer._save_state()
    (tmp_path / LOG_NAME).write_text('{"step": 1}\n{"step": 3}\n[]\n{"st')
    resumed = Trainer(target, answers, tmp_path, SHAPE, ARGUMENTS)
    resumed._resume()
    assert resumed.step == 2
    assert (tmp_path / LOG_NAME).read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("content", [b"", b"xx", {"a": 1}, [1], "cut", "no counters", "other tensors"])
def test_a_damaged_state_is_named(target, answers, tmp_path, content):
    trainer = Trainer(target, answers, tmp_path, SHAPE, ARGUMENTS)
    trainer.step = 2
    trainer._save_state()
    file = tmp_path / STATE_NAME
    state = torch.load(file, weights_only=True)
    if content == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif content == "no counters":
        torch.save({name: part for name, part in state.items() if name != "counters"}, file)
    elif content == "other tensors":
        torch.save(state | {"drafter": {}}, file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=r"state\.pt is damaged, or no state of a training run; remove it"):
        trainer.train()


def test_a_new_run_starts_a_new_log(target, answers, tmp_path):
    (tmp_path / LOG_NAME).write_text('{"step": 3, "total": 1.0}\n')
    trainer = Trainer(target, answers, tmp_path, SHAPE, ARGUMENTS)
    trainer.train()
    steps = [json.loads(line)["step"] for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert set(steps) == {trainer.max_steps}


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
    arguments = TrainArguments(epochs=1, tokens_per_batch=600, anchors=4, held_out=4, evaluations=1)
    trainer = Trainer(other, answers, tmp_path, DrafterShape(num_layers=1, block_size=3, markov_rank=4), arguments)
    assert trainer.max_steps >= 2
    assert trainer.train().rounds > 0
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


def test_a_target_that_hides_its_states(target, answers, tmp_path, monkeypatch):
    trainer = Trainer(target, answers, tmp_path, SHAPE, ARGUMENTS)
    plain = type(target.model).forward

    def hiding(self, *args, output_hidden_states, **kwargs):
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", hiding)
    with pytest.raises(NotImplementedError, match="LlamaModel does not return its hidden states"):
        trainer.train()


def test_answers_longer_than_the_context(answers, tmp_path):
    small = AutoModelForCausalLM.from_config(GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    with pytest.raises(ValueError, match=r"has \d+ tokens, the target's context 16: set max_length"):
        Trainer(small, answers, tmp_path, SHAPE, ARGUMENTS)


def test_answers_of_another_vocabulary(target, answers, tmp_path):
    foreign = Sequences(
        [*answers.ids, np.array([5, 64, 7])], np.append(answers.starts, 1), np.append(answers.greedy, True)
    )
    with pytest.raises(ValueError, match="hold token 64, the target has 64"):
        Trainer(target, foreign, tmp_path, SHAPE, ARGUMENTS)


@pytest.mark.parametrize("reduced", [None, 20], ids=["full vocabulary", "reduced vocabulary"])
def test_a_drafter_learns(walker, tmp_path, reduced):
    """The accepted length on held-out answers rises from almost nothing to most of the block."""
    target, answers = walker, greedy_answers(walker)
    shape = DrafterShape(num_layers=1, block_size=4, markov_rank=8, target_layer_ids=(-1, 2), draft_vocab_size=reduced)
    arguments = TrainArguments(
        epochs=30, tokens_per_batch=256, anchors=16, learning_rate=1e-2, held_out=8, evaluations=2
    )
    trainer = Trainer(target, answers, tmp_path, shape, arguments)
    before = held_out_accepted_length(trainer.drafter.eval(), target, trainer.held_out_set)
    trainer.drafter.train()
    after = trainer.train()
    assert before.mean_accepted_length < 2
    assert after.mean_accepted_length > before.mean_accepted_length + 1
    assert after.rounds < before.rounds

    # the figure is what decoding the same answers gives
    answers = answers.pick(np.arange(10))
    saved = DSparkDrafter.from_pretrained(tmp_path, dtype=torch.float32).bind_target(target)
    for drafter in (saved, new_drafter(target, shape, answers, seed=5).eval()):
        replayed = held_out_accepted_length(drafter, target, answers, anchors_at_once=7)
        assert replayed.accepted_lengths == [
            decoded(drafter, target, *answer) for answer in zip(answers.ids, answers.starts, strict=True)
        ]
    assert max(map(max, replayed.accepted_lengths)) <= shape.block_size + 1


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


def decoded(drafter: DSparkDrafter, target, ids: np.ndarray, start: int) -> list[int]:
    """Accepted lengths that `generate` reports for the same answer."""
    out = target.generate(
        torch.from_numpy(ids[:start].astype(np.int64))[None],
        assistant_model=drafter,
        max_new_tokens=len(ids) - int(start),
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.sequences[0].tolist() == ids.tolist()
    return out.dspark.accepted_lengths[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs=0 must be more than 0"),
        ({"learning_rate": -1.0}, r"learning_rate=-1\.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be finite"),
        ({"epochs": float("inf")}, "epochs=inf must be finite"),
        ({"seed": -1}, "seed=-1 must lie in"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"held_out": -1}, "held_out=-1"),
        ({"warmup": 1.0}, r"warmup=1\.0"),
        ({"anchors": 0, "max_seconds": 0}, "max_seconds=0 must be more than 0; anchors=0 must be more than 0"),
    ],
)
def test_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainArguments(**changes)


# ---- the command


@pytest.fixture(scope="module")
def folders(target, answers, tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    target.save_pretrained(root / "target")
    writer = AnswerWriter(root / "answers", {"target": "tiny"}, vocab_size=64)
    for number, (ids, start) in enumerate(zip(answers.ids, answers.starts, strict=True)):
        writer.add(Answer(number, 0, ids, int(start), 0.0, "length"))
    writer.flush()
    return root


def command(folders, out, *more: str) -> list[str]:
    given = f"train --target {folders / 'target'} --answers {folders / 'answers'} --out {out} --device cpu"
    small = "--num-layers 1 --block-size 3 --markov-rank 4 --epochs 2 --tokens-per-batch 256 --anchors 4"
    return [*given.split(), *small.split(), *more]


def test_command(folders, answers, tmp_path, capsys):
    loaded = load_sequences([folders / "answers"], 1024)
    assert all(np.array_equal(a, b) for a, b in zip(loaded.ids, answers.ids, strict=True))
    assert main(command(folders, tmp_path / "out", "--json", str(tmp_path / "result.json"))) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert 1 <= result["held_out_accepted_length"] <= 4
    assert len(result["held_out_acceptance_by_position"]) == 3
    assert result["answers"] == len(answers) - len(answers) // 10
    assert "held-out accepted length" in capsys.readouterr().out
    drafter = DSparkDrafter.from_pretrained(tmp_path / "out")
    assert drafter.config.block_size == 3
    assert drafter.dtype == torch.bfloat16
    assert (tmp_path / "out" / LOG_NAME).exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--block-size", "0"], "argument --block-size: '0'"),
        (["--taps", "7"], "taps layer 7, the target's last is 2"),
        (["--taps", "1", "1"], "target_layer_ids=[1, 1]"),
        (["--draft-vocab-size", "65"], "draft_vocab_size=65"),
        (["--mask-token-id", "64"], "mask_token_id=64"),
        (["--markov-head", "lstm"], "invalid choice: 'lstm'"),
        (["--epochs", "0"], "argument --epochs: '0'"),
        (["--max-length", "3"], "no answer of two tokens or more within max_length=3"),
        (["--answers", "nowhere"], "nowhere is not a folder of answers"),
        (["--target", "./nowhere"], "nowhere"),
        (["--device", "toaster"], "--device toaster is no device"),
    ],
)
def test_command_with_bad_input(folders, tmp_path, capsys, more, message):
    assert main(command(folders, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    error = [line for line in error if line.startswith("dspark: error: ")]
    assert len(error) == 1
    assert message in error[0]
