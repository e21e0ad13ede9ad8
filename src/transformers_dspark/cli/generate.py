"""`dspark generate`: prompts in, texts out."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Interrupted, UsageError, add_json_option, path_or_id, positive_int, share, valid_text, write_json
from .pair import add_answer_options, add_pair_options, load_pair, progress_bar


if TYPE_CHECKING:
    from ..evaluation.runs import Pair

HELP = "answer prompts with a target and its drafter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", type=valid_text, nargs="*", metavar="PROMPT", help="prompts")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='or JSON lines of {"turns": ["..."]}')
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only its first N lines")
    parser.add_argument("--rows", type=positive_int, default=8, metavar="N", help="of a batch (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="without the drafter")
    parser.add_argument("--stream", action="store_true", help="show tokens as they come; for one prompt")
    parser.add_argument("--costs", type=path_or_id, metavar="FILE", help="from `dspark profile`: verify what pays")
    add_answer_options(parser, 256, [0.0])
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="only the K most likely tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="only the likeliest, up to P in sum")
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if bool(args.text) == bool(args.prompts):
        raise UsageError("give prompts either as words or with --prompts FILE")
    if len(args.temperature) > 1:
        raise UsageError("--temperature takes one value here: give one, or call the command again")
    if (args.top_k or args.top_p is not None) and args.temperature == [0.0]:
        raise UsageError("--top-k and --top-p choose nothing at temperature 0: give --temperature 1 as well")
    from ..environment import environment
    from ..evaluation.prompts import read_conversations

    prompts = args.text or [turns[0] for turns in read_conversations(args.prompts, args.limit)]
    if args.stream and len(prompts) > 1:
        raise UsageError(f"--stream shows one text, and {len(prompts)} prompts are given: give one, or leave it out")
    pair = load_pair(args)
    answers: list[dict[str, Any]] = []
    result = {"environment": environment(pair.target.device, args.words), "answers": answers}
    try:
        with progress_bar() as bar:
            task = bar.add_task("answering", total=len(prompts), visible=not args.stream)
            for start in range(0, len(prompts), args.rows):
                some = prompts[start : start + args.rows]
                found = _answer(pair, some, start, args)
                answers += found
                bar.advance(task, len(some))
                for number, answer in enumerate(found if not args.stream else [], start + 1):
                    bar.console.file.flush()
                    print(answer["text"] if len(prompts) == 1 else f"[{number}] {answer['text']}\n")
    except KeyboardInterrupt:
        if not answers:
            raise
        write_json(args.json, result)
        raise Interrupted(
            f"{len(answers)} of {len(prompts)} answers are kept; still to do: the prompts from number "
            f"{len(answers) + 1} on"
        ) from None
    write_json(args.json, result)
    return 0


def _answer(pair: Pair, prompts: list[str], first: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answers one batch; the n-th prompt draws with seed + n."""
    temperature = args.temperature[0]
    options: dict[str, Any] = {"seed": args.seed + first} if temperature else {}
    options |= {"top_k": args.top_k} if args.top_k else {}
    options |= {"top_p": args.top_p} if args.top_p is not None else {}
    assistant: dict[str, Any] = {}
    if not args.alone:
        assistant["assistant_model"] = pair.drafter
        options |= {"step_cost_table": args.costs} if args.costs else {}
    if args.stream:
        from transformers import TextStreamer

        assistant["streamer"] = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    inputs = pair.batch(prompts)
    start = time.perf_counter()
    config = pair.config(args.max_new_tokens, temperature, **options)
    output = pair.target.generate(**inputs, generation_config=config, **assistant)
    found = pair.new_ids(output.sequences, inputs["input_ids"].shape[1])
    seconds = time.perf_counter() - start
    lengths = [[]] * len(prompts) if args.alone else output.dspark.accepted_lengths or [[]] * len(prompts)
    return [
        {
            "prompt": prompt,
            "text": pair.tokenizer.decode(ids, skip_special_tokens=True),
            "tokens": len(ids),
            "batch_seconds": seconds,
            **({} if args.alone else {"accepted_length": sum(accepted) / max(1, len(accepted))}),
        }
        for prompt, ids, accepted in zip(prompts, found, lengths, strict=True)
    ]
