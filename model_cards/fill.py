"""`python model_cards/fill.py`: writes a drafter's card from its template; every figure comes from a results file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from string import Template
from typing import Any

from transformers_dspark.packaging import accepted_table, model_index


ROOT = Path(__file__).parents[1]
NAME = "smollm2-135m-instruct"


def card() -> str:
    """The text of the card. Raises `KeyError` where the template asks for what no results file has."""
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks/results" / NAME).glob("*.json")}
    config = json.loads((ROOT / "drafters" / NAME / "config.json").read_text())
    accepted, speed, training = results["accepted_length"], results["speed"], results["training"]
    return Template((ROOT / "model_cards" / f"{NAME}.md").read_text()).substitute(
        model_index=model_index(f"dspark-{NAME}", accepted["results"]),
        accepted_table=accepted_table(accepted["results"], config["block_size"]),
        eval_command=accepted["environment"]["command"],
        eval_device=accepted["environment"]["device"],
        eval_dtype=accepted["dtype"],
        eval_tokens=accepted["max_new_tokens"],
        speed_table=_speed_table(speed["speed"]["drafting"]),
        speed_tokens=speed["speed"]["max_new_tokens"],
        speed_repeats=speed["speed"]["repeats"],
        speed_device=speed["environment"]["device"],
        speed_threads=speed["environment"]["threads"],
        speed_dtype=speed["speed"]["dtype"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        taps=", ".join(map(str, config["target_layer_ids"])),
        parameters=f"{training['parameters'] / 1e6:.1f}",
        answers=f"{training['answers']:,}",
        answer_tokens=f"{training['answer_tokens'] / 1e6:.1f}",
        recipe="\n".join(training["recipe"]),
        train_steps=f"{training['steps']:,}",
        train_seconds=round(training["seconds"]),
        train_device=training["device"],
        held_out=f"{training['held_out_accepted_length']:.2f}",
        **{k: config[k] for k in ("block_size", "hidden_size", "markov_head_type", "markov_rank", "vocab_size")},
        draft_vocab_size=config["draft_vocab_size"],
    )


def _speed_table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| drafting | alone, tokens/s | drafted, tokens/s | speed-up | accepted length |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        cells = [line["name"]]
        cells += [f"{line[f'{side}_tokens_per_second']:.1f}" for side in ("alone", "drafted")]
        cells += [f"{line[name]:.2f}" for name in ("speed_up", "accepted_length")]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    (ROOT / "drafters" / NAME / "README.md").write_text(card())
    sys.exit(0)
