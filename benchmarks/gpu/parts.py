"""The parts of the benchmark: what each measures, as tasks in the order of their worth."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from transformers_dspark import StepCostTable

from .bench import Bench
from .divergence import divergence
from .idle import idle_of
from .pair import pair
from .peers import PEERS, STEPS
from .report import Line, Task
from .rounds import Rounds, prompts
from .shapes import LONGEST_BLOCK, Models, build_drafter, draft_bytes, step_bytes


def first_call(bench: Bench) -> Iterator[Task]:
    """Seconds of the first call of the process, in which models are compiled and graphs captured, beyond a later."""

    def measure() -> Line:
        batch, seconds = bench.batch(1, bench.settings.context), []
        for _ in range(3):
            began = time.perf_counter()
            batch.run("math", bench.settings.engine)
            bench.wait()
            seconds.append(time.perf_counter() - began)
        return {"startup_seconds": seconds[0] - seconds[-1], "first_seconds": seconds[0], "later_seconds": seconds[-1]}

    yield {"engine": bench.settings.engine}, measure


def verify(bench: Bench) -> Iterator[Task]:
    """The target's step in whole rounds, by how it is run, against the bytes that it must read."""
    context = bench.settings.context
    # an engine that changes, and rows that become more, make the loop capture anew
    for engine in bench.settings.engines:
        for rows in reversed(bench.settings.some_rows(1, 32, 128)):

            def measure(rows: int = rows, engine: str = engine) -> Line:
                found = bench.drafting(rows, context, bench.models.block, engine)
                floor = step_bytes(bench.models, rows, found.mean_context) / bench.bandwidth
                tokens = rows * (1 + bench.models.block)
                return {"tokens": tokens, "floor_seconds": floor, **_over(found.step_seconds, floor), **_dict(found)}

            yield {"rows": rows, "context": context, "engine": engine}, measure


def one_round(bench: Bench) -> Iterator[Task]:
    """A whole round of one row against the bytes that it must read."""
    context, models = bench.settings.context, bench.models

    def measure() -> Line:
        found = bench.drafting(1, context, models.block)
        moved = step_bytes(models, 1, found.mean_context) + draft_bytes(models, 1, found.mean_context)
        floor = moved / bench.bandwidth
        return {"floor_seconds": floor, **_over(found.seconds, floor), **_dict(found)}

    yield {"rows": 1, "context": context, "engine": bench.settings.engine}, measure


def throughput(bench: Bench) -> Iterator[Task]:
    """
    Tokens per second of the loop by mode, rows and profile. A device slows down as it warms up, so what is compared is
    measured one after the other, and every other time in the opposite order.
    """
    settings = bench.settings
    for context in settings.contexts:
        for rows in settings.rows:
            about = {"rows": rows, "context": context}
            if reason := bench.lacking(rows, context):
                yield about, partial(dict, skipped=reason)
                continue
            for profile in settings.profiles:
                yield {**about, "mode": "no drafter", "profile": profile}, partial(_undrafted, bench, rows, context)
            for number, profile in enumerate(settings.profiles):
                for mode in settings.modes[:: 1 if number % 2 == 0 else -1]:
                    task = partial(_drafted, bench, rows, context, mode, profile)
                    if mode == "cap-accept" and (reason := bench.lacking(rows, context, caches=2)):
                        task = partial(dict, skipped=reason)
                    yield {**about, "mode": mode, "profile": profile}, task


def _undrafted(bench: Bench, rows: int, context: int) -> Line:
    """Measured once, since profiles differ in what is accepted only; after the table that schedules read."""
    bench.costs([rows], [context])
    return {"from_one_run": True, **_dict(bench.unscheduled(rows, context, "math", 0))}


def _drafted(bench: Bench, rows: int, context: int, mode: str, profile: str) -> Line:
    if mode == "static":
        return _dict(bench.unscheduled(rows, context, profile, bench.models.block))
    return _dict(bench.scheduled(rows, context, profile, mode))


def peers(bench: Bench) -> Iterator[Task]:
    """What Transformers does by itself."""
    context, most = bench.settings.context, max(bench.settings.peer_rows)
    for name, measure in PEERS.items():
        if name == "generate_batch" and bench.settings.device.type != "cuda":
            continue  # it fills a CPU's memory, for minutes
        counts = {"native DFlash": (1,), "generate_batch": (most,)}.get(name, bench.settings.peer_rows)
        for rows in counts:

            def task(measure: Callable[..., Line] = measure, rows: int = rows, steps: int = STEPS[name]) -> Line:
                return measure(bench.models, prompts(bench.models, rows, context), steps)

            yield {"peer": name, "rows": rows, "context": context}, task


