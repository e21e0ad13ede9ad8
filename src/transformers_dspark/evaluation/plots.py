"""Pictures of the files that commands write, each recognised by its content. Needs matplotlib."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


# Lines differ by dash and marker and bars by hatch, so that a picture says the same in grey.
LINES = [
    {"color": colour, "linestyle": dash, "marker": marker}
    for colour, dash, marker in zip(
        ("#1b3a6b", "#c2571a", "#3b7d4f", "#7a3b8f", "#555555", "#a01c38"),
        ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))),
        ("o", "s", "^", "D", "v", "x"),
        strict=True,
    )
]
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")
# Five inches wide with letters of 12 points: readable where a phone shows the whole width.
STYLE: Any = {
    "figure.figsize": (5, 4),
    "font.size": 12,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "dspark",
    "svg.fonttype": "path",
}
LOSSES = {"loss", "total", "cross_entropy", "l1", "confidence"}
Draw = Callable[[Any], None]


def read_result(path: Path) -> Any:
    """
    A JSON value, or the list of those of a JSON-lines file.

    Raises:
        ValueError: the file is neither.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        raise ValueError(f"{path} is no JSON and no JSON lines: give a file that a dspark command wrote") from None


def pictures_of(result: Any) -> dict[str, Draw]:
    """
    The pictures that a result allows: name to a function that draws on axes. Empty if it holds nothing to draw.

    Args:
        result (`Any`): From [`read_result`]: of `dspark eval`, `calibrate`, `profile` or `bench`, of the study,
            or a round trace.
    """
    if isinstance(result, Mapping) and "verify_seconds" in result:
        result = [result]  # a trace of a single round
    if isinstance(result, list):
        rounds = [line for line in result if isinstance(line, Mapping) and {"sent", "verify_seconds"} <= line.keys()]
        if rounds:
            return _of_rounds(rounds)
        log = [line for line in result if isinstance(line, Mapping) and "step" in line]
        return {"loss": lambda axes: _losses(axes, log)} if any(LOSSES & line.keys() for line in log) else {}
    if not isinstance(result, Mapping):
        return {}
    found: dict[str, Draw] = {}
    if any("reliability_after" in line for line in result.get("positions", [])):
        found["reliability"] = lambda axes: _reliability(axes, result["positions"])
    if any("acceptance_by_position" in line for line in result.get("results", [])):
        records = {f"{name_of(r)}, T={r['temperature']:g}": r for r in result["results"]}
        found |= _of_lengths(records)
    if result.get("arms"):
        found["block_sizes"] = lambda axes: _block_sizes(axes, result["arms"])
        largest = max(arm["block_size"] for arm in result["arms"])
        shares = {
            f"{arm['name']}, T={r['temperature']:g}": r["acceptance_by_position"]
            for arm in result["arms"]
            for r in arm["results"]
            if arm["block_size"] == largest
        }
        found["acceptance"] = lambda axes: _acceptance(axes, shares)
    if result.get("runs"):
        found["throughput"] = lambda axes: _throughput(axes, result["runs"])
        counts = {
            f"{run['prompts']}, {_rows(run['rows'])}": figures["verify_length_counts"]
            for run in result["runs"]
            for mode, figures in run["modes"].items()
            if mode != "static" and "verify_length_counts" in figures
        }
        if counts:
            found["verify_lengths"] = lambda axes: _verify_lengths(axes, counts)
    costs = result if "steps" in result else result.get("step_costs")
    if costs:
        found["step_costs"] = lambda axes: _step_costs(axes, costs["steps"])
    return found


