"""Stopping criteria for rows that advance at different speeds, asked once for each committed token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria


class RowStopping:
    """
    The criteria of a call. Length, end-of-sequence tokens and time are answered here; any other is asked about one row
    at a time, token by token, with what the row is then. So it is not asked about rows that have ended, and one that
    looks at the whole batch sees a batch of one.

    Args:
        criteria (`StoppingCriteriaList`): Those of the call.
        max_length (`int`): Tokens of a text, padding on the left included, if no criterion says otherwise.

    Attributes:
        eos_ids (`set[int]`): Tokens that end a text.
        max_length (`int`): Tokens with which it ends.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int) -> None:
        # their own ids: a user's criterion of this kind takes the place of the call's
        ids = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
        self.eos_ids: set[int] = set().union(*ids)
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self.max_length = min(lengths, default=max_length)  # a user's criterion takes the place of the call's
        self._time = [c for c in criteria if isinstance(c, MaxTimeCriteria)]
        answered = (MaxLengthCriteria, EosTokenCriteria)
        self._others = [c for c in criteria if type(c) not in answered and not isinstance(c, MaxTimeCriteria)]
        self._done: set[int] = set()

    @property
    def may_run_models(self) -> bool:
        """Whether a criterion is not Transformers' own; it may even run the target."""
        return bool(self._others)

    def kept(
        self,
        row: int,
        text: torch.Tensor,
        end: int,
        new: list[int],
        scores: Sequence[torch.Tensor] | None = None,
    ) -> int:
        """
        Number of new tokens to keep: up to the first that ends the text.

        Args:
            row (`int`): Its row.
            text (`torch.LongTensor` of shape `(rows, capacity)`): The texts, `new` behind the row's first `end`.
            end (`int`): Tokens committed before.
            new (`list[int]`): Tokens about to be committed.
            scores (`Sequence[torch.FloatTensor]` of shape `(vocab,)`, *optional*): Of every generated token, the new
                ones included, with `output_scores`.
        """
        for count, token in enumerate(new, 1):
            ends = token in self.eos_ids or end + count >= self.max_length
            if self._others:
                so_far = text[row : row + 1, : end + count]
                seen = None if scores is None else tuple(s[None] for s in scores[: len(scores) - len(new) + count])
                answers = [_answer(c, so_far, seen) for c in self._others]  # all are asked
                ends = ends or any(answers)
            if ends:
                self._done.add(row)
                return count
        if any(_answer(c, text[row : row + 1, : end + len(new)], None) for c in self._time):
            self._done.add(row)
        return len(new)

    def done(self, row: int) -> bool:
        """Whether a row's text has ended."""
        return row in self._done


def _answer(criterion: Any, text: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> bool:
    given = criterion(text, scores)
    if given is None or torch.as_tensor(given).numel() != 1:
        shape = list(given.shape) if isinstance(given, torch.Tensor) else given
        raise ValueError(
            f"{type(criterion).__name__} answered {shape} for one text: a stopping criterion returns true or false "
            "for each row of the ids that it is given."
        )
    return bool(torch.as_tensor(given).all())


__all__ = ["RowStopping"]
