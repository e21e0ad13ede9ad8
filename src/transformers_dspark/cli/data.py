"""`dspark data`: the training text of a drafter, in two steps: prompts, then the target's own answers to them."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import UsageError, add_json_option, device_of, positive_float, positive_int, seed, target_place, write_json


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..training.on_policy import AnswerProgress

HELP = "make a drafter's training text: prompts, and the target's answers to them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark data`."""
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)

    prompts = steps.add_parser("prompts", help="build a file of prompts from local permissive sources and templates")
    prompts.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines; compressed if .gz")
    prompts.add_argument(
        "--count", type=positive_int, default=140_000, metavar="N", help="prompts to aim at (%(default)s)"
    )
    prompts.add_argument("--seed", type=seed, default=0, metavar="N", help="the same seed gives the same file")
    prompts.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="folder with optional texts (see the messages for what it may hold)",
    )
    prompts.add_argument(
        "--exclude", type=Path, metavar="DIR", help="evaluation prompts (.jsonl) whose 13-grams must not occur"
    )
    prompts.add_argument(
        "--from-target",
        type=target_place,
        metavar="PATH",
        help="let this target, a folder or a hub id, write the prompts itself instead",
    )
    prompts.add_argument(
        "--written", action="store_true", help="conversations whose answers people wrote, for comparison"
    )
    prompts.add_argument(
        "--slots",
        type=positive_int,
        default=2048,
        metavar="N",
        help="drawn together with --from-target (%(default)s)",
    )
    prompts.add_argument("--device", metavar="NAME", help="with --from-target: cuda, cuda:1, cpu")
    add_json_option(prompts)

    answers = steps.add_parser("answers", help="let the target answer a file of prompts")
    answers.add_argument(
        "--target", type=target_place, required=True, metavar="PATH", help="the target: a folder or a hub id"
    )
    answers.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="made by `dspark data prompts`")
    answers.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="answer shards; continued if it exists"
    )
    answers.add_argument(
        "--slots", type=positive_int, default=2048, metavar="N", help="answers decoded together (%(default)s)"
    )
    answers.add_argument(
        "--capacity", type=positive_int, default=704, metavar="N", help="tokens a slot holds (%(default)s)"
    )
    answers.add_argument(
        "--max-seconds", type=positive_float, metavar="S", help="stop after S seconds, keeping what there is"
    )
    answers.add_argument("--limit", type=positive_int, metavar="N", help="use only the first N prompts")
    answers.add_argument("--seed", type=seed, default=0, metavar="N", help="chooses temperatures and draws")
    answers.add_argument(
        "--written", action="store_true", help="keep the answers that the file's `messages` hold, for comparison"
    )
    answers.add_argument("--device", metavar="NAME", help="cuda, cuda:1, cpu (default: cuda if there is one)")
    add_json_option(answers)


def run(args: argparse.Namespace) -> int:
    """Runs one step and returns the exit code."""
    return {"prompts": _prompts, "answers": _answers}[args.step](args)


def _prompts(args: argparse.Namespace) -> int:
    from ..training.prompts import SOURCES, Source, build_prompts, write_prompts

    if args.written and args.from_target:
        raise UsageError("--written takes what people wrote and --from-target what the target does: give one of them")
    kinds: tuple[Source, ...] = SOURCES
    if args.written:
        from ..training.written import WRITTEN

        kinds = WRITTEN
    elif args.from_target:
        from ..training.self_prompts import self_prompts

        target, tokenizer = _chat_model(args.from_target, args.device)
        kinds = (Source("self", 1.0, lambda rng: self_prompts(target, tokenizer, args.seed, args.slots)),)
    built = build_prompts(args.count, args.seed, args.sources, args.exclude, say=print, kinds=kinds)
    lines = built.prompts
    if args.written:
        from ..training.written import as_chat

        lines = [as_chat(prompt) for prompt in lines]
    write_prompts(args.out, lines)
    for source, count in sorted(built.counts.items()):
        print(f"{count:8,d}  {source}")
    print(f"{len(built.prompts):8,d}  prompts in {args.out}")
    write_json(args.json, {"prompts": len(built.prompts), "sources": built.counts, "seed": args.seed})
    return 0


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise UsageError(f"{path} has no chat template; that needs a chat model")
    return tokenizer


