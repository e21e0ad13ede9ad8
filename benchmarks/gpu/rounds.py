"""Runs of the batched loop at a forced acceptance, read off the clock of the device."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import CompileConfig, MaxTimeCriteria, StoppingCriteriaList

from transformers_dspark import DSparkGenerationConfig

from .profiles import (
    ACCEPTED_LENGTH,
    DRAFT,
    DRAFTED,
    JUDGED,
    STEP,
    STEPPED,
    ForcedAcceptance,
    RoundClock,
    mean_length,
)
from .shapes import Models


# How the target's forward is run, in the words of `DSparkGenerationConfig`.
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"use_cuda_graphs": False},
    "graph": {"use_cuda_graphs": True},
    "compiled": {"use_cuda_graphs": True, "compile_config": CompileConfig()},
}
OUTLIER = 5.0  # times the median: something else was in between, such as a capture
FIRST_ROUNDS = 4  # of a call, which are not counted: graphs are captured, queues fill


@dataclass(frozen=True)
class Rounds:
    """
    Rounds of one call in which all rows took part: means over them.

    Args:
        rounds (`int`): That are counted.
        dropped (`int`): That took more than `OUTLIER` times the median and are not.
        seconds (`float`): Of a round, from one verdict to the next.
        draft_seconds, step_seconds (`float`, *optional*): Of these, for drafting and for the target's forward.
        observed_length (`float`): Tokens that a row committed, bonus included.
        accepted_length (`float`): The same on average over luck, see [`~ForcedAcceptance.expected_length`].
        sent (`float`): Drafts of a row that the target checked.
        tokens_per_second (`float`): Over all rows, at `accepted_length`.
        call_seconds (`float`): Of the whole call, with all that came before its first round.
        mean_context (`float`): Tokens before a round, on average.
    """

    rounds: int
    dropped: int
    seconds: float
    draft_seconds: float | None
    step_seconds: float | None
    observed_length: float
    accepted_length: float
    sent: float
    tokens_per_second: float
    call_seconds: float
    mean_context: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class EnoughRounds(MaxTimeCriteria):
    """Ends all rows of a call in the same round, so that none is timed over fewer rows. Time in rounds, as it were."""

    def __init__(self, clock: RoundClock, rounds: int) -> None:
        super().__init__(math.inf)
        self._clock, self._rounds = clock, rounds

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        over = self._clock.stats.rounds + 1 >= self._rounds  # the round in question is counted behind this
        return torch.full((len(input_ids),), over)


class EnoughTokens(EnoughRounds):
    """Ends all rows in the round after the one in which they have this many new tokens on average."""

    def __init__(self, clock: RoundClock, tokens: float) -> None:
        super().__init__(clock, 0)
        self._tokens, self._counted = tokens, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        lengths = self._clock.stats.accepted_lengths
        if self._counted < self._clock.stats.rounds:
            self._counted = self._clock.stats.rounds
            self._tokens -= sum(row[-1] for row in lengths) / len(lengths)
        return torch.full((len(input_ids),), self._tokens <= 0)


class Batch:
    """
    Prompts of equal length, over and over.

    Args:
        models (`Models`): Target and drafter.
        rows, context (`int`): Number and length of the prompts.
        rounds (`int`): To be counted in a call.
        clock (`RoundClock`), forced (`ForcedAcceptance`): Both entered.
    """

    def __init__(
        self, models: Models, rows: int, context: int, rounds: int, clock: RoundClock, forced: ForcedAcceptance
    ) -> None:
        self.models, self.rows, self.context, self.rounds = models, rows, context, rounds
        self._clock, self._forced = clock, forced
        self.ids = prompts(models, rows, context)
        # the same room in all calls, so that they share their graphs
        self._room = room_for(models.block, rounds)

    @property
    def span(self) -> tuple[float, float]:
        """New tokens of a row, on average, between which rounds are counted that are to be over the same texts."""
        counted = self.rounds * max(mean_length(profile, 1, self.models.block) for profile in ACCEPTED_LENGTH)
        return counted / 4, counted / 4 + counted  # before that a schedule finds its way, and its graphs are captured

    def run(
        self, profile: str, engine: str, first: int = FIRST_ROUNDS, same_texts: bool = False, **options: Any
    ) -> Rounds:
        """
        Generates greedily and reads the clock.

        Args:
            profile (`str`): Of acceptance.
            engine (`str`): One of `ENGINES`.
            first (`int`): Rounds that are not counted.
            same_texts (`bool`): Counts the rounds in `span` instead: modes that commit more or less tokens a round
                then meet texts of the same lengths, on which the time of a round depends.
            options: Of [`DSparkGenerationConfig`].
        """
        config = DSparkGenerationConfig(
            dspark_loop="batched",
            do_sample=False,
            max_new_tokens=self._room,
            eos_token_id=None,
            pad_token_id=0,
            **ENGINES[engine],
            **{"step_cost_table": False, **options},
        )
        self._forced.use(profile, self.rows, self.models.block)
        self._clock.restart()
        enough = EnoughRounds(self._clock, first + self.rounds)
        if same_texts:
            enough = EnoughTokens(self._clock, self.span[1])
        began = time.perf_counter()
        self.models.target.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            assistant_model=self.models.drafter,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([enough]),
        )
        stamps = self._clock.seconds()
        seconds = time.perf_counter() - began
        if same_texts:
            lengths = self._clock.stats.accepted_lengths
            together = min(map(len, lengths), default=0)
            reached = np.mean([row[:together] for row in lengths], axis=0).cumsum()
            first = int(reached.searchsorted(self.span[0])) + 1
        return self._read(stamps, first, seconds)

    def _read(self, stamps: np.ndarray, first: int, seconds: float) -> Rounds:
        """
        A round that the loop began and did not need stands behind the others, which moves what is read by one round.
        """
        stats = self._clock.stats
        together = min(map(len, stats.accepted_lengths), default=0)
        real = real_rounds(stamps, self._forced.admitted(len(stamps)))
        begin = max(1, len(real) - stats.rounds) + first
        counted = real[begin : begin + together - first]
        if not len(counted):
            raise RuntimeError(f"Only {together} rounds had all rows in them, of which {first} do not count.")
        took = stamps[counted, JUDGED] - stamps[counted - 1, JUDGED]
        # what came before a round must be one, too: else a graph was captured in between
        kept = np.isin(counted - 1, real) & (took <= OUTLIER * np.median(took))
        accepted, sent = (
            np.array([row[first:together] for row in lists])
            for lists in (stats.accepted_lengths, stats.verify_lengths)
        )
        before = np.mean([sum(row[:first]) + sum(row[:together]) for row in stats.accepted_lengths]) / 2

        def part(begin: int, end: int) -> float | None:
            lasted = (stamps[counted, end] - stamps[counted, begin])[kept]
            lasted = lasted[np.isfinite(lasted)]  # a schedule may do without drafts
            return float(lasted.mean()) if len(lasted) else None

        mean, length = float(took[kept].mean()), self._forced.expected_length(counted)
        return Rounds(
            rounds=int(kept.sum()),
            dropped=int((~kept).sum()),
            seconds=mean,
            draft_seconds=part(DRAFT, DRAFTED),
            step_seconds=part(STEP, STEPPED),
            observed_length=float(accepted.mean()),
            accepted_length=length,
            sent=float(sent.mean()),
            tokens_per_second=self.rows * length / mean,
            call_seconds=seconds,
            mean_context=self.context + float(before),
        )


def real_rounds(stamps: np.ndarray, admitted: np.ndarray) -> np.ndarray:
    """
    Numbers of the rounds that are a call's own. A round that warms up for a capture drafts and admits nothing, since
    none of its rows is alive.

    Args:
        stamps (`np.ndarray` of shape `(rounds, points)`): Of the clock.
        admitted (`np.ndarray` of shape `(rounds, rows)`): Drafts of each row.
    """
    return np.flatnonzero(np.isnan(stamps[:, DRAFT]) | admitted.any(axis=1))


def prompts(models: Models, rows: int, context: int) -> torch.Tensor:
    """`(rows, context)` random ids on the device."""
    noise = torch.Generator().manual_seed(rows)
    return torch.randint(1, models.target.config.vocab_size, (rows, context), generator=noise).to(models.device)


def room_for(block: int, rounds: int) -> int:
    """New tokens of a row over the longest call, in maths, with some to spare."""
    quickest = max(mean_length(profile, 1, block) for profile in ACCEPTED_LENGTH)
    return math.ceil(1.15 * 2 * rounds * quickest) + 2 * (block + 1)
