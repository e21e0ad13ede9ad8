"""`dspark inspect`: what a drafter's checkpoint is, how it is read, and which target it fits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import UsageError, add_json_option, device_of, path_or_id, positive_int, write_json


HELP = "say what a drafter's checkpoint is, how it is read, and which target it fits"
EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=path_or_id, metavar="PATH", help="folder or hub id")
    parser.add_argument(
        "--probe", type=path_or_id, metavar="TARGET", help="measure both layouts with this target; needs --prompts"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines of {"turns": ["..."]}')
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N conversations")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=64, metavar="N", help="of each answer (default: %(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", help="of the probe: cuda, cuda:1, cpu (default: cuda if any)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if (args.probe is None) != (args.prompts is None):
        raise UsageError("--probe TARGET and --prompts FILE go together: give both, or neither.")
    device = device_of(args.device)
    from rich.console import Console
    from transformers.utils import logging

    from ..evaluation.prompts import read_conversations
    from ..evaluation.real_pair import find_drafter
    from ..inspection import Inspection

    conversations = read_conversations(args.prompts, args.limit) if args.prompts else []
    logging.disable_progress_bar()
    report = Inspection.of(find_drafter(args.drafter))
    result = report.to_dict()
    if args.probe and report.problem is None:
        result["probe"] = _probe(args.probe, report.path, conversations, args.max_new_tokens, device)
    Console().print(_table(result))
    write_json(args.json, result)
    return EXIT_REFUSED if report.problem else 0


def _probe(target: str, drafter: str, conversations: Any, max_new_tokens: int, device: Any) -> dict[str, Any]:
    from ..evaluation.layout_probe import probe_layout
    from ..evaluation.runs import Pair

    pair = Pair.load(target, drafter, device)
    prompts = [pair.prompt_ids([{"role": "user", "content": turns[0]}])[0] for turns in conversations]
    probe = probe_layout(pair.drafter, pair.target, prompts, max_new_tokens)
    return {"target": target, "prompts": len(prompts), "anchor_first": probe.anchor_first, "filler": probe.filler}


def _table(result: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _lines(result):
        table.add_row(name, text)
    return table


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("family", result["family"]), ("recognised by", result["recognised_by"])]
    if result["problem"]:
        return [*lines, ("refused", result["problem"])]
    heads, backbone, size, target = (result[name] for name in ("heads", "backbone", "size", "target"))
    vocabulary, layout = result["vocabulary"], result["layout"]
    confidence = "none" if not heads["confidence"] else "with" if heads["confidence_with_markov"] else "without"
    layers = f"{target['layers']}" if target["layers"] else f"at least {target['layers_at_least']}"
    lines += [
        ("layout", f"{layout['name']} (by {layout['source']})"),
        ("block", f"{result['block_size']} rows, {result['drafted_tokens']} drafted tokens"),
        ("taps", ", ".join(map(str, result["taps"]))),
        ("backbone", f"{backbone['type']}, {backbone['layers']} layers of {backbone['hidden_size']}"),
        ("attention", _attention(backbone)),
        ("sequential head", f"{heads['markov']}, rank {heads['markov_rank']}" if heads["markov"] else "none"),
        ("confidence head", confidence if confidence == "none" else f"{confidence} the sequential head's input"),
        ("proposes", f"{vocabulary['proposed']:,} of {vocabulary['size']:,} tokens"),
        ("embedding, head", f"{result['embedding']}, {result['head']}"),
        (
            "size",
            f"{size['parameters'] / 1e6:.1f} M parameters, {size['bytes_kept'] / 1e6:.1f} MB kept of "
            f"{size['bytes_in_file'] / 1e6:.1f} MB, {', '.join(size['dtypes'])}",
        ),
        ("left in the file", ", ".join(result["left_out"]) or "nothing"),
        (
            "target",
            f"{target['name'] or 'not named'}: hidden size {target['hidden_size']}, {layers} layers, vocabulary "
            f"{target['vocab_size']:,}",
        ),
    ]
    if result["plan"]:
        lines.append(("to load it", result["plan"]))
    if "probe" in result:
        probe = result["probe"]
        lines.append(
            ("accepted length", f"{probe['anchor_first']:.2f} in layout A, {probe['filler']:.2f} in layout F")
        )
    return lines


def _attention(backbone: dict[str, Any]) -> str:
    kinds, causal = backbone["layer_types"], backbone["causal_layer_types"]
    parts = []
    for kind in sorted(set(kinds)):
        window = "" if kind == "full_attention" else f", {backbone['sliding_window']} tokens"
        start = f" from the {backbone['sliding_window_from']}" if window else ""
        order = "causal" if kind in causal else "bidirectional"
        parts.append(f"{kinds.count(kind)} {kind.replace('_', ' ')}{window}{start}, {order} in the block")
    return "; ".join(parts) + ("; sinks" if backbone["attention_sinks"] else "")
