"""The figures that matter, from a result file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


Lines = Sequence[Mapping[str, Any]]
COMPILED = "generate, static cache, compiled"


def summary(parts: Mapping[str, Lines]) -> list[tuple[str, str, str]]:
    """
    What was measured, its figure, and what it is held against. What a run did not measure is left out.

    Args:
        parts (`Mapping[str, Lines]`): Of a result.
    """
    measured = {
        part: [line for line in lines if not {"failed", "skipped"} & line.keys()] for part, lines in parts.items()
    }
    found = [row for make in (_rounds, _speed, _schedule, _rest) for row in make(measured)]
    lost = [
        (f"{part}: {kind}", str(sum(kind in line for line in lines)), "lines")
        for part, lines in parts.items()
        for kind in ("failed", "skipped")
        if any(kind in line for line in lines)
    ]
    return found + lost


def _rounds(parts: Mapping[str, Lines]) -> Iterator[tuple[str, str, str]]:
    for line in parts.get("verify", []):
        if line.get("step_seconds"):
            what = f"verify step, {line['rows']} x {line['tokens'] // line['rows']}, {line['engine']}"
            yield what, _ms(line["step_seconds"]), f"{line['over_floor']:.2f}x its bytes"
    for line in parts.get("round", []):
        yield "round of 1 row", _ms(line["seconds"]), f"{line['over_floor']:.2f}x its bytes"


def _speed(parts: Mapping[str, Lines]) -> Iterator[tuple[str, str, str]]:
    """The loop at the first profile's acceptance, which is simulated, against the peers of the same run."""
    profile = next((line["profile"] for line in parts.get("throughput", [])), "")
    for rows in sorted({line["rows"] for line in parts.get("peers", [])}):
        ours = _best(parts, rows, profile)
        if ours is None:
            continue
        what = f"tokens/s, {rows} rows, {profile}, simulated"
        for line in (line for line in parts["peers"] if line["rows"] == rows):
            theirs = line.get("tokens_per_second") or ours["accepted_length"] / line["round_seconds"]
            yield what, f"{ours['tokens_per_second']:.0f}", f"{ours['tokens_per_second'] / theirs:.2f}x {line['peer']}"


def _schedule(parts: Mapping[str, Lines]) -> Iterator[tuple[str, str, str]]:
    """Compact against the better of whole blocks and no drafter."""
    lines = parts.get("throughput", [])
    ratios: dict[tuple[int, int], dict[str, float]] = {}
    for line in lines:
        others = [
            other["tokens_per_second"]
            for other in lines
            if other["mode"] in ("static", "no drafter") and _place(other) == _place(line)
        ]
        if line["mode"] == "compact" and others:
            of_rows = ratios.setdefault((line["context"], line["rows"]), {})
            of_rows[line["profile"]] = line["tokens_per_second"] / max(others)
    for (context, rows), by_profile in sorted(ratios.items()):
        words = ", ".join(f"{profile} {ratio:.2f}x" for profile, ratio in by_profile.items())
        yield f"compact, {rows} rows, context {context}, simulated", words, "better of static and no drafter"


def _rest(parts: Mapping[str, Lines]) -> Iterator[tuple[str, str, str]]:
    blocks = {line["block"]: line for line in parts.get("draft-length", [])}
    if len(blocks) > 1:
        short, long = blocks[min(blocks)], blocks[max(blocks)]
        added = (long["draft_seconds"] - short["draft_seconds"]) / short["seconds"]
        what = f"draft of {max(blocks)} instead of {min(blocks)}, {short['rows']} rows"
        yield what, _ms(long["draft_seconds"] - short["draft_seconds"]), f"{added:.1%} of the shorter round"
    for line in parts.get("host-gap", []):
        what = f"GPU idle in a round, {line['rows']} rows"
        yield what, f"{line['idle_share']:.1%}", f"{line['long_gap_share']:.1%} in gaps of 10 us and more"
    for line in parts.get("costs", []):
        yield f"step costs {line['table']}", f"{line['median_error']:.1%}", "median error on steps not in the table"
    for line in parts.get("pair", []):
        what = f"the real pair, {line['rows']} rows"
        yield what, f"{line['tokens_per_second']:.0f} tokens/s", f"{line['speed_up']:.2f}x {COMPILED}"
    for line in parts.get("divergence", []):
        share = f"{line['divergences']} of {line['prompts']} texts, {line['defects']} of them defects"
        margins = (
            f"{line['largest_margin_ulps']:.1f} ulps, {line['largest_margin']:.3g} apart; "
            f"{line['largest_float32_margin']:.3g} in float32"
        )
        yield f"{line['compared']}, parted from {line['against']}", share, margins
    for part in ("first-call", "startup"):
        for line in parts.get(part, []):
            process = f", process {line['process']}" if "process" in line else ""
            yield f"{part}{process}: compile and capture", f"{line['startup_seconds']:.1f} s", line.get("engine", "")


def _best(parts: Mapping[str, Lines], rows: int, profile: str) -> Mapping[str, Any] | None:
    lines = [line for line in parts.get("throughput", []) if line["rows"] == rows and line.get("profile") == profile]
    context = min((line["context"] for line in lines), default=0)
    found = [line for line in lines if line["context"] == context and line["mode"] != "no drafter"]
    return max(found, key=lambda line: line["tokens_per_second"], default=None)


def _place(line: Mapping[str, Any]) -> tuple[int, int, str]:
    return line["context"], line["rows"], line["profile"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
