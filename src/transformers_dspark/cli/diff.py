"""`dspark diff`: whether greedy texts with a drafter are those of plain decoding, and what explains a difference."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import add_json_option, device_of, positive_int, valid_text, write_json
from .pair import add_pair_options


HELP = "hold greedy texts with a drafter against plain decoding: near-tie or defect"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", type=valid_text, action="append", metavar="TEXT", help="may be given several times")
    given.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines of {"turns": ["..."]}; first turns')
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N prompts of the file")
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=positive_int, default=1, metavar="N", help="(default: %(default)s)")
    add_pair_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    device = device_of(args.device)
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from transformers.utils import logging

    from ..divergence import NEAR_TIE_ULPS, VERDICTS, check_greedy
    from ..environment import environment
    from ..evaluation.prompts import DEMO_PROMPTS, read_conversations
    from ..evaluation.real_pair import fetch_target, find_drafter
    from ..evaluation.runs import Pair
    from ..generation_config import DSparkGenerationConfig

    if args.prompts:
        texts = [turns[0] for turns in read_conversations(args.prompts, args.limit)]
    else:
        texts = args.prompt or list(DEMO_PROMPTS.values())
    drafter = find_drafter(args.drafter)
    logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    pair = Pair.load(args.target or str(fetch_target()), drafter, device, dtype)
    base = pair.target.generation_config
    config = DSparkGenerationConfig(
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=base.pad_token_id if base.pad_token_id is not None else pair.tokenizer.pad_token_id,
        eos_token_id=base.eos_token_id,
        return_dict_in_generate=True,
    )
    prompts = [pair.prompt_ids([{"role": "user", "content": text}])[0] for text in texts]
    rows = []
    with Progress(transient=True) as progress:
        task = progress.add_task("comparing", total=len(prompts))
        for first in range(0, len(prompts), args.batch_size):
            batch = prompts[first : first + args.batch_size]
            padded = {"batch_first": True, "padding_side": "left"}
            ids = torch.nn.utils.rnn.pad_sequence(batch, **padded)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], **padded)
            output = pair.target.generate(
                ids, attention_mask=mask, generation_config=config, assistant_model=pair.drafter
            )
            rounds = output.dspark.accepted_lengths or [[] for _ in batch]
            report = check_greedy(pair.target, ids, output.sequences, [1 + sum(row) for row in rounds], mask)
            rows += report.rows
            progress.advance(task, len(batch))
    table = Table("row", "tokens", "verdict", "first at", "token", "plain token", "margin", "deficit", "tolerance")
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
            "environment": environment(device, args.words),
            "dtype": report.dtype,
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
            "near_tie_ulps": NEAR_TIE_ULPS,
            "verdict": verdict,
            "rows": [row.to_dict() for row in rows],
        },
    )
    return 1 if verdict == "defect" else 0


__all__ = ["HELP", "add_arguments", "run"]
