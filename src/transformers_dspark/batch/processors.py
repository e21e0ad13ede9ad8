"""
Logits processors for rows that advance at different speeds: each position is shown what plain decoding would show it.

A row's prefix is the row of `input_ids` that plain generation would hold at that point, padding on the left included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ..processors import SpeculativeProcessors, asks_user, is_stateless, twins


# Those of Transformers whose result for a row depends on its scores and on the set of tokens in its prefix alone, so
# that positions of many rows and lengths can share one call.
_LIBRARY = "transformers.generation.logits_process"
_SHARED = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
_READS_PREFIX = "RepetitionPenaltyLogitsProcessor"
_OF_PROMPTS = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")  # what processors hold of each prompt

Numbers = Sequence[int] | torch.Tensor


class RowProcessors:
    """
    The processors of a call, for positions of several rows at a time.

    If each of them is a function of the scores and of the set of earlier tokens, all positions go through it together.
    Otherwise every row has [`SpeculativeProcessors`] of its own, with copies of what keeps state, and its positions go
    through them one by one. There a processor sees one row, as in a call for that row alone, and a
    `prefix_allowed_tokens_fn` still gets the row's number.

    Args:
        processors (`LogitsProcessorList`): Those of the call.
        rows (`int`): Rows of the call.
        eos_ids (`set[int]`): Tokens that end a text.

    Attributes:
        starts (`torch.LongTensor` of shape `(rows,)`, *optional*): Where the prefixes of each row begin, if padding is
            ignored.
    """

    def __init__(self, processors: LogitsProcessorList, rows: int, eos_ids: set[int]) -> None:
        self._shared = LogitsProcessorList(map(_without_padding, processors))
        self._by_row: list[SpeculativeProcessors] | None = None
        self._drafting: dict[int, LogitsProcessorList] = {}  # copies for the drafts of this round
        readers = [p for p in processors if type(p).__name__ == _READS_PREFIX]
        self._reads_prefixes = bool(readers)
        ignored = [p.prompt_ignore_length for p in readers if isinstance(p.prompt_ignore_length, torch.Tensor)]
        self.starts = ignored[-1] if ignored else None  # all of one call ignore the same padding
        if not all(map(_is_shared, processors)):
            self._by_row = [SpeculativeProcessors(_of_row(processors, row, rows), eos_ids) for row in range(rows)]

    @property
    def may_run_models(self) -> bool:
        """Whether one of them may run the target itself, as classifier-free guidance does."""
        return self._by_row is not None

    @property
    def are_none(self) -> bool:
        """Whether scores stay as they are."""
        return self._by_row is None and not self._shared

    @property
    def signature(self) -> Hashable:
        """What the shared processors compute: equal for calls whose processors do the same."""
        return tuple((type(p), *sorted((n, _hashable(v)) for n, v in vars(p).items())) for p in self._shared)

    def reading_from(self, starts: torch.Tensor) -> RowProcessors:
        """The same for texts in other places, whose `starts` are these."""
        other = copy.copy(self)
        other.starts = starts
        return other

    @property
    def can_speculate(self) -> bool:
        """Whether drafted positions may be asked for at all."""
        return self._by_row is None or all(processors.can_speculate for processors in self._by_row)

    def __call__(self, text: torch.Tensor, rows: Numbers, ends: Numbers, scores: torch.Tensor) -> torch.Tensor:
        """
        Processed scores of the target.

        Args:
            text (`torch.LongTensor` of shape `(all_rows, capacity)`): The texts, drafted tokens behind committed ones.
            rows (`Sequence[int]` or `torch.LongTensor`): Row of each position; the positions of a row come in order.
            ends (`Sequence[int]` or `torch.LongTensor`): Length of the prefix of each position.
            scores (`torch.FloatTensor` of shape `(n, vocab)`): Logits of the positions. They may be changed.
        """
        if self._by_row is None:
            return self._shared(self._prefixes(text, rows, ends), scores) if self._shared else scores
        return self._one_by_one(self._by_row.__getitem__, text, _listed(rows), _listed(ends), scores)

    def drafted(
        self, text: torch.Tensor, rows: Numbers, ends: Numbers, scores: torch.Tensor, going: Callable[[], list[int]]
    ) -> torch.Tensor:
        """
        Processed scores of the drafter, one position of each row. Nothing that keeps state takes notice of them.

        Args:
            text, rows, ends, scores: As for a call.
            going (`Callable`): Returns those of the `n` whose draft has not ended. Processors that go through rows one
                by one are asked about no other: a user's grammar need not know how to go on behind an end.
        """
        if self._by_row is None:
            return self(text, rows, ends, scores)
        rows, ends = _listed(rows), _listed(ends)
        for row in rows:
            if row not in self._drafting:
                self._drafting[row] = self._by_row[row].for_drafting()
        if asked := going():
            some = [rows[i] for i in asked], [ends[i] for i in asked], scores[asked]
            scores[asked] = self._one_by_one(self._drafting.__getitem__, text, *some)
        return scores

    def commit(self, row: int, end: int) -> None:
        """Ends a round of a row: its text now has `end` tokens."""
        if self._by_row is not None:
            self._by_row[row].commit(end)
            self._drafting.pop(row, None)

    def _one_by_one(
        self,
        processors: Callable[[int], LogitsProcessorList],
        text: torch.Tensor,
        rows: Sequence[int],
        ends: Sequence[int],
        scores: torch.Tensor,
    ) -> torch.Tensor:
        places = enumerate(zip(rows, ends, strict=True))
        return torch.cat([processors(row)(text[row : row + 1, :end], scores[i : i + 1]) for i, (row, end) in places])

    def _prefixes(self, text: torch.Tensor, rows: Numbers, ends: Numbers) -> torch.Tensor:
        """
        `(n, longest)` prefixes without padding; what is too short repeats its last token, which changes no set. If the
        ends are on a device, the longest may be as long as a text can get: nobody waits for them.
        """
        index = torch.as_tensor(rows, device=text.device)
        if not self._reads_prefixes:
            return text[index, :1]
        limits = torch.as_tensor(ends, device=text.device)[:, None]
        starts = 0 if self.starts is None else self.starts.to(text.device)[index, None]
        longest = text.shape[1] if isinstance(ends, torch.Tensor) else max(ends)
        columns = torch.arange(longest, device=text.device)
        prefixes = text[index, :longest]
        return torch.where((columns >= starts) & (columns < limits), prefixes, prefixes.gather(1, limits - 1))


def no_token_left(row: int) -> ValueError:
    """For a row whose scores are of no use."""
    return ValueError(
        f"The target's logits of row {row}, after all logits processors, leave no token to choose: they are NaN, or a "
        "processor forbids too much."
    )


def _hashable(value: Any) -> Hashable:
    return (str(value.dtype), *value.flatten().tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _listed(numbers: Numbers) -> Sequence[int]:
    return numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers


def _is_shared(processor: LogitsProcessor) -> bool:
    named = type(processor).__module__ == _LIBRARY and type(processor).__name__ in _SHARED
    return named and not isinstance(getattr(processor, "prompt_ignore_length", None), int)


def _without_padding(processor: Any) -> Any:
    """The processor without the padding that it ignores, where its prefixes come without any."""
    if getattr(processor, "prompt_ignore_length", None) is None:
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = None
    return processor


class _RowNumber:
    """A user's `prefix_allowed_tokens_fn`, asked about one row of a batch."""

    def __init__(self, function: Callable[..., Any], row: int) -> None:
        self.function, self.row = function, row

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> Any:
        return self.function(self.row, input_ids)


