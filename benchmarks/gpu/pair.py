"""The real pair, with the acceptance that it has: whole calls, prefill included, as a user makes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from transformers import GenerationConfig

from transformers_dspark.evaluation.prompts import DEMO_PROMPTS, read_conversations
from transformers_dspark.evaluation.runs import Pair

from .bench import Bench, Settings
from .profiles import JUDGED
from .report import Line, Task
from .rounds import ENGINES


ALONE = 6  # prompts that are answered one by one, to stand for one row
NO_PAIR = {"skipped": "no --pair-target"}


def pair(bench: Bench) -> Iterator[Task]:
    """The pair's own acceptance, against `generate` with a static cache that Transformers compiles."""
    settings, loaded = bench.settings, bench.pair
    if loaded is None:
        yield {}, lambda: NO_PAIR
        return
    for rows in settings.some_rows(1, 64):
        count = max(rows, ALONE) if rows == 1 else rows
        batches = batches_of(loaded, list(itertools.islice(itertools.cycle(first_turns(settings)), count)), rows)

        def measure(batches: list[Line] = batches) -> Line:
            with bench.forced.paused():
                return _compared(bench, loaded, batches)

        prompts = settings.pair_prompts.name if settings.pair_prompts else "those of the demonstration"
        yield {"rows": rows, "calls": len(batches), "prompts": prompts, "new_tokens": settings.pair_tokens}, measure


def first_turns(settings: Settings) -> list[str]:
    """The prompts that the command names."""
    path = settings.pair_prompts
    return list(DEMO_PROMPTS.values()) if path is None else [turns[0] for turns in read_conversations(path)]


def batches_of(loaded: Pair, texts: Sequence[str], rows: int) -> list[Line]:
    """Inputs of `rows` prompts each, all padded to one length, so that a static cache is compiled once."""
    inputs = loaded.batch(texts)
    return [{name: part[i : i + rows] for name, part in inputs.items()} for i in range(0, len(texts), rows)]


def greedy_configs(bench: Bench, loaded: Pair) -> tuple[GenerationConfig, GenerationConfig]:
    """Options of the loop with the command's engine, and of `generate` with a static cache."""
    tokens, engine = bench.settings.pair_tokens, ENGINES[bench.settings.engine]
    alone = loaded.config(tokens)
    alone.cache_implementation = "static"
    return loaded.config(tokens, dspark_loop="batched", **engine), alone


def _compared(bench: Bench, loaded: Pair, batches: list[Line]) -> Line:
    ours, alone = greedy_configs(bench, loaded)
    rounds, accepted, sent = [], [], []

    def drafted(inputs: Any) -> Any:
        bench.clock.restart()
        output = loaded.target.generate(**inputs, assistant_model=loaded.drafter, generation_config=ours)
        stats, stamps = bench.clock.stats, bench.clock.seconds()
        accepted.extend(itertools.chain(*stats.accepted_lengths))
        sent.extend(itertools.chain(*stats.verify_lengths))
        rounds.extend(np.diff(stamps[-stats.rounds :, JUDGED]))
        return output

    def plain(inputs: Any) -> Any:
        return loaded.target.generate(**inputs, generation_config=alone)

    drafted_seconds, drafted_ids = _timed(bench, loaded, batches, drafted)
    plain_seconds, plain_ids = _timed(bench, loaded, batches, plain)
    same = [one == other for one, other in zip(drafted_ids, plain_ids, strict=True)]
    rates = sum(map(len, drafted_ids)) / drafted_seconds, sum(map(len, plain_ids)) / plain_seconds
    return {
        "tokens_per_second": rates[0],
        "static_compiled_tokens_per_second": rates[1],
        "speed_up": rates[0] / rates[1],
        "accepted_length": float(np.mean(accepted)),
        "sent": float(np.mean(sent)),
        "median_round_seconds": float(np.median(rounds)) if rounds else None,
        "same_texts": sum(same) / len(same),
        "simulated_acceptance": False,
    }


def _timed(
    bench: Bench, loaded: Pair, batches: list[Line], call: Callable[[Any], Any]
) -> tuple[float, list[list[int]]]:
    """Seconds of all calls, and the new tokens of all rows; one call before them compiles and captures."""
    call(batches[0])
    seconds, found = 0.0, []
    for inputs in batches:
        bench.wait()
        began = time.perf_counter()
        output = call(inputs)
        bench.wait()
        seconds += time.perf_counter() - began
        found += loaded.new_ids(output.sequences, inputs["input_ids"].shape[1])
    return seconds, found
