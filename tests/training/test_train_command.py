"""`dspark train`, from answers to a drafter on disk."""

import json

import numpy as np
import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from transformers_dspark import DSparkDrafter
from transformers_dspark.cli import main
from transformers_dspark.cli.train import RUN_NAME
from transformers_dspark.training import pace
from transformers_dspark.training.answers import Answer, AnswerWriter
from transformers_dspark.training.data import load_sequences
from transformers_dspark.training.trainer import DSparkTrainer


@pytest.fixture(scope="module")
def folders(tiny, answers, tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    tiny.save_pretrained(root / "target")
    writer = AnswerWriter(root / "answers", {"target": "tiny"}, vocab_size=64)
    for number, (ids, start) in enumerate(zip(answers.ids, answers.starts, strict=True)):
        writer.add(Answer(number, 0, ids, int(start), 0.0, "length"))
    writer.flush()
    return root


def command(folders, out, *more: str) -> list[str]:
    given = f"train --target {folders / 'target'} --answers {folders / 'answers'} --out {out} --device cpu"
    small = "--num-layers 1 --block-size 3 --markov-rank 4 --epochs 2 --tokens-per-batch 256 --anchors 4"
    return [*given.split(), *small.split(), *more]


# peft asks by a name that Transformers renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_command(folders, answers, tmp_path, capsys):
    loaded = load_sequences([folders / "answers"], 1024)
    assert all(np.array_equal(a, b) for a, b in zip(loaded.ids, answers.ids, strict=True))
    more = ["--json", str(tmp_path / "result.json"), "--cache", str(tmp_path / "states")]
    assert main(command(folders, tmp_path / "out", *more)) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert 1 <= result["held_out_accepted_length"] <= 4
    assert len(result["held_out_acceptance_by_position"]) == 3
    assert result["answers"] == len(answers) - len(answers) // 10
    said = capsys.readouterr().out
    assert "held-out accepted length" in said
    assert "hidden states of " in said
    assert list((tmp_path / "states").glob("*.bin"))
    drafter = DSparkDrafter.from_pretrained(tmp_path / "out")
    assert drafter.config.block_size == 3
    assert drafter.dtype == torch.bfloat16
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert history[-1]["eval_accepted_length"] == result["held_out_accepted_length"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model.safetensors", "loss_curve.png"}
    assert not (tmp_path / "out" / RUN_NAME).exists()
    assert main(command(folders, tmp_path / "out")) == 2
    assert "holds a finished drafter" in capsys.readouterr().err

    # going on from it, and adapters on it
    start = ["--from", str(tmp_path / "out"), "--seed", "1", "--lora", "2", "--decode"]
    assert main(command(folders, tmp_path / "adapted", *start)) == 0
    adapted = DSparkDrafter.from_pretrained(tmp_path / "adapted").state_dict()
    before = DSparkDrafter.from_pretrained(tmp_path / "out").state_dict()
    assert adapted.keys() == before.keys()
    changed = {name for name in adapted if not torch.equal(adapted[name], before[name])}
    assert "layers.0.mlp.up_proj.weight" in changed
    assert "norm.weight" not in changed
    assert (tmp_path / "adapted" / "adapter" / "adapter_model.safetensors").exists()


class Stopped(Exception):
    pass


def test_a_stopped_run_goes_on(folders, tmp_path, monkeypatch, capsys):
    assert main(command(folders, tmp_path / "whole")) == 0
    step = DSparkTrainer.training_step

    def failing(self, *args):
        if self.state.global_step == 4:
            raise Stopped
        return step(self, *args)

    seconds = iter(range(0, 10**6, 200))  # a checkpoint is due after every step
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(DSparkTrainer, "training_step", failing)
    with pytest.raises(Stopped):
        main(command(folders, tmp_path / "parts"))
    monkeypatch.undo()
    assert get_last_checkpoint(str(tmp_path / "parts")).endswith("checkpoint-4")
    assert main(command(folders, tmp_path / "parts", "--seed", "3")) == 2
    assert "belongs to a run with other settings (tokens, seed)" in capsys.readouterr().err
    (tmp_path / "parts" / RUN_NAME).rename(tmp_path / "kept")
    (tmp_path / "parts" / RUN_NAME).write_text("{")
    assert main(command(folders, tmp_path / "parts")) == 2
    assert "is damaged" in capsys.readouterr().err
    (tmp_path / "kept").rename(tmp_path / "parts" / RUN_NAME)
    assert main(command(folders, tmp_path / "parts")) == 0
    whole, parts = (DSparkDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not list((tmp_path / "parts").glob("checkpoint-*"))


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
        (["--lora", "4"], "--lora 4 adapts a trained drafter: name it with --from"),
        (["--lora", "0"], "argument --lora: '0'"),
        (["--cache", "states", "--shard-target"], "state_cache and shard_target exclude each other"),
        (["--layout", "B"], "invalid choice: 'B'"),
        (["--from", "./nowhere"], "nowhere"),
    ],
)
def test_command_with_bad_input(folders, tmp_path, capsys, more, message):
    assert main(command(folders, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    error = [line for line in error if line.startswith("dspark: error: ")]
    assert len(error) == 1
    assert message in error[0]
