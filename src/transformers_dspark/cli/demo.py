"""`dspark demo`: the same text from a target alone and with its drafter, and what the drafter saved."""

from __future__ import annotations

import argparse

from . import add_json_option, share, valid_temperature, valid_text, write_json
from .pair import add_answer_options, add_pair_options, load_pair, progress_bar


HELP = "a real target alone and with its drafter: same text, other speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        type=valid_text,
        action="append",
        metavar="TEXT",
        help="your own prompt; may be given several times",
    )
    add_answer_options(parser, 160)
    parser.add_argument(
        "--temperature", type=valid_temperature, default=0.0, help="0 is greedy, where the texts can be compared"
    )
    parser.add_argument(
        "--confidence-threshold",
        type=share,
        metavar="C",
        help="end a block before a token of lower confidence, 0..1; 0 never cuts (default: what suits one row)",
    )
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..environment import environment
    from ..evaluation.prompts import DEMO_PROMPTS
    from ..evaluation.runs import Run
    from ..evaluation.runs import run as generate
    from ..evaluation.tables import acceptance_table, coloured_text, speed_table
    from ..telemetry import GenerationStats

    console = Console()
    pair = load_pair(args)
    prompts = {str(i): text for i, text in enumerate(args.prompt, start=1)} if args.prompt else DEMO_PROMPTS
    threshold = args.confidence_threshold
    drafting = pair.quick_options if threshold is None else {"assistant_confidence_threshold": threshold}

    def both(text: str, tokens: int) -> tuple[Run, Run]:
        ids = pair.prompt_ids([{"role": "user", "content": text}])
        options = {"temperature": args.temperature, **drafting}
        alone = generate(pair, ids, tokens, drafted=False, **options)
        return alone, generate(pair, ids, tokens, drafted=True, **options)

    both("Hello", 8)  # warm-up: allocations and one-time choices of the libraries are in neither figure
    results = {}
    with progress_bar() as bar:
        for name, text in bar.track(prompts.items(), description="generating"):
            results[name] = both(text, args.max_new_tokens)
    for (name, text), (_, drafted) in zip(prompts.items(), results.values(), strict=True):
        console.rule(f"[bold]{name}[/bold]", align="left")
        console.print(text, style="bold", markup=False)
        console.print(coloured_text(pair.tokenizer, drafted.ids, drafted.stats))
    console.rule()
    console.print("green: drafted and accepted; plain: the target's own token of each round\n")
    stats = GenerationStats.merge(drafted.stats for _, drafted in results.values())
    console.print(speed_table(list(results), list(results.values())))
    console.print(acceptance_table(stats))
    equal = all(alone.ids.equal(drafted.ids) for alone, drafted in results.values())
    write_json(
        args.json,
        {
            "environment": environment(pair.target.device, args.words),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "temperature": args.temperature,
            "options": drafting,
            "same_ids": equal,
            "prompts": {
                name: {
                    "text": pair.tokenizer.decode(drafted.ids, skip_special_tokens=True),
                    "tokens": len(drafted.ids),
                    "alone_tokens_per_second": alone.tokens_per_second,
                    "drafted_tokens_per_second": drafted.tokens_per_second,
                    "dspark": drafted.stats.to_dict(),
                }
                for name, (alone, drafted) in results.items()
            },
            "dspark": stats.to_dict(),
        },
    )
    if not equal and args.temperature == 0:
        console.print(
            "The ids differ. In low precision near-equal logits can change places when several tokens are checked "
            "at once; in float32 this should not happen: please report it."
        )
        return 1 if pair.target.dtype.itemsize == 4 else 0
    return 0
