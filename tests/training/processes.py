"""What `test_processes.py` launches in several processes: the same run, whose log the first one writes."""

import json
import sys
from pathlib import Path

from tests.training.tiny import greedy_answers, tiny_target
from transformers_dspark.training import (
    AnswerDataset,
    DrafterShape,
    DSparkTrainer,
    DSparkTrainingArguments,
    new_drafter,
)
from transformers_dspark.training.data import split


def run(out: Path, **changes) -> dict:
    """Losses, gradient norms and accepted lengths of a run."""
    target = tiny_target()
    train, held_out = split(greedy_answers(target), 4, 0)
    options = {"tokens_per_batch": 120, "anchors": 8, "num_train_epochs": 1, "logging_steps": 1, "evaluations": 2}
    arguments = DSparkTrainingArguments(
        str(out), use_cpu=True, disable_tqdm=True, save_strategy="no", report_to="none", **options | changes
    )
    trainer = DSparkTrainer(
        new_drafter(target, DrafterShape(num_layers=1, block_size=4, markov_rank=8), train, 0),
        arguments,
        target=target,
        train_dataset=AnswerDataset(train),
        eval_dataset=AnswerDataset(held_out),
    )
    trainer.train()
    names = ("loss", "cross_entropy", "l1", "confidence", "grad_norm", "learning_rate", "eval_accepted_length")
    log = [{name: record[name] for name in names if name in record} for record in trainer.state.log_history]
    return {"log": log, "processes": trainer.accelerator.num_processes, "first": trainer.is_world_process_zero()}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for number, changes in enumerate(json.loads(sys.argv[2])):
        found = run(root / "run", **changes)
        if found["first"]:
            (root / f"{number}.json").write_text(json.dumps(found))
