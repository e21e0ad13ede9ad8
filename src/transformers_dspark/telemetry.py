"""What a generation call reports about itself. Counts and seconds only: nothing here touches tensors or models."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class GenerationStats:
    """
    Figures of one `generate` call.

    A round is one target step over a drafted block. The prefill commits a token of every row without a draft and is no
    round, so a row's committed tokens are one more than the sum of its accepted lengths.

    Args:
        rounds (`int`): Rounds of the loop.
        reread_tokens (`list[int]`): With a target that keeps recurrent states, for each round the committed tokens
            that each layer with a state read once more, over all rows.
        accepted_lengths (`list[list[int]]`): For each row, the tokens committed in each round it took part in:
            accepted drafts plus the bonus, as the paper counts them.
        verify_lengths (`list[list[int]]`): For each row, the drafted tokens sent to the target in each of these
            rounds.
        draft_seconds (`float`): Time spent drafting.
        verify_seconds (`float`): Time spent in the target's steps and in acceptance, without the prefill. Both are
            wall time between points where the host waits for the device anyway.
        schedule (`dict[str, int]`, *optional*): With a table of step costs, how often rows and rounds went without
            drafts because these would not have paid.
        confidences (`list[array]`): From the batched loop, for each row the confidences of its verified tokens, round
            after round as `verify_lengths` cuts them; empty for a drafter without a confidence head.
        tested_by_position, passed_by_position (`list[int]`): Over all rows, drafted tokens at each block position
            whose prefix was accepted, and those of them that were accepted too.
    """

    rounds: int = 0
    accepted_lengths: list[list[int]] = field(default_factory=list)
    verify_lengths: list[list[int]] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    schedule: dict[str, int] | None = None
    reread_tokens: list[int] = field(default_factory=list)
    confidences: list[array[float]] = field(default_factory=list, repr=False)
    tested_by_position: list[int] = field(default_factory=list, repr=False)
    passed_by_position: list[int] = field(default_factory=list, repr=False)

    def record_round(self, verified: Sequence[int], accepted: Sequence[int], committed: Sequence[int]) -> None:
        """
        Counts one round; each argument holds one number a row.

        Args:
            verified (`Sequence[int]`): Drafted tokens sent to the target.
            accepted (`Sequence[int]`): Drafted tokens that were accepted and committed.
            committed (`Sequence[int]`): Tokens committed, bonus included; 0 for a row that took no part.
        """
        self.rounds += 1
        for lists in (self.accepted_lengths, self.verify_lengths):
            lists.extend([] for _ in range(len(committed) - len(lists)))
        for row, (sent, passed, total) in enumerate(zip(verified, accepted, committed, strict=True)):
            if total == 0:
                continue
            self.accepted_lengths[row].append(total)
            self.verify_lengths[row].append(sent)
            pairs = ((self.tested_by_position, tests(sent, passed, total)), (self.passed_by_position, passed))
            for counts, number in pairs:
                counts.extend([0] * (sent - len(counts)))
                for k in range(number):
                    counts[k] += 1

    def record_rows(self, total: int, rows: Sequence[int], *figures: Sequence[int]) -> None:
        """As [`~GenerationStats.record_round`] for some of `total` rows; the others took no part."""
        of_all = [[0] * total for _ in figures]
        for row, *values in zip(rows, *figures, strict=True):
            for numbers, value in zip(of_all, values, strict=True):
                numbers[row] = value
        self.record_round(*of_all)

    @classmethod
    def merge(cls, calls: Iterable[GenerationStats]) -> GenerationStats:
        """The figures of several calls as those of one; the rows of later calls come behind those of earlier ones."""
        total = cls()
        for stats in calls:
            total.rounds += stats.rounds
            total.draft_seconds += stats.draft_seconds
            total.verify_seconds += stats.verify_seconds
            total.accepted_lengths += stats.accepted_lengths
            total.verify_lengths += stats.verify_lengths
            total.confidences += stats.confidences
            total.reread_tokens += stats.reread_tokens
            if stats.schedule is not None:
                total.schedule = {n: v + (total.schedule or {}).get(n, 0) for n, v in stats.schedule.items()}
            for name in ("tested_by_position", "passed_by_position"):
                pairs = zip_longest(getattr(total, name), getattr(stats, name), fillvalue=0)
                setattr(total, name, [ours + theirs for ours, theirs in pairs])
        return total

    @property
    def mean_accepted_length(self) -> float:
        """Committed tokens per row and round, bonus included; 0.0 if there was no round."""
        rounds = sum(map(len, self.accepted_lengths))
        return sum(map(sum, self.accepted_lengths)) / rounds if rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """
        Conditional acceptance of each block position: of the drafted tokens there whose prefix was accepted, the share
        that was accepted too. `None` where no token came to a test.
        """
        pairs = zip(self.passed_by_position, self.tested_by_position, strict=True)
        return [passed / tested if tested else None for passed, tested in pairs]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain numbers and lists, ready for JSON; without the confidences of single tokens."""
        return {
            "rounds": self.rounds,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_position": self.acceptance_by_position,
            "accepted_lengths": self.accepted_lengths,
            "verify_lengths": self.verify_lengths,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            **({} if self.schedule is None else {"schedule": self.schedule}),
            **({"reread_tokens": self.reread_tokens} if self.reread_tokens else {}),
        }


