"""`dspark diff`: whether greedy texts with a drafter are those of plain decoding, and what explains a difference."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import Interrupted, add_json_option, positive_int, valid_text, write_json
from .pair import add_answer_options, add_pair_options, load_pair, progress_bar


HELP = "hold greedy texts with a drafter against plain decoding: near-tie or defect"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", type=valid_text, action="append", metavar="TEXT", help="may be given several times")
    given.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines of {"turns": ["..."]}; first turns')
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N prompts of the file")
    parser.add_argument("--batch-size", type=positive_int, default=1, metavar="N", help="(default: %(default)s)")
    add_answer_options(parser, tokens=64)
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from ..divergence import NEAR_TIE_ULPS, VERDICTS, RowDivergence, check_greedy
    from ..environment import environment
    from ..evaluation.prompts import DEMO_PROMPTS, read_conversations

    if args.prompts:
        texts = [turns[0] for turns in read_conversations(args.prompts, args.limit)]
    else:
        texts = args.prompt or list(DEMO_PROMPTS.values())
    pair = load_pair(args)
    config = pair.config(args.max_new_tokens)
    rows: list[RowDivergence] = []
    dtype, interrupted = str(pair.target.dtype), False
    try:
        with progress_bar() as bar:
            task = bar.add_task("comparing", total=len(texts))
            for first in range(0, len(texts), args.batch_size):
                inputs = pair.batch(texts[first : first + args.batch_size])
                output = pair.target.generate(**inputs, generation_config=config, assistant_model=pair.drafter)
                ids, mask = inputs["input_ids"], inputs["attention_mask"]
                counts = [len(new) for new in pair.new_ids(output.sequences, ids.shape[1])]
                report = check_greedy(pair.target, ids, output.sequences, counts, mask)
                rows, dtype = rows + list(report.rows), report.dtype
                bar.advance(task, len(report.rows))
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    table = Table("row", "tokens", "verdict", "at", "token", "plain", "margin", "deficit", "tolerance", box=SIMPLE)
    for number, row in enumerate(rows):
        cells = [str(number), str(row.tokens), row.verdict]
        if (found := row.first) is not None:
            words = [repr(pair.tokenizer.decode([token])) for token in (found.token, found.plain_token)]
            figures = [f"{value:.3g}" for value in (found.margin, found.deficit, found.tolerance)]
            cells += [str(found.position), *words, *figures]
        table.add_row(*cells, style="red" if row.verdict == "defect" else None)
    verdict = max((row.verdict for row in rows), key=VERDICTS.index)
    console = Console()
    console.print(table)
    console.print(f"{verdict}: {len(rows)} rows, {sum(row.first is not None for row in rows)} with a divergence")
    write_json(
        args.json,
        {
            "environment": environment(pair.target.device, args.words),
            "dtype": dtype.removeprefix("torch."),
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
            "near_tie_ulps": NEAR_TIE_ULPS,
            "verdict": verdict,
            "rows": [row.to_dict() for row in rows],
        },
    )
    if interrupted:
        left = f"the prompts from number {len(rows) + 1} on"
        raise Interrupted(f"{len(rows)} of {len(texts)} rows are kept; still to do: {left}")
    return 1 if verdict == "defect" else 0


__all__ = ["HELP", "add_arguments", "run"]