def _chat_model(path: str, device_name: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target with its tokenizer, in bfloat16 where there is a GPU."""
    device = device_of(device_name)
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(path)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device), tokenizer


def _answers(args: argparse.Namespace) -> int:
    from ..training.answers import AnswerWriter
    from ..training.on_policy import AnswerOptions, generate_answers
    from ..training.prompts import read_prompts

    options = AnswerOptions(args.slots, args.capacity, max_seconds=args.max_seconds, seed=args.seed)
    broken: list[int] = []
    facts = {
        "target": Path(args.target).name,
        "prompts_sha256": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
        "seed": args.seed,
        "capacity": args.capacity,
        **({"written": True} if args.written else {}),
    }
    if args.written:
        return _written(args, facts)
    prompts = read_prompts(args.prompts, args.limit, broken)
    _say_broken(broken)
    target, tokenizer = _chat_model(args.target, args.device)
    writer = AnswerWriter(args.out, facts, target.config.get_text_config().vocab_size)
    if writer.done:
        print(f"{args.out} already holds {len(writer.done):,} answers; continuing", flush=True)
    before = sum(prompt < len(prompts) for prompt, _ in writer.done)
    with _progress(sum(map(len, prompts)), before) as (report, seconds):
        progress = generate_answers(target, tokenizer, prompts, writer, options, report, seconds)
    print(_line(progress))
    print("all prompts are answered" if progress.exhausted else "stopped at the limit; run again to continue")
    result = {**dataclasses.asdict(progress), "broken_lines": len(broken), "facts": facts, "shards": writer.shards}
    write_json(args.json, result)
    return 0


def _written(args: argparse.Namespace, facts: dict[str, Any]) -> int:
    from transformers import AutoConfig

    from ..generation_config import eos_ids
    from ..training.answers import AnswerWriter
    from ..training.written import keep_written, read_chats

    broken: list[int] = []
    chats = read_chats(args.prompts, args.limit, broken)
    _say_broken(broken)
    tokenizer, config = _tokenizer(args.target), AutoConfig.from_pretrained(args.target).get_text_config()
    writer = AnswerWriter(args.out, facts, config.vocab_size)
    kept, left_out = keep_written(chats, tokenizer, writer, args.capacity, eos_ids(config, tokenizer))
    print(f"{kept:,} answers of {len(chats):,} conversations in {args.out}, {left_out:,} left out")
    result = {"answers": kept, "left_out": left_out, "broken_lines": len(broken), "facts": facts}
    write_json(args.json, {**result, "shards": writer.shards})
    return 0


def _say_broken(broken: list[int]) -> None:
    if broken:
        print(f"{len(broken):,} broken lines are skipped, the first is line {broken[0]}", flush=True)


@contextmanager
def _progress(total: int, before: int) -> Iterator[tuple[Callable[[AnswerProgress], None], float]]:
    """
    What shows progress, and how many seconds apart: a bar on a terminal, else a line now and then.

    Args:
        total (`int`): Answers to give in all.
        before (`int`): Those that an earlier run gave.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if not console.is_terminal:
        yield lambda progress: print(_line(progress), flush=True), 5.0
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers  {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=before)

        def report(progress: AnswerProgress) -> None:
            figures = f"{progress.recent_rate:,.0f} tokens/s, {progress.running:,d} running"
            bar.update(task, completed=before + progress.answers + progress.skipped, description=figures)

        yield report, 0.5


def _line(progress: AnswerProgress) -> str:
    return (
        f"{progress.seconds:6.0f} s  {progress.answers:9,d} answers  {progress.tokens:12,d} tokens"
        f"  {progress.recent_rate:10,.0f} tokens/s  {progress.running:6,d} running  {progress.skipped} skipped"
    )