@dataclass(frozen=True)
class BlockCeiling:
    """
    How far a drafted block would have been accepted, had it been verified whole.

    Where nothing was trimmed, or the trimmed part was verified as well, both bounds are the accepted length. Else they
    bound its expectation over the acceptance tests of what was trimmed.

    Args:
        row (`int`): The row.
        round (`int`): The round that drafted the block; a block whose tail was trimmed may be settled later.
        lower, upper (`float`): Bounds in tokens, bonus included as in accepted lengths.
    """

    row: int
    round: int
    lower: float
    upper: float


@dataclass(frozen=True)
class RoundRecord:
    """
    What one round did, as plain numbers: what `round_callback` receives, and a line of its JSONL file. Lists hold one
    entry for each row that took part, in the order of `rows`.

    Args:
        round (`int`): Number of the round within its call, from 1.
        mode (`str`): The call's `verify_mode`.
        rows (`list[int]`): The rows that took part, numbered as the caller gave them.
        drafted (`list[int]`): Drafted tokens that could have been verified; 0 for a row that did not draft.
        admitted (`list[int]`): Those that the schedule let through; their sum is the budget.
        sent (`list[int]`): Those sent to the target; in cap-accept all that were drafted, else the admitted ones.
        accepted (`list[int]`): Those accepted and committed.
        committed (`list[int]`): Tokens committed, bonus included.
        tokens (`int`): Packed tokens of the target's step, one anchor for each row and the drafts sent.
        context (`float`): Entries of a row in the target's cache before the round, on average.
        draft_seconds, verify_seconds (`float`): Measured time of drafting, and of the target's step with acceptance.
        predicted_draft_seconds, predicted_verify_seconds (`float`, *optional*): What the table of step costs expected.
        confidences (`list[list[float]]`): Of the `drafted` tokens of each row; empty lists without a confidence head.
        ceilings (`list[BlockCeiling]`): Blocks whose ceiling was settled in this round, of this or an earlier one.
    """

    round: int
    mode: str
    rows: list[int]
    drafted: list[int]
    admitted: list[int]
    sent: list[int]
    accepted: list[int]
    committed: list[int]
    tokens: int
    context: float
    draft_seconds: float
    verify_seconds: float
    predicted_draft_seconds: float | None = None
    predicted_verify_seconds: float | None = None
    confidences: list[list[float]] = field(default_factory=list)
    ceilings: list[BlockCeiling] = field(default_factory=list)

    @property
    def budget(self) -> int:
        """Drafted tokens admitted over all rows: K."""
        return sum(self.admitted)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for JSON, with the budget."""
        ceilings = [dict(vars(ceiling)) for ceiling in self.ceilings]
        return {**vars(self), "ceilings": ceilings, "budget": self.budget}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Reads what [`~RoundRecord.to_dict`] returned; names that it does not know are left out."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"ceilings": [BlockCeiling(**ceiling) for ceiling in values.get("ceilings", [])]})


class TraceFile:
    """
    Writes each round as a line of JSON; for `round_callback`.

    Args:
        path (`str` or `os.PathLike`): Made if missing, else lines come behind those it has.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __call__(self, record: RoundRecord) -> None:
        # opened anew for each round: what was written survives an interruption, and calls share a file
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_dict()) + "\n")


def read_trace(path: str | os.PathLike[str]) -> Iterator[RoundRecord]:
    """
    The rounds in a file of [`TraceFile`]; each call in it counts its rounds from 1.

    Raises:
        ValueError: a line that is no record.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield RoundRecord.from_dict(json.loads(line))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{os.fspath(path)}, line {number}: no record of a round: {error}") from error


def tests(sent: int, accepted: int, committed: int) -> int:
    """
    Drafts of a block that came to a test: those accepted and the one that failed, unless all passed or the text ended
    with an accepted token.
    """
    return accepted + (accepted < min(sent, committed))


@dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    """
    Output of `generate` with `return_dict_in_generate=True`, as
    [`~transformers.generation.GenerateDecoderOnlyOutput`], plus:

    Args:
        dspark (`GenerationStats`): Figures of this call.
        divergence (`DivergenceReport`, *optional*): With `report_divergence=True`, what plain decoding says of the
            texts.
    """

    dspark: GenerationStats | None = None
    divergence: Any = None


__all__ = [
    "BlockCeiling",
    "DSparkGenerateOutput",
    "GenerationStats",
    "RoundRecord",
    "TraceFile",
    "read_trace",
    "tests",
]
