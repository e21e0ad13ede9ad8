"""Two pictures of a result: throughput against the speed that a user sees, and drafts verified against rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers_dspark.evaluation.plots import LINES, STYLE

from .summary import COMPILED


MODES = ("no drafter", "static", "compact", "cap-accept", "generate, compiled")


def draw(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """
    Writes both pictures as PNG and SVG, as far as the result has figures for them.

    Args:
        result (`Mapping`): What the benchmark wrote.
        folder (`Path`), stem (`str`): Where, and the first part of their names.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: it has no figures of throughput.
    """
    lines = [line for line in result["parts"].get("throughput", []) if "tokens_per_second" in line]
    if not lines:
        raise ValueError(f"{stem} has no figures of throughput: run the part `throughput`.")
    context = min(line["context"] for line in lines)
    lines = [line for line in lines if line["context"] == context]
    profiles = list(dict.fromkeys(line["profile"] for line in lines))
    peers = [
        line for line in result["parts"].get("peers", []) if line.get("peer") == COMPILED and "step_seconds" in line
    ]
    lines += [{**line, "mode": MODES[-1], "profile": None} for line in peers if line["context"] == context]
    written = []
    for name, fill, count in (("throughput", _throughput, len(profiles)), ("budget", _budget, 1)):
        with _styled() as figure:
            figure.set_size_inches(5, 0.6 + 3.0 * count)
            fill(figure.subplots(count, 1, squeeze=False)[:, 0], lines, profiles)
            figure.suptitle(f"{result['settings']['shape']}, context {context}, simulated acceptance", fontsize=11)
            for ending in ("png", "svg"):
                path = folder / f"{stem}-{name}.{ending}"
                figure.savefig(path, dpi=160, metadata={"png": {"Software": None}, "svg": {"Date": None}}[ending])
                written.append(path)
    return written


def _throughput(panels: Sequence[Any], lines: Sequence[Mapping[str, Any]], profiles: Sequence[str]) -> None:
    """A panel a profile; a line a mode, whose points are row counts."""
    from matplotlib.ticker import LogFormatter

    for axes, profile in zip(panels, profiles, strict=True):
        for mode, style in zip(MODES, LINES, strict=False):
            points = sorted(
                (line["rows"], line["tokens_per_second"] / line["rows"], line["tokens_per_second"])
                for line in lines
                if line["mode"] == mode and line["profile"] in (profile, None)
            )
            if not points:
                continue
            axes.plot([x for _, x, _ in points], [y for _, _, y in points], label=mode, **style)
            for rows, x, y in points:
                axes.annotate(str(rows), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
        axes.set(title=profile, ylabel="tokens/s of all rows", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):  # numbers, not powers
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
        axes.margins(0.1)
    panels[0].legend()
    panels[-1].set_xlabel("tokens/s of a row (numbers: rows)")


def _budget(panels: Sequence[Any], lines: Sequence[Mapping[str, Any]], profiles: Sequence[str]) -> None:
    """Drafts of a row that the schedule lets through, by rows."""
    (axes,) = panels
    for profile, style in zip(profiles, LINES, strict=False):
        points = sorted(
            (line["rows"], line["sent"]) for line in lines if (line["mode"], line["profile"]) == ("compact", profile)
        )
        if points:
            axes.plot(*zip(*points, strict=True), label=profile, **style)
    axes.set_xscale("log", base=2)
    rows = sorted({line["rows"] for line in lines})
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.set(xlabel="rows", ylabel="verified drafts of a row, compact", ylim=(0, None))
    if axes.lines:
        axes.legend()


@contextmanager
def _styled() -> Iterator[Any]:
    """An empty figure in the house's style."""
    try:
        import matplotlib
        from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    except ImportError:
        raise ImportError("Pictures need matplotlib: pip install 'transformers-dspark[train]'") from None
    with matplotlib.rc_context(STYLE):
        yield Figure(layout="constrained")