def draft_length(bench: Bench) -> Iterator[Task]:
    """What longer blocks add to a round, from one drafter that is shortened."""
    (rows, *_), context = bench.settings.some_rows(128), bench.settings.context
    shape, target = bench.settings.shape, bench.models.target
    longest = Models(shape, target, build_drafter(shape, target, LONGEST_BLOCK))
    for block in (4, 8, LONGEST_BLOCK):

        def measure(block: int = block) -> Line:
            shorter = longest.shortened(block)
            found = _dict(bench.batch(rows, context, shorter).run("math", bench.settings.engine))
            shorter.drafter.captured = None
            return found

        yield {"rows": rows, "context": context, "block": block}, measure


def host_gap(bench: Bench) -> Iterator[Task]:
    """Share of a round in which the GPU does nothing."""
    if bench.settings.device.type != "cuda":
        yield {}, partial(dict, skipped="needs CUDA")
        return
    for rows in bench.settings.some_rows(1, 64):

        def measure(rows: int = rows) -> Line:
            run = partial(bench.batch(rows, bench.settings.context).run, "math", bench.settings.engine)
            run()  # captures, unless an earlier part did
            return idle_of(run)

        yield {"rows": rows, "context": bench.settings.context}, measure


def costs(bench: Bench) -> Iterator[Task]:
    """Seconds of steps as tables predict them, against rounds that the tables were not made of."""
    context = bench.settings.context
    rows = bench.settings.some_rows(1, 32, 128)
    held_out = [drafts for drafts in (2, 5) if drafts < bench.models.block]

    def compared(table: StepCostTable, seconds: Callable[[Rounds], float], engine: str) -> Line:
        errors = []
        for count in rows:
            for drafts in held_out:
                found = bench.drafting(count, context, drafts, engine)
                predicted = table.predict(count, count * (1 + drafts), found.mean_context)
                errors.append(abs(predicted - seconds(found)) / seconds(found))
        return {"engine": engine, "median_error": statistics.median(errors), "errors": errors}

    def of_rounds() -> Line:
        """What is not drafting counts as the step, in the table as in what it is held against."""
        table = bench.costs(rows, [context])
        return compared(table, lambda found: found.seconds - (found.draft_seconds or 0.0), bench.settings.engine)

    def profiled() -> Line:
        """Steps alone, in graphs on a GPU but not compiled; so are those that they are held against."""
        grid = {"rows": rows, "tokens_per_row": (1, 2, 4, 8), "context": [context]}
        table = StepCostTable.profile(bench.models.target, **grid, samples=5)
        engine = "graph" if bench.settings.device.type == "cuda" else "eager"
        return compared(table, lambda found: found.step_seconds or math.nan, engine)

    for name, measure in {"of whole rounds": of_rounds, "StepCostTable.profile": profiled}.items():
        yield {"table": name, "rows": rows, "context": context}, measure


def startup(bench: Bench) -> Iterator[Task]:
    """
    The first call of a fresh process, with what earlier processes left on the disk: whatever they were, and then with
    what a process like it has left.
    """

    def measure() -> Line:
        bench.release()
        with tempfile.TemporaryDirectory() as folder:
            path, left = Path(folder) / "result.json", min(400.0, bench.deadline - time.monotonic())
            words = ["--parts", "first-call", "--shape", bench.settings.shape, "--engine", bench.settings.engine]
            words += ["--context", str(bench.settings.context), "--json", str(path), "--rows", "1"]
            words += ["--device", bench.settings.device.type, "--minutes", str(left / 60)]
            command = [sys.executable, "-m", "benchmarks.gpu", *words]
            began = time.perf_counter()
            try:
                subprocess.run(
                    command, check=True, cwd=Path(__file__).parents[2], timeout=left, stdout=subprocess.DEVNULL
                )
            except subprocess.TimeoutExpired:
                return {"skipped": f"the process took longer than {left:.0f} s"}
            seconds = time.perf_counter() - began
            line = json.loads(path.read_text(encoding="utf-8"))["parts"]["first-call"][0]
            return {**line, "process_seconds": seconds}

    for process in (1, 2):
        yield {"process": process}, measure


def _over(seconds: float | None, floor: float) -> Line:
    return {} if seconds is None else {"over_floor": seconds / floor}


def _dict(found: Rounds) -> Line:
    return {**found.to_dict(), "simulated_acceptance": True}


# Name: the part, and its seconds on an H200 with the shape of Qwen3-8B, the first compilation aside, as estimated.
PARTS: dict[str, tuple[Callable[[Bench], Iterator[Task]], int]] = {
    "first-call": (first_call, 10),
    "verify": (verify, 60),
    "round": (one_round, 5),
    "throughput": (throughput, 300),
    "peers": (peers, 240),
    "host-gap": (host_gap, 30),
    "draft-length": (draft_length, 20),
    "costs": (costs, 60),
    "pair": (pair, 90),
    "divergence": (divergence, 60),
    "startup": (startup, 120),
}
