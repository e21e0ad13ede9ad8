"""`dspark train`: a drafter for a target, from the target's own answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import add_json_option, device_of, path_or_id, positive_float, positive_int, seed, write_json


HELP = "train a drafter on answers that the target wrote (see `dspark data answers`)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=path_or_id, required=True, help="folder or hub id of the target model")
    parser.add_argument("--answers", required=True, type=Path, nargs="+", metavar="DIR", help="folders of answers")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="receives the drafter; run again to resume"
    )
    shape = parser.add_argument_group("shape of the drafter")
    shape.add_argument("--num-layers", type=positive_int, default=5, help="backbone layers (default: %(default)s)")
    shape.add_argument(
        "--block-size", type=positive_int, default=7, help="tokens drafted at once (default: %(default)s)"
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
    budget.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", help="cuda, cuda:1, cpu (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the target (default: bfloat16 on cuda)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    device = device_of(args.device)
    import torch
    from transformers import AutoModelForCausalLM

    from ..environment import environment
    from ..evaluation.plots import loss_curve
    from ..training.arguments import DrafterShape, TrainArguments
    from ..training.data import load_sequences
    from ..training.trainer import LOG_NAME, Trainer

    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shape = DrafterShape(
        num_layers=args.num_layers,
        block_size=args.block_size,
        target_layer_ids=tuple(args.taps) if args.taps else None,
        markov_rank=args.markov_rank,
        markov_head_type=args.markov_head,
        draft_vocab_size=args.draft_vocab_size,
        mask_token_id=args.mask_token_id,
    )
    arguments = TrainArguments(
        epochs=args.epochs,
        max_seconds=args.max_seconds,
        tokens_per_batch=args.tokens_per_batch,
        anchors=args.anchors,
        max_length=args.max_length,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        held_out=args.held_out,
        evaluations=args.evaluations,
        seed=args.seed,
    )
    sequences = load_sequences(args.answers, arguments.max_length)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device)
    trainer = Trainer(target, sequences, args.out, shape, arguments)
    size = sum(p.numel() for p in trainer.drafter.parameters())
    print(
        f"{len(trainer.train_set)} answers to learn, {len(trainer.held_out_set)} held out; drafter of "
        f"{size / 1e6:.1f} M parameters, taps {trainer.drafter.config.target_layer_ids}; at most "
        f"{trainer.max_steps} steps",
        flush=True,
    )
    result = trainer.train()
    try:
        loss_curve(args.out / LOG_NAME, args.out / "loss_curve.png")
    except ImportError:
        print("no picture of the losses: that needs matplotlib, from the extra `train`")
    figure = f"{result.mean_accepted_length:.3f} over {result.rounds} rounds" if result.rounds else "not measured"
    print(f"held-out accepted length {figure}; drafter in {args.out}")
    write_json(
        args.json,
        {
            "environment": environment(device, args.words),
            "held_out_accepted_length": result.mean_accepted_length if result.rounds else None,
            "held_out_acceptance_by_position": result.acceptance_by_position,
            "rounds": result.rounds,
            "steps": trainer.step,
            "seconds": trainer.seconds,
            "parameters": size,
            "answers": len(trainer.train_set),
            "arguments": arguments.to_dict(),
        },
    )
    return 0