def draw(result: Any, folder: Path, stem: str) -> list[Path]:
    """
    Writes every picture of a result as PNG and SVG; the same result gives the same bytes.

    Args:
        result (`Any`): See [`pictures_of`].
        folder (`Path`): Where they go, made if need be.
        stem (`str`): First part of their names.

    Raises:
        ImportError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, fill in pictures_of(result).items():
        paths = [folder / f"{stem}-{name.replace('_', '-')}.{ending}" for ending in ("png", "svg")]
        _save(fill, paths)
        written += paths
    return written


def loss_curve(records: Sequence[dict[str, Any]], picture: Path) -> None:
    """
    Draws a training log: the losses by step, and the held-out accepted length beside them.

    Args:
        records (`Sequence[dict]`): The `log_history` of a trainer's state.
        picture (`Path`): A file that matplotlib can write, by its ending.

    Raises:
        ImportError: matplotlib is not installed.
    """
    _save(lambda axes: _losses(axes, records), [picture])


def name_of(record: Mapping[str, Any]) -> str:
    """What the prompts of a result are called: their file, with the language if they name one."""
    language = record.get("language")
    return f"{record['prompts']} ({language})" if language else str(record["prompts"])


def _save(fill: Draw, paths: Sequence[Path]) -> None:
    try:
        import matplotlib
        from matplotlib.figure import Figure  # a figure without pyplot: no window system, no global state
    except ImportError:
        raise ImportError("Pictures need matplotlib: pip install 'transformers-dspark[train]'") from None
    with matplotlib.rc_context(STYLE):
        figure = Figure(layout="constrained")
        fill(figure.add_subplot())
        for path in paths:
            # neither the moment nor the version of the library is part of a picture
            silent = {".png": {"Software": None}, ".svg": {"Date": None}}.get(path.suffix, {})
            figure.savefig(path, dpi=160, metadata=silent)


def _styled(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    return zip(names, itertools.cycle(LINES), strict=False)


def _of_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Draw]:
    found: dict[str, Draw] = {"budget": lambda axes: _budget(axes, rounds)}
    lengths: dict[int, int] = defaultdict(int)
    for line in rounds:
        for sent in line["sent"]:
            lengths[sent] += 1
    counts = {rounds[0]["mode"]: [lengths[k] for k in range(max(lengths, default=0) + 1)]}
    found["verify_lengths"] = lambda axes: _verify_lengths(axes, counts)
    if any(line.get("predicted_verify_seconds") for line in rounds):
        found["step_time"] = lambda axes: _step_time(axes, rounds)
    return found


def _of_lengths(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Draw]:
    """The pictures of `dspark eval`, as far as its file holds what they need."""
    shares = {name: record["acceptance_by_position"] for name, record in records.items()}
    found: dict[str, Draw] = {"acceptance": lambda axes: _acceptance(axes, shares)}
    if any("accepted_length" in record for record in records.values()):
        lengths = {name: record["accepted_length"] for name, record in records.items()}
        found["accepted_length"] = lambda axes: _bars(axes, lengths)
    survivals = {name: record["survival_by_position"] for name, record in records.items() if "thresholds" in record}
    if survivals:
        found["survival"] = lambda axes: _acceptance(axes, survivals, "accepted with all before it")
    cuts = {name: record["thresholds"] for name, record in records.items() if record.get("thresholds")}
    if cuts:
        found["thresholds"] = lambda axes: _cuts(axes, cuts)
    return found


def _bars(axes: Any, lengths: Mapping[str, float]) -> None:
    """One bar a set of prompts and temperature."""
    places = list(range(len(lengths)))[::-1]
    axes.barh(places, list(lengths.values()), color=LINES[0]["color"], alpha=0.75, edgecolor="black")
    for place, length in zip(places, lengths.values(), strict=True):
        axes.annotate(f"{length:.2f}", (length, place), textcoords="offset points", xytext=(4, -4), fontsize=10)
    axes.set_yticks(places, list(lengths))
    axes.set(xlabel="accepted length", xlim=(1, max([*lengths.values(), 1.1]) * 1.1))


def _cuts(axes: Any, cuts: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Of the tokens that a threshold would send, the share that passes; numbers say the accepted length."""
    for name, style in _styled(list(cuts)):
        points = [(cut["threshold"], cut["accepted_share"]) for cut in cuts[name] if cut["verify_length"]]
        axes.plot(*zip(*points, strict=True), label=name, **style)
        for cut in (cuts[name][0], cuts[name][-1]):
            place = (cut["threshold"], cut["accepted_share"])
            axes.annotate(
                f"{cut['accepted_length']:.1f}", place, textcoords="offset points", xytext=(4, 5), fontsize=9
            )
    axes.set(xlabel="confidence threshold (numbers: accepted length)", ylabel="share of sent tokens accepted")
    axes.set(ylim=(0, 1.05))
    axes.legend()


def _losses(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    for (name, label), style in zip(
        {
            "loss": "loss",
            "total": "loss",
            "cross_entropy": "cross-entropy",
            "l1": "l1",
            "confidence": "confidence",
        }.items(),
        itertools.cycle(LINES),
        strict=False,
    ):
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **{**style, "marker": ""})
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    names = ("eval_accepted_length", "held_out_accepted_length")
    points = [(record["step"], record[name]) for record in records for name in names if record.get(name)]
    if points:
        lengths = axes.twinx()
        lengths.plot(*zip(*points, strict=True), "ko--", label="accepted length, held out")
        lengths.set(ylabel="accepted length", ylim=(1, None))
        lengths.grid(visible=False)
    axes.figure.legend(loc="outside upper center", ncols=2)


def _reliability(axes: Any, positions: Sequence[Mapping[str, Any]]) -> None:
    """All positions together: the mean prediction of each bin against the share that survived."""
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, label="ideal")
    for name, style in _styled(["before", "after"]):
        bins: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for line in positions:
            for index, (count, predicted, survived) in enumerate(line[f"reliability_{name}"]):
                for k, value in enumerate((count, count * predicted, count * survived)):
                    bins[index][k] += value
        points = [(p / n, s / n) for _, (n, p, s) in sorted(bins.items()) if n]
        axes.plot(*zip(*points, strict=True), label=f"{name} calibration", **style)
    axes.set(xlabel="predicted survival", ylabel="share that survived", xlim=(0, 1), ylim=(0, 1))
    axes.legend()


