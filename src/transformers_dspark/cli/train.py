"""`dspark train`: a drafter for a target, from the target's own answers."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import (
    UsageError,
    add_json_option,
    device_of,
    path_or_id,
    positive_float,
    positive_int,
    seed,
    target_place,
    write_json,
)


if TYPE_CHECKING:
    import torch

    from ..modeling_dspark import DSparkDrafter
    from ..training.arguments import DSparkTrainingArguments
    from ..training.trainer import DSparkTrainer

RUN_NAME = "run.json"  # what an unfinished run was told
HELP = "train a drafter on answers that the target wrote (see `dspark data answers`)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=target_place, required=True, help="folder or hub id of the target model")
    parser.add_argument("--answers", required=True, type=Path, nargs="+", metavar="DIR", help="folders of answers")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="receives the drafter; run again to resume"
    )
    parser.add_argument(
        "--from", dest="start", type=path_or_id, metavar="DRAFTER", help="go on from this drafter instead of a new one"
    )
    parser.add_argument(
        "--lora", type=positive_int, metavar="RANK", help="with --from: train adapters of `peft` of this rank"
    )
    shape = parser.add_argument_group("shape of the drafter")
    shape.add_argument("--num-layers", type=positive_int, default=5, help="backbone layers (default: %(default)s)")
    shape.add_argument(
        "--block-size", type=positive_int, default=7, help="tokens drafted at once (default: %(default)s)"
    )
    shape.add_argument(
        "--layout", choices=("A", "F"), default="A", help="A: every row of a block drafts; F: not the anchor's"
    )
    shape.add_argument(
        "--taps", type=int, nargs="+", help="target layers that are read, from 0 (default: five, spread)"
    )
    shape.add_argument(
        "--markov-rank", type=int, default=256, help="rank of the sequential head (default: %(default)s)"
    )
    shape.add_argument("--markov-head", choices=("vanilla", "gated", "rnn"), default="vanilla")
    shape.add_argument(
        "--draft-vocab-size", type=positive_int, help="propose only the most frequent tokens (default: all)"
    )
    shape.add_argument(
        "--mask-token-id", type=int, help="input of the block behind its anchor (default: padding token)"
    )
    budget = parser.add_argument_group("budget and optimiser")
    budget.add_argument(
        "--epochs", type=positive_float, default=10.0, help="passes over the answers (default: %(default)s)"
    )
    budget.add_argument("--max-seconds", type=positive_float, help="stop after this much training time, cooled down")
    budget.add_argument("--tokens-per-batch", type=positive_int, default=32768, help="(default: %(default)s)")
    budget.add_argument(
        "--anchors", type=positive_int, default=64, help="blocks a sequence and step (default: %(default)s)"
    )
    budget.add_argument(
        "--max-length", type=positive_int, default=1024, help="longer answers are cut (default: %(default)s)"
    )
    budget.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: for matrices (default: %(default)s)"
    )
    budget.add_argument("--learning-rate", type=positive_float, default=6e-4, help="peak (default: %(default)s)")
    budget.add_argument("--held-out", type=int, default=256, help="greedy answers kept aside (default: %(default)s)")
    budget.add_argument("--evaluations", type=positive_int, default=5, help="accepted-length figures over the run")
    budget.add_argument("--accumulate", type=positive_int, default=1, help="batches a step (default: %(default)s)")
    budget.add_argument("--seed", type=seed, default=0)
    means = parser.add_argument_group("means")
    means.add_argument("--pure-bf16", action="store_true", help="weights and optimiser in bfloat16: half the memory")
    means.add_argument("--checkpoint-layers", action="store_true", help="compute layers twice instead of keeping them")
    means.add_argument("--detach-confidence", action="store_true", help="its loss trains the confidence head alone")
    means.add_argument("--decode", action="store_true", help="decode held-out prompts instead of replaying answers")
    means.add_argument("--compile-target", action="store_true", help="compile the target's layers")
    means.add_argument("--shard-target", action="store_true", help="over the processes of `accelerate launch`")
    means.add_argument("--cache", type=Path, metavar="DIR", help="keep the target's hidden states here; much disk")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the target (default: bfloat16 on cuda)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    device = device_of(args.device)
    if device.index:
        raise UsageError(f"--device {args.device}: a trainer takes the first device it sees; set CUDA_VISIBLE_DEVICES")
    if args.lora and not args.start:
        raise UsageError(f"--lora {args.lora} adapts a trained drafter: name it with --from")
    import torch
    from transformers import AutoModelForCausalLM

    from ..environment import environment
    from ..evaluation.plots import loss_curve
    from ..training.data import AnswerDataset, load_sequences, split
    from ..training.trainer import DSparkTrainer

    low = (args.dtype or ("bfloat16" if device.type == "cuda" else "float32")) == "bfloat16"
    arguments = _arguments(args, device, low)
    train_set, held_out = split(load_sequences(args.answers, args.max_length), args.held_out, args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16 if low else torch.float32)
    drafter = _drafter(args, target, train_set)
    if args.cache:
        _announce_cache(args.cache, drafter, target, train_set)
    model: Any = drafter
    if args.lora:
        from ..training.adapters import with_lora

        model = with_lora(drafter, args.lora, args.seed)
    trainer = DSparkTrainer(
        model,
        arguments,
        target=target,
        train_dataset=AnswerDataset(train_set),
        eval_dataset=AnswerDataset(held_out) if len(held_out) else None,
    )
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts = {"answers": len(train_set), "tokens": sum(map(len, train_set.ids)), **_settings(args)}
    resumed = _resumable(args.out, json.loads(json.dumps(facts)), trainer)
    if trainer.is_world_process_zero():
        print(
            f"{len(train_set)} answers to learn, {len(held_out)} held out; {size / 1e6:.1f} M parameters to train, "
            f"taps {drafter.config.target_layer_ids}",
            flush=True,
        )
    trainer.train(resume_from_checkpoint=resumed)
    if args.lora:
        if trainer.is_world_process_zero():
            model.save_pretrained(args.out / "adapter")
        model.merge_and_unload()
    drafter.to(torch.bfloat16)  # what is saved is what is measured
    metrics = trainer.evaluate() if len(held_out) else {}
    if not trainer.is_world_process_zero():
        return 0
    drafter.save_pretrained(args.out)
    trainer.save_state()
    for folder in args.out.glob("checkpoint-*"):
        shutil.rmtree(folder)
    (args.out / RUN_NAME).unlink()
    try:
        loss_curve(trainer.state.log_history, args.out / "loss_curve.png")
    except ImportError:
        print("no picture of the losses: that needs matplotlib, from the extra `train`")
    length = metrics.get("eval_accepted_length") if metrics.get("eval_rounds") else None
    figure = f"{length:.3f} over {metrics['eval_rounds']} rounds" if length else "not measured"
    print(f"held-out accepted length {figure}; drafter in {args.out}")
    by_position = [metrics.get(f"eval_acceptance_{k + 1}") for k in range(drafter.config.num_draft_tokens)]
    write_json(
        args.json,
        {
            "environment": environment(device, args.words),
            "held_out_accepted_length": length,
            "held_out_acceptance_by_position": by_position,
            "rounds": metrics.get("eval_rounds"),
            "steps": trainer.state.global_step,
            "seconds": trainer.pace.seconds,
            "parameters": size,
            "answers": len(train_set),
            "arguments": _settings(args),
        },
    )
    return 0


def _arguments(args: argparse.Namespace, device: torch.device, low: bool) -> DSparkTrainingArguments:
    from ..training.arguments import DSparkTrainingArguments

    return DSparkTrainingArguments(
        output_dir=str(args.out),
        num_train_epochs=args.epochs,
        max_seconds=args.max_seconds,
        save_seconds=120.0,
        save_strategy="no",
        save_total_limit=1,
        evaluations=args.evaluations if args.held_out else None,
        tokens_per_batch=args.tokens_per_batch,
        gradient_accumulation_steps=args.accumulate,
        anchors=args.anchors,
        drafter_optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        detach_confidence=args.detach_confidence,
        eval_decoding="generate" if args.decode else "replay",
        bf16=low and not args.pure_bf16,
        pure_bf16=args.pure_bf16,
        activation_checkpointing=args.checkpoint_layers,
        compile_target=args.compile_target,
        shard_target=args.shard_target,
        state_cache=str(args.cache) if args.cache else None,
        seed=args.seed,
        use_cpu=device.type == "cpu",
        report_to="none",
    )


def _drafter(args: argparse.Namespace, target: Any, train_set: Any) -> DSparkDrafter:
    """A fresh drafter, or the one to go on from, in float32 or as `--pure-bf16` has it."""
    import torch

    from ..modeling_dspark import DSparkDrafter
    from ..training.arguments import DrafterShape
    from ..training.fresh import new_drafter

    if args.start:
        return DSparkDrafter.from_pretrained(args.start, dtype=torch.float32)
    shape = DrafterShape(
        num_layers=args.num_layers,
        block_size=args.block_size,
        sample_from_anchor=args.layout == "A",
        target_layer_ids=tuple(args.taps) if args.taps else None,
        markov_rank=args.markov_rank,
        markov_head_type=args.markov_head,
        draft_vocab_size=args.draft_vocab_size,
        mask_token_id=args.mask_token_id,
    )
    return new_drafter(target, shape, train_set, args.seed)


def _announce_cache(folder: Path, drafter: DSparkDrafter, target: Any, train_set: Any) -> None:
    """Says how much room the hidden states will take, and refuses a disk that has less."""
    from ..training.state_cache import cache_bytes, check_room

    tokens = sum(map(len, train_set.ids))
    needed = cache_bytes(drafter.config, tokens, target.dtype)
    print(f"hidden states of {tokens:,} tokens: {needed / 2**30:.2f} GiB in {folder} before compression", flush=True)
    check_room(folder, needed)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is learned, as the command line has them."""
    others = ("out", "json", "words", "command", "device", "compile_target", "shard_target", "cache")
    return {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items() if name not in others} | {
        "answers": [str(folder) for folder in args.answers]
    }


def _resumable(out: Path, facts: dict[str, Any], trainer: DSparkTrainer) -> str | None:
    """
    The checkpoint to go on from, if there is one.

    Raises:
        ValueError: the folder holds a finished drafter, or belongs to a run that was told something else.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if (out / "config.json").exists():
        raise ValueError(f"{out} holds a finished drafter; give another folder, or remove it to train again.")
    file, last = out / RUN_NAME, get_last_checkpoint(str(out))
    if last is None or not file.exists():
        if trainer.is_world_process_zero():
            file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        return None
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged; remove {out} to train from the beginning.") from error
    if changed := [name for name in facts if theirs.get(name) != facts[name]]:
        raise ValueError(
            f"{out} belongs to a run with other settings ({', '.join(changed)}); use the same, or another folder."
        )
    return last