def _of_row(processors: LogitsProcessorList, row: int, rows: int) -> list[Any]:
    """The processors as one row asks them. The first row keeps the call's own objects, if it is alone."""
    ours = list(processors)
    if rows > 1:
        stateful = [index for index, processor in enumerate(ours) if not is_stateless(processor)]
        try:
            copies = twins([ours[index] for index in stateful])
        except Exception as error:  # whatever a user's class raises when it is copied
            names = ", ".join(type(ours[index]).__name__ for index in stateful)
            raise ValueError(
                f"{names} keeps state and cannot be copied for each row ({error}): give it a `__deepcopy__` method, "
                "or generate for one prompt at a time."
            ) from error
        for index, twin in zip(stateful, copies, strict=True):
            ours[index] = twin
        for index, processor in enumerate(ours):
            ours[index] = _cut_to_row(processor, row, rows)
            if asks_user(processor):
                ours[index] = copy.copy(processor)
                (name,) = (n for n, value in vars(processor).items() if callable(value))
                (texts,) = (n for n, value in vars(processor).items() if isinstance(value, int))  # of a prompt
                setattr(ours[index], name, _RowNumber(getattr(processor, name), row // getattr(processor, texts)))
                setattr(ours[index], texts, 1)
    return ours


def _cut_to_row(processor: Any, row: int, rows: int) -> Any:
    """A processor of Transformers with what it holds of one row, if it holds something of each."""
    context = getattr(processor, "unconditional_context", None)  # classifier-free guidance: the negative prompts
    if isinstance(context, dict):
        for name, value in context.items():
            if isinstance(value, torch.Tensor) and value.shape[0] == rows:
                context[name] = value[row : row + 1]
    held: dict[str, Any] = {name: getattr(processor, name, None) for name in _OF_PROMPTS}
    held = {name: value for name, value in held.items() if isinstance(value, (torch.Tensor, list))}
    if not held or type(processor).__module__ != _LIBRARY:
        return processor
    processor = copy.copy(processor)
    for name, value in held.items():
        prompt = row * len(value) // rows  # several rows may be texts of one prompt
        setattr(processor, name, value[prompt : prompt + 1])
    if hasattr(processor, "batch_size"):
        processor.batch_size = 1
    return processor


__all__ = ["RowProcessors", "no_token_left"]
