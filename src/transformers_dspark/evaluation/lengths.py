"""Accepted lengths of a drafter by prompts, domain and language: what is measured, and its tables. Plain numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from ..telemetry import GenerationStats
from ..training.prompts import read_lines, user_turns
from .plots import name_of


# What well-known sets of prompts are about; a line's own `domain` comes before it.
DOMAINS = {
    "math": ("gsm8k", "math500", "math", "aime25", "aime24"),
    "code": ("humaneval", "mbpp", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard-v2", "arena-hard"),
}
THRESHOLDS = tuple(k / 10 for k in range(10))


def read_groups(path: Path, limit: int | None = None) -> dict[tuple[str, str | None], list[list[str]]]:
    """
    The conversations of a file by domain and language, which lines may name as `domain` and `language`.

    Args:
        path (`Path`): See `training.prompts.read_prompts`.
        limit (`int`, *optional*): Read only the first `limit` lines.

    Returns:
        User turns by domain and language. The domain of lines that name none is that of a well-known set, else
        `"other"`.
    """
    known = next((domain for domain, names in DOMAINS.items() if path.stem in names), "other")
    groups: dict[tuple[str, str | None], list[list[str]]] = defaultdict(list)

    def parsed(value: Any) -> tuple[str, str | None, list[str]] | None:
        turns = user_turns(value)
        domain, language = value.get("domain", known), value.get("language")
        named = isinstance(domain, str) and (language is None or isinstance(language, str))
        return (domain, language, turns) if turns is not None and named else None

    for domain, language, turns in read_lines(path, parsed, limit):
        groups[domain, language].append(turns)
    return dict(groups)


def figures(stats: GenerationStats) -> dict[str, Any]:
    """Accepted length, acceptance by position given the prefix and of whole prefixes, and what thresholds would do."""
    shares = stats.acceptance_by_position
    return {
        "rounds": stats.rounds,
        "accepted_length": stats.mean_accepted_length,
        "acceptance_by_position": shares,
        "survival_by_position": list(accumulate((share or 0.0 for share in shares), mul)),
        "thresholds": thresholds(stats),
    }


def thresholds(stats: GenerationStats, values: Sequence[float] = THRESHOLDS) -> list[dict[str, float]]:
    """
    What would have been sent and accepted, had each block been cut before the first confidence under a threshold. The
    blocks are those of whole verification, so the figures are estimates; empty without confidences.

    Args:
        stats (`GenerationStats`): Of calls in static mode.
        values (`Sequence[float]`): Thresholds, in 0..1.
    """
    found: list[dict[str, float]] = []
    if not any(map(len, stats.confidences)):
        return found
    for value in values:
        sent = accepted = rounds = 0
        for row, widths, committed in zip(
            stats.confidences, stats.verify_lengths, stats.accepted_lengths, strict=True
        ):
            start = 0
            for width, count in zip(widths, committed, strict=True):
                sure = next((k for k in range(width) if row[start + k] < value), width)
                sent, accepted, rounds = sent + sure, accepted + min(count - 1, sure), rounds + 1
                start += width
        share = accepted / sent if sent else 0.0
        cut = {"threshold": value, "verify_length": sent / rounds, "accepted_share": share}
        found.append({**cut, "accepted_length": 1 + accepted / rounds})
    return found


def markdown(report: Mapping[str, Any]) -> str:
    """
    A report of `dspark eval` as tables: accepted lengths by temperature and prompts, with the mean of each domain that
    has several, and acceptance by position.

    Source: DSpark paper, Table 1.
    """
    results = report["results"]
    names = list(dict.fromkeys(map(name_of, results)))
    domains: dict[str, list[str]] = defaultdict(list)
    for record in results:
        if name_of(record) not in domains[record["domain"]]:
            domains[record["domain"]].append(name_of(record))
    means = {domain: own for domain, own in domains.items() if len(own) > 1}
    temperatures = list(dict.fromkeys(record["temperature"] for record in results))
    lines = [_row(["temperature", *names, *(f"{domain}, mean" for domain in means)])]
    lines.append("|---" * (1 + len(names) + len(means)) + "|")
    for temperature in temperatures:
        lengths = {name_of(r): r["accepted_length"] for r in results if r["temperature"] == temperature}
        cells = [lengths.get(name) for name in names]
        cells += [_mean(lengths[name] for name in own if name in lengths) for own in means.values()]
        lines.append(_row([f"{temperature:g}", *("-" if c is None else f"{c:.2f}" for c in cells)]))
    width = max((len(record["acceptance_by_position"]) for record in results), default=0)
    for title, key in (
        ("accepted, given those before it", "acceptance_by_position"),
        ("accepted with all before it", "survival_by_position"),
    ):
        lines += ["", _row([title, "temperature", *(f"k={k + 1}" for k in range(width))])]
        lines.append("|---" * (2 + width) + "|")
        for record in results:
            shares = [*record[key], *[None] * (width - len(record[key]))]
            cells_ = ["-" if share is None else f"{share:.1%}" for share in shares]
            lines.append(_row([name_of(record), f"{record['temperature']:g}", *cells_]))
    facts = report["environment"]
    told = f"{facts['device']}, {report['dtype']}, at most {report['max_new_tokens']} tokens an answer"
    return "\n".join([*lines, "", f"Committed tokens per round, the target's own included. {told}."]) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


__all__ = ["figures", "markdown", "read_groups", "thresholds"]
