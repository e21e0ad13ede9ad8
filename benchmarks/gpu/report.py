"""The result file, written after every line, and what is printed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from transformers_dspark.cli import write_json


Line = dict[str, Any]
# What a part yields: what the line is about, and how it is measured. One measurement can give several lines.
Task = tuple[Line, Callable[[], Line | list[Line]]]
NOTHING = {"failed", "skipped"}  # in the place of figures, why there are none
UNSAID = {"rounds", "simulated_acceptance", "from_one_run", "mean_context"}


class Report:
    """
    Lines of figures by part.

    Args:
        path (`Path`, *optional*): Where they are written, after every line.
        header (`Mapping`): What stands before them.
        deadline (`float`): By the monotonic clock. Nothing is begun behind it, nor a task for which less time is left
            than the one before it in its part took.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any], deadline: float) -> None:
        self.result: dict[str, Any] = {"seconds": {}, "parts": {}, **header}
        self._path, self._deadline = path, deadline

    def measure(self, part: str, tasks: Iterable[Task], recover: Callable[[], None]) -> None:
        """Runs a part's tasks. One that fails leaves a line that says why, and the others their turn."""
        began, took = time.monotonic(), 0.0
        for about, task in self._surviving(part, tasks):
            start = time.monotonic()
            if start + took > self._deadline:
                self._put(part, about, {"skipped": "the time was up"})
                continue
            try:
                found = task()
            except Exception as error:  # whatever it is, the rest is worth having
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"[:500]}
            took = time.monotonic() - start
            if "failed" in found:
                recover()  # only now, when no frame of the failure holds memory any more
            self._put(part, about, found)
        self.result["seconds"][part] = time.monotonic() - began
        write_json(self._path, self.result)

    def _put(self, part: str, about: Line, found: Line | list[Line]) -> None:
        """
        Keeps what a task found in the place of what an earlier command did, unless it is nothing but the reason why
        there is nothing.
        """
        lines = self.result["parts"].setdefault(part, [])
        made = [{**about, **line} for line in (found if isinstance(found, list) else [found])]
        same = [about.items() <= line.items() for line in lines]
        if any(same) and any(NOTHING & line.keys() for line in made):
            print(f"{part}: {found} ({about}); the file keeps what it held", flush=True)
            return
        lines[:] = [
            line
            for line, old in zip(lines, same, strict=True)
            if not old and not any(_outdated(line, by) for by in made)
        ]
        for line in made:
            self.add(part, line)

    def add(self, part: str, line: Line) -> None:
        """Keeps a line, writes the file and says it."""
        self.result["parts"].setdefault(part, []).append(line)
        write_json(self._path, self.result)
        shown = {name: value for name, value in line.items() if name not in UNSAID and not isinstance(value, list)}
        words = " ".join(f"{name}={_short(value)}" for name, value in shown.items())
        print(f"{part}: {words}", flush=True)

    def _surviving(self, part: str, tasks: Iterable[Task]) -> Iterator[Task]:
        """The tasks, up to a failure of the part itself."""
        try:
            yield from tasks
        except Exception as error:
            traceback.print_exc()
            self.add(part, {"failed": f"{type(error).__name__}: {error}"[:500]})


def _outdated(line: Line, by: Line) -> bool:
    """Whether a line says why there was nothing of what there is now."""
    said = {name: value for name, value in line.items() if name not in NOTHING}
    return len(said) < len(line) and said.items() <= by.items()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_summary(rows: Sequence[tuple[str, str, str]]) -> None:
    """The table at the end: what, measured, and beside what."""
    table = Table("what", "measured", "beside")
    for row in rows:
        table.add_row(*row)
    Console(width=118).print(table)
