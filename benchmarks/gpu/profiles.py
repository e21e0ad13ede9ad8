"""
Acceptance that is forced on a drafter of random weights, and the clock that reads rounds on the device.

Both replace functions of the package while a context lasts. What stands in their place reads and writes tensors only,
in place, so that it can be captured in a CUDA graph and goes on working when the graph is replayed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from transformers_dspark import decoding, sampling, static_round
from transformers_dspark.batch.drafting import RowDrafting
from transformers_dspark.modeling_dspark import DSparkDrafter
from transformers_dspark.sampling import Verdict
from transformers_dspark.static_round import StaticRound
from transformers_dspark.target import TargetTaps
from transformers_dspark.telemetry import GenerationStats


# Accepted length with a block of 7, bonus included, of Qwen3-8B at temperature 1: GSM8K; the mean of MBPP, HumanEval
# and LiveCodeBench; the mean of MT-Bench, Alpaca and Arena-Hard. Source: DSpark paper, table of accepted lengths.
ACCEPTED_LENGTH = {"math": 6.17, "code": 5.28, "chat": 3.50}
MIXED = "mixed"  # rows of the three domains in turn
PROFILES = (*ACCEPTED_LENGTH, MIXED)
PUBLISHED_BLOCK = 7
# Sum of the parameters of the Beta distribution of confidences: at 3 they rank accepted before rejected drafts with an
# AUC of 0.81 to 0.90 from chat to maths, which is what is published of the confidence head.
CONCENTRATION = 3.0
ROUNDS = 256  # of a table of forced rounds, over and over
STAMPS = 1 << 12  # rounds of a call that can be noted
DRAFT, DRAFTED, STEP, STEPPED, JUDGED = POINTS = range(5)


def conditional_acceptance(accepted_length: float, block: int = PUBLISHED_BLOCK) -> float:
    """
    The acceptance of a draft whose prefix passed, the same at each position, that gives an accepted length.

    What is published is the length; by position only 0.93 for the first of maths, near which this comes.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, block) < accepted_length else (low, middle)
    return low


def expected_length(acceptance: float, block: int) -> float:
    """Committed tokens of a round, bonus included, when `block` drafts each pass with this probability."""
    return 1 + sum(acceptance**k for k in range(1, block + 1))


def rows_of(profile: str, rows: int) -> list[float]:
    """Conditional acceptance of each row."""
    domains = list(ACCEPTED_LENGTH) if profile == MIXED else [profile]
    return [conditional_acceptance(ACCEPTED_LENGTH[domains[row % len(domains)]]) for row in range(rows)]


def mean_length(profile: str, rows: int, block: int) -> float:
    """Expected accepted length over the rows of a batch, whole blocks verified."""
    return sum(expected_length(acceptance, block) for acceptance in rows_of(profile, rows)) / rows