def _acceptance(
    axes: Any, shares: Mapping[str, Sequence[float | None]], label: str = "conditional acceptance"
) -> None:
    for name, style in _styled(list(shares)):
        points = [(k, share) for k, share in enumerate(shares[name], start=1) if share is not None]
        axes.plot(*(zip(*points, strict=True) if points else ([], [])), label=name, **style)
    axes.set(xlabel="position in the block", ylabel=label, ylim=(0, 1))
    axes.legend()


def _block_sizes(axes: Any, arms: Sequence[Mapping[str, Any]]) -> None:
    """Accepted length by drafted tokens, a line for each kind of drafter (`NAME-TOKENS`) and temperature."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for arm in arms:
        kind, _, size = arm["name"].partition("-")
        if size == str(arm["block_size"]):
            for result in arm["results"]:
                name = f"{kind}, T={result['temperature']:g}"
                lines[name].append((arm["block_size"], result["accepted_length"]))
    for name, style in _styled(list(lines)):
        axes.plot(*zip(*sorted(lines[name]), strict=True), label=name, **style)
    axes.set(xlabel="drafted tokens", ylabel="accepted length", ylim=(1, axes.get_ylim()[1] + 0.05))
    axes.legend()


def _verify_lengths(axes: Any, counts: Mapping[str, Sequence[int]]) -> None:
    width = 0.8 / len(counts)
    for k, (name, numbers) in enumerate(counts.items()):
        places = [length + (k - (len(counts) - 1) / 2) * width for length in range(len(numbers))]
        total = max(1, sum(numbers))
        style = {"color": LINES[k % len(LINES)]["color"], "alpha": 0.75, "edgecolor": "black"}
        axes.bar(places, [n / total for n in numbers], width, label=name, hatch=HATCHES[k % len(HATCHES)], **style)
    axes.set(xlabel="verify length", ylabel="share of rows and rounds")
    axes.legend()


def _throughput(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """One line a workload and side; its points are row counts, the most rows on the left."""
    lines: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for run in runs:
        sides = {"plain": run["plain_tokens_per_second"]}
        sides |= {mode: figures["tokens_per_second"] for mode, figures in run["modes"].items()}
        for side, speed in sides.items():
            lines[f"{run['prompts']}, {side}"].append((speed / run["rows"], speed, run["rows"]))
    for name, style in _styled(list(lines)):
        points = sorted(lines[name])
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], label=name, **style)
        for x, y, rows in points:
            axes.annotate(str(rows), (x, y), textcoords="offset points", xytext=(5, 5), fontsize=9)
    axes.set(xlabel="tokens/s of a row (numbers: rows)", ylabel="tokens/s of all rows", xlim=(0, None), ylim=(0, None))
    axes.margins(0.12)
    axes.legend()


def _step_costs(axes: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    context = min(step["context"] for step in steps)
    lines: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for step in steps:
        if step["context"] == context:
            lines[step["rows"]].append((step["tokens"], 1e3 * step["seconds"]))
    for rows, style in zip(sorted(lines), itertools.cycle(LINES), strict=False):
        axes.plot(*zip(*sorted(lines[rows]), strict=True), label=_rows(rows), **style)
    axes.set(xlabel=f"tokens in the step (context {context})", ylabel="milliseconds", ylim=(0, None))
    axes.legend()


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _budget(axes: Any, rounds: Sequence[Mapping[str, Any]]) -> None:
    points = [(len(line["rows"]), sum(line["admitted"])) for line in rounds]
    axes.scatter(*zip(*points, strict=True), s=14, alpha=0.35, color=LINES[0]["color"], label="round")
    by_rows: dict[int, list[int]] = defaultdict(list)
    for rows, budget in points:
        by_rows[rows].append(budget)
    means = [(rows, sum(found) / len(found)) for rows, found in sorted(by_rows.items())]
    axes.plot(*zip(*means, strict=True), label="mean", **LINES[1])
    axes.set(xlabel="rows in the round", ylabel="budget, drafted tokens", xlim=(0, None), ylim=(0, None))
    axes.legend()


def _step_time(axes: Any, rounds: Sequence[Mapping[str, Any]]) -> None:
    parts = (("target's step", "verify_seconds"), ("draft", "draft_seconds"))
    highest = 0.0
    for (label, name), style in zip(parts, LINES, strict=False):
        points = [
            (1e3 * line[f"predicted_{name}"], 1e3 * line[name]) for line in rounds if line.get(f"predicted_{name}")
        ]
        if points:
            axes.scatter(
                *zip(*points, strict=True), s=18, alpha=0.6, label=label, color=style["color"], marker=style["marker"]
            )
            highest = max(highest, *itertools.chain(*points))
    axes.plot([0, highest], [0, highest], color="black", linewidth=1, label="ideal")
    axes.set(xlabel="predicted, milliseconds", ylabel="measured, milliseconds", xlim=(0, None), ylim=(0, None))
    axes.legend()


__all__ = ["draw", "loss_curve", "name_of", "pictures_of", "read_result"]
