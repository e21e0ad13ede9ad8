"""How figures and texts are shown in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..calibration import ConfidenceCalibration
from ..telemetry import GenerationStats
from .plots import name_of
from .runs import Run


ACCEPTED_STYLE = "green"


def coloured_text(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, stats: GenerationStats) -> Text:
    """The text of one row with accepted drafts coloured; the target's own tokens (one a round) stay plain."""
    drafted = [False]  # the prefill's token
    for committed in stats.accepted_lengths[0] if stats.accepted_lengths else []:
        drafted += [True] * (committed - 1) + [False]
    text, shown = Text(), 0
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end], skip_special_tokens=True)
        if whole.endswith("\ufffd") and end < len(ids):
            continue  # a character that the next token completes
        text.append(whole[shown:], style=ACCEPTED_STYLE if end <= len(drafted) and drafted[end - 1] else "")
        shown = len(whole)
    return text


def speed_table(names: Sequence[str], pairs: Sequence[tuple[Run, Run]]) -> Table:
    """One line a prompt and one over all: both speeds, their ratio, accepted length, whether the ids are equal."""
    table = Table(title="The target alone, and with its drafter", title_justify="left")
    for heading in (
        "prompt",
        "tokens",
        "alone, tokens/s",
        "drafted, tokens/s",
        "speed-up",
        "accepted length",
        "same ids",
    ):
        table.add_column(heading, justify="left" if heading == "prompt" else "right", overflow="fold")

    def line(name: str, runs: Sequence[tuple[Run, Run]]) -> list[str]:
        tokens = [sum(len(r[i].ids) for r in runs) for i in (0, 1)]
        speeds = [tokens[i] / sum(r[i].seconds for r in runs) for i in (0, 1)]
        stats = GenerationStats.merge(drafted.stats for _, drafted in runs)
        same = all(torch.equal(alone.ids, drafted.ids) for alone, drafted in runs)
        accepted = f"{stats.mean_accepted_length:.2f}" if stats.rounds else "-"
        return [
            name,
            str(tokens[1]),
            f"{speeds[0]:.1f}",
            f"{speeds[1]:.1f}",
            f"{speeds[1] / speeds[0]:.2f}x",
            accepted,
            "yes" if same else "NO",
        ]

    for name, pair in zip(names, pairs, strict=True):
        table.add_row(*line(name, [pair]))
    table.add_section()
    table.add_row(*line("all", pairs))
    return table


def acceptance_table(stats: GenerationStats) -> Table:
    """Conditional acceptance at each position of the block."""
    table = Table(
        title="Acceptance of the k-th drafted token, given that those before it passed", title_justify="left"
    )
    for k in range(len(stats.acceptance_by_position)):
        table.add_column(f"k={k + 1}", justify="right")
    table.add_row(*("-" if share is None else f"{share:.0%}" for share in stats.acceptance_by_position))
    return table


def length_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """One line a result of `dspark eval`."""
    table = Table("prompts", "temperature", "answers", "tokens", "accepted length", "by position")
    for record in records:
        shares = " ".join("-" if share is None else f"{share:.2f}" for share in record["acceptance_by_position"])
        counts = str(record["answers"]), str(record["tokens"])
        length = f"{record['accepted_length']:.3f}"
        table.add_row(name_of(record), f"{record['temperature']:g}", *counts, length, shares)
    return table


def calibration_table(figures: Sequence[Mapping[str, float]], found: ConfidenceCalibration) -> Table:
    """One line a drafted token: what survived, and how well confidence said so before and after."""
    heads = ["token", "blocks", "temper-\nature", "sur-\nvived"]
    for name in ("error", "Brier", "AUC"):
        heads += [f"{name}\nbefore", "\nafter"]
    title = "Confidence against acceptance, on prompts it was not fitted on"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right")
    for line, temperature, blocks in zip(figures, found.temperatures, found.reached, strict=True):
        names = ("error_before", "error_after", "brier_before", "brier_after", "auc_before", "auc_after")
        cells = [f"{line['survived']:.1%}", *(f"{line[name]:.3f}" for name in names)]
        table.add_row(str(line["position"]), str(blocks), f"{temperature:.2f}", *cells)
    means = [sum(line[name] for line in figures) / len(figures) for name in ("error_before", "error_after")]
    table.add_row("mean", "", "", "", *(f"{mean:.3f}" for mean in means))
    return table