class RoundClock:
    """
    Notes when the parts of each round begin and end, by the clock of the device that runs them, and what they did.

    A context manager. On CUDA a kernel of one thread reads the device's timer between the others, whether they are
    launched or replayed, so nothing waits for anything. Points of a round: `DRAFT` and `DRAFTED` around a block,
    `STEP` and `STEPPED` around the target's forward, `JUDGED` when the accepted tokens are known.

    Graphs outlive the call that captured them and go on writing to this clock. So one clock serves a whole process.

    Args:
        device (`torch.device`): Where target and drafter are.

    Attributes:
        round: `(1,)` number of the running round, on the device.
        stats: Figures of the latest call, which are kept even if the call does not return them.
    """

    def __init__(self, device: torch.device) -> None:
        self.round = torch.zeros(1, dtype=torch.long, device=device)
        self.stats = GenerationStats()
        self._stamps = torch.zeros(STAMPS, len(POINTS), dtype=torch.long, device=device)
        self._stack = ExitStack()
        if device.type == "cuda":
            from .device_clock import stamp

            self._stamp: Callable[..., None] = stamp
            self.note(DRAFT)  # compiled before anything is captured
        else:
            self._stamp = _stamp_on_cpu

    def note(self, point: int) -> None:
        """Writes the time of one of `POINTS` of the current round."""
        self._stamp(self._stamps, self.round, point)

    def restart(self) -> None:
        """Forgets all rounds."""
        self.stats = GenerationStats()
        self.round.zero_()
        self._stamps.zero_()

    def seconds(self) -> np.ndarray:
        """`(rounds, points)` seconds since some moment; NaN for a part that did not happen. Waits for the device."""
        stamps = self._stamps[: int(self.round)].cpu().numpy()
        return np.where(stamps > 0, (stamps - stamps.max(initial=0)) / 1e9, np.nan)

    def __enter__(self) -> RoundClock:
        judge, record = _judge(), GenerationStats.record_round

        def noted(function: Callable[..., Any], begin: int, end: int) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.note(begin)
                result = function(*args, **kwargs)
                self.note(end)
                return result

            return run

        def ending(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                self.note(JUDGED)
                self.round.add_(1)
                return result

            return run

        def noted_record(stats: GenerationStats, *args: Any) -> None:
            record(stats, *args)
            self.stats = stats

        for owner, name, begin, end in (
            (TargetTaps, "run", STEP, STEPPED),
            (TargetTaps, "step", STEP, STEPPED),
            (RowDrafting, "__call__", DRAFT, DRAFTED),
        ):
            self._stack.enter_context(patch.object(owner, name, noted(vars(owner)[name], begin, end)))
        self._stack.enter_context(patch.object(GenerationStats, "record_round", noted_record))
        self._stack.enter_context(patch.object(decoding, "accept_greedy", ending(judge)))
        # a round of fixed shape judges and commits in one piece, which may be compiled
        self._stack.enter_context(patch.object(StaticRound, "__call__", ending(StaticRound.__call__)))
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()


class ForcedAcceptance:
    """
    While it lasts, greedy batches accept as a profile says, with confidences that are calibrated by construction.

    Each confidence is drawn from a Beta distribution around the row's conditional acceptance, and each draft passes
    with the probability that its confidence says. A context manager, to be entered before the clock that counts its
    rounds. Rows are told apart by their places in the batch, which are theirs as long as none has ended and all of
    them draft. As the clock does, it serves a whole process: graphs read its tables.

    Args:
        clock (`RoundClock`): Its rounds choose the line of the tables.
        rows, block (`int`): The most there will be of rows, and of drafts in a block.
    """

    def __init__(self, clock: RoundClock, rows: int, block: int) -> None:
        self._round, device = clock.round, clock.round.device
        self._confidences = torch.ones(ROUNDS, rows, block, device=device)
        self._passed = torch.zeros(ROUNDS, rows, dtype=torch.long, device=device)
        self._admitted = torch.zeros(STAMPS, rows, dtype=torch.long, device=device)
        self._survival = np.ones((ROUNDS, rows, block))
        self._target_length = 1.0
        self._block = self._confidences[0]  # of the block that is being drafted
        self._active = False
        self._stack = ExitStack()

    def use(self, profile: str, rows: int, block: int, seed: int = 0) -> None:
        """
        Fills the tables.

        Args:
            profile (`str`): One of `PROFILES`.
            rows, block (`int`): Of the batch.
            seed (`int`): Of confidences and acceptance.
        """
        confidences, passed = forced_tables(profile, rows, block, seed)
        self._confidences[:, :rows, :block] = torch.from_numpy(confidences)
        self._passed[:, :rows] = torch.from_numpy(passed)
        self._survival, self._target_length = confidences.cumprod(axis=2), mean_length(profile, rows, block)

    def admitted(self, rounds: int) -> np.ndarray:
        """`(rounds, rows)` drafts that were admitted in the first rounds of the latest call."""
        return self._admitted[:rounds, : self._survival.shape[1]].cpu().numpy()

    def expected_length(self, numbers: np.ndarray) -> float:
        """
        Accepted length of some rounds of a call, as it is on average for what was sent, over the tables' luck.

        Chance decides little here: drafts that passed are replaced by the survivals of those admitted, and these are
        held against the survivals of whole blocks in the same rounds, whose mean is known.

        Args:
            numbers (`np.ndarray` of shape `(rounds,)`): Of the rounds, as the clock counts.
        """
        survival = self._survival[numbers % ROUNDS]  # [rounds, rows, block]
        within = np.arange(survival.shape[2]) < self.admitted(STAMPS)[numbers][..., None]
        found, whole = ((survival * part).sum(axis=2).mean() for part in (within, 1))
        return float(1 + found * (self._target_length - 1) / whole)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Drafters that are first used in here accept what they deserve."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def __enter__(self) -> ForcedAcceptance:
        judge, real_confidence = _judge(), DSparkDrafter._confidence_at

        def forced_judge(
            target_ids: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor | None = None
        ) -> Verdict:
            verdict = judge(target_ids, tokens, lengths)  # its price is paid
            if not self._active:
                return verdict
            accepted = self._of_round(self._passed)[: len(tokens)].clamp(max=tokens.shape[1])
            if lengths is not None:
                accepted = torch.minimum(accepted, lengths)
                self._admitted[:, : len(lengths)].index_copy_(0, self._round % STAMPS, lengths[None])
            return Verdict(accepted, target_ids.gather(1, accepted[:, None]).squeeze(1))

        def forced_confidence(
            drafter: DSparkDrafter, k: int, hidden: torch.Tensor, previous: torch.Tensor | None
        ) -> torch.Tensor | None:
            confidence = real_confidence(drafter, k, hidden, previous)
            if not self._active:
                return confidence
            if k == 0:
                self._block = self._of_round(self._confidences)
            return self._block[: len(hidden), k]

        self._active = True
        self._stack.enter_context(patch.object(DSparkDrafter, "_confidence_at", forced_confidence))
        self._stack.enter_context(_judging_with(forced_judge))
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def _of_round(self, table: torch.Tensor) -> torch.Tensor:
        """A table's line of the running round, chosen on the device."""
        return table.index_select(0, self._round % ROUNDS).squeeze(0)


def forced_tables(profile: str, rows: int, block: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`(ROUNDS, rows, block)` float32 confidences, and the `(ROUNDS, rows)` drafts that pass in a row."""
    random, means = np.random.default_rng(seed), np.array(rows_of(profile, rows))[None, :, None]
    shape = (ROUNDS, rows, block)
    confidence = random.beta(CONCENTRATION * means, CONCENTRATION * (1 - means), shape)
    passed = random.random(shape) < confidence
    return confidence.astype(np.float32), passed.cumprod(axis=2).sum(axis=2)


def _judge() -> Callable[..., Verdict]:
    """What decides about greedy drafts at present, in either loop."""
    eager, captured = (vars(module)["accept_greedy"] for module in (decoding, static_round))
    assert eager is captured
    return captured


@contextmanager
def _judging_with(judge: Callable[..., Verdict]) -> Iterator[None]:
    """Every module of the package that decides about greedy drafts asks `judge` instead."""
    before = _judge()
    asking = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("transformers_dspark.") and vars(module).get("accept_greedy") is before
    ]
    with ExitStack() as stack:
        for module in asking:
            if module is not sampling:
                stack.enter_context(patch.object(module, "accept_greedy", judge))
        yield


def _stamp_on_cpu(stamps: torch.Tensor, number: torch.Tensor, point: int) -> None:
    stamps[int(number) % STAMPS, point] = time.perf_counter_ns()
