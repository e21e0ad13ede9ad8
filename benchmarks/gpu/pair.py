"""The real pair, with the acceptance that it has: whole calls, prefill included, as a user makes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from transformers_dspark.evaluation.prompts import DEMO_PROMPTS, read_conversations
from transformers_dspark.evaluation.real_pair import find_drafter
from transformers_dspark.evaluation.runs import Pair

from .bench import Bench
from .profiles import JUDGED
from .report import Line, Task
from .rounds import ENGINES


ALONE = 6  # prompts that are answered one by one, to stand for one row


def pair(bench: Bench) -> Iterator[Task]:
    """The pair's own acceptance, against `generate` with a static cache that Transformers compiles."""
    settings = bench.settings
    if settings.pair_target is None:
        yield {}, lambda: {"skipped": "no --pair-target"}
        return
    dtype = torch.bfloat16 if settings.device.type == "cuda" else torch.float32
    loaded = Pair.load(str(settings.pair_target), find_drafter(settings.pair_drafter), settings.device, dtype)
    for rows in settings.some_rows(1, 64):
        texts = _texts(bench, max(rows, ALONE) if rows == 1 else rows)
        # padded to one length, so that a static cache is compiled once
        inputs = loaded.batch(texts)
        batches = [{name: part[i : i + rows] for name, part in inputs.items()} for i in range(0, len(texts), rows)]

        def measure(batches: list[Line] = batches) -> Line:
            with bench.forced.paused():
                return _compared(bench, loaded, batches)

        prompts = settings.pair_prompts.name if settings.pair_prompts else "those of the demonstration"
        yield {"rows": rows, "calls": len(batches), "prompts": prompts, "new_tokens": settings.pair_tokens}, measure


def _texts(bench: Bench, count: int) -> list[str]:
    path = bench.settings.pair_prompts
    texts = list(DEMO_PROMPTS.values()) if path is None else [turns[0] for turns in read_conversations(path)]
    return list(itertools.islice(itertools.cycle(texts), count))


def _compared(bench: Bench, loaded: Pair, batches: list[Line]) -> Line:
    tokens, engine = bench.settings.pair_tokens, ENGINES[bench.settings.engine]
    ours, alone = loaded.config(tokens, dspark_loop="batched", **engine), loaded.config(tokens)
    alone.cache_implementation = "static"
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
        "median_round_seconds": float(np.median(rounds)),
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
