"""What the parts share: models, batches and measured rounds, each made once and used by all that ask for it."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from transformers_dspark import StepCostTable
from transformers_dspark.evaluation.real_pair import find_drafter
from transformers_dspark.evaluation.runs import Pair
from transformers_dspark.step_costs import DraftCost, StepCost

from .profiles import ForcedAcceptance, RoundClock
from .rounds import Batch, Rounds, room_for
from .shapes import LONGEST_BLOCK, Models, build, memory_bytes
from .survey import Survey


COSTED_DRAFTS = (0, 1, 3, 7)  # drafts of a row in the eager rounds that a table of step costs is made of
# A table by which drafting never pays: the loop, captured or not, then runs rounds of anchors alone.
NEVER = StepCostTable((StepCost(1, 1, 0, 1e-3), StepCost(1, 2, 0, 1e-3)), (DraftCost(1, 1e9),))
NO_DRAFTS = {"verify_mode": "compact", "step_cost_table": NEVER}


def _sending(drafts: int) -> dict[str, Any]:
    """Options of the loop for rounds in which every row sends this many drafts."""
    return {"max_verify_tokens": drafts} if drafts else NO_DRAFTS


@dataclass(frozen=True)
class Settings:
    """What the command line asked for; see its help."""

    shape: str
    device: torch.device
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    profiles: tuple[str, ...]
    modes: tuple[str, ...]
    peer_rows: tuple[int, ...]
    rounds: int
    engine: str
    engines: tuple[str, ...]
    pair_target: Path | None
    pair_drafter: str | None
    pair_prompts: Path | None
    pair_tokens: int

    @property
    def context(self) -> int:
        """Of the parts that measure at one."""
        return self.contexts[0]

    def some_rows(self, *wanted: int) -> list[int]:
        """Of the row counts that a part is about, those asked for; the largest one asked for if there is none."""
        return [rows for rows in wanted if rows in self.rows] or [max(self.rows)]


class Bench:
    """
    The state of one command; a context manager.

    Args:
        settings (`Settings`): Of the command.
        deadline (`float`): By the monotonic clock; what is begun must end by then.
    """

    def __init__(self, settings: Settings, deadline: float = math.inf) -> None:
        self.settings, self.deadline = settings, deadline
        self.clock = RoundClock(settings.device)
        self.forced = ForcedAcceptance(self.clock, max(settings.rows), LONGEST_BLOCK)
        self._measured: dict[Any, Any] = {}

    def __enter__(self) -> Bench:
        self.forced.__enter__()
        self.clock.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.clock.__exit__(*error)
        self.forced.__exit__(*error)

    @cached_property
    def models(self) -> Models:
        device = self.settings.device
        return build(self.settings.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    @cached_property
    def pair(self) -> Pair | None:
        """The real pair, if the command names one."""
        settings = self.settings
        if settings.pair_target is None:
            return None
        return Pair.load(str(settings.pair_target), find_drafter(settings.pair_drafter), settings.device)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a large copy on the device."""
        cuda = self.settings.device.type == "cuda"
        source = torch.empty(2**32 if cuda else 2**26, dtype=torch.uint8, device=self.settings.device)
        copy, seconds = torch.empty_like(source), []
        for _ in range(12):
            self.wait()
            began = time.perf_counter()
            copy.copy_(source)
            self.wait()
            seconds.append(time.perf_counter() - began)
        size = len(source)
        del source, copy
        if cuda:
            torch.cuda.empty_cache()
        return 2 * size / statistics.median(seconds[2:])

    def wait(self) -> None:
        """Until the device has done all that it was asked."""
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize(self.settings.device)

    def batch(self, rows: int, context: int, models: Models | None = None) -> Batch:
        """Prompts for the models, by default for the pair with blocks of 7."""
        return Batch(models or self.models, rows, context, self.settings.rounds, self.clock, self.forced)

    def release(self) -> None:
        """Gives what the batched loop keeps between calls back to the device."""
        made = vars(self)  # nothing is built for this
        for pair in (made.get("models"), made.get("pair")):
            if pair is not None:
                pair.drafter.captured = None
        self._collect()

    def make_room(self) -> None:
        """The same before a part that may need memory of its own, where little is left."""
        self._collect()
        if self.settings.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.settings.device)
            if free < total / 2:
                self.release()

    def _collect(self) -> None:
        gc.collect()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()

    def lacking(self, rows: int, context: int, caches: int = 1) -> str | None:
        """
        Why a batch does not fit the device, if it does not. Eager rounds have caches of their own, beside those that
        the captured ones keep.
        """
        if self.settings.device.type != "cuda":
            return None
        block = self.models.block
        needed = caches * memory_bytes(self.models, rows, context + room_for(block, self.settings.rounds) + block)
        _, total = torch.cuda.mem_get_info(self.settings.device)
        room = total - sum(t.numel() * t.dtype.itemsize for t in self._weights()) - 6 * 2**30
        if needed <= room:
            return None
        return f"needs about {needed / 2**30:.0f} GiB beside the weights, {room / 2**30:.0f} are there"

    def rounds(self, rows: int, context: int, profile: str, engine: str, name: str, **options: Any) -> Rounds:
        """Rounds of the loop at the wanted acceptance; measured once under a name."""
        key = rows, context, profile, engine, name
        if key not in self._measured:
            self._measured[key] = self.batch(rows, context).run(profile, engine, **options)
        return self._measured[key]

    def drafting(self, rows: int, context: int, drafts: int, engine: str | None = None) -> Rounds:
        """Rounds in which every row sends this many drafts. Their time does not depend on acceptance."""
        engine = engine or self.settings.engine
        return self.rounds(rows, context, "math", engine, f"{drafts} drafts", **_sending(drafts))

    def unscheduled(self, rows: int, context: int, profile: str, drafts: int) -> Rounds:
        """The same over texts of the lengths that schedules are measured over."""
        name = f"{drafts} drafts, same texts"
        return self.rounds(rows, context, profile, self.settings.engine, name, same_texts=True, **_sending(drafts))

    def scheduled(self, rows: int, context: int, profile: str, mode: str) -> Rounds:
        """Rounds whose windows follow a table of step costs, once the graphs that it asks for are there."""
        table = self.costs([rows], [context])
        options: dict[str, Any] = {"verify_mode": mode, "step_cost_table": table}
        if mode == "compact":
            return self.rounds(rows, context, profile, self.settings.engine, mode, same_texts=True, **options)
        return self.rounds(rows, context, profile, "eager", mode, **options)  # cap-accept is never captured

    def costs(self, rows: Iterable[int], contexts: Iterable[int]) -> StepCostTable:
        """
        A table of step costs from whole rounds of the loop: what is not drafting counts as the target's step, so that
        draft and step together are the round. Captured rounds are played in every size there is.
        """
        rows, steps, drafts = list(rows), [], {}
        for context in contexts:
            found = {(count, total): cost for count in rows for total, *cost in self._round_costs(count, context)}
            # texts grow faster the more is accepted; all these steps are told to be at the context between
            middle = round(statistics.mean(before for before, _ in found.values()))
            for count in rows:
                seconds = self.drafting(count, context, self.models.block).draft_seconds or 0.0
                drafts[count] = DraftCost(count, seconds)
            for (count, total), (_, seconds) in found.items():
                drafting = drafts[count].seconds if total > count else 0.0
                steps.append(StepCost(count, total, middle, max(seconds - drafting, 1e-6)))  # chance, on a busy CPU
        return StepCostTable(tuple(steps), tuple(cost for cost in drafts.values() if cost.seconds))

    def _round_costs(self, rows: int, context: int) -> list[tuple[int, float, float]]:
        """Total, context and seconds of whole rounds; measured once."""
        key = rows, context, "costs"
        if key in self._measured:
            return self._measured[key]
        if self.settings.engine == "eager":
            sent = [drafts for drafts in COSTED_DRAFTS if drafts <= self.models.block]
            costed = [(drafts, self.drafting(rows, context, drafts)) for drafts in sent]
            found = [(rows * (1 + drafts), one.mean_context, one.seconds) for drafts, one in costed]
        else:
            survey = Survey(rows, self.models.block)
            counted = max(self.settings.rounds, survey.rounds // 5)  # then there is room for as many tokens
            batch = Batch(self.models, rows, context, counted, self.clock, self.forced)
            options = {"verify_mode": "compact", "step_cost_table": survey}
            batch.run("chat", self.settings.engine, first=max(1, survey.rounds - counted), **options)
            found = list(survey.costs())
        self._measured[key] = found
        return found

    def _weights(self) -> Iterable[torch.Tensor]:
        return (*self.models.target.parameters(), *self.models.drafter.parameters())
