"""Logits processors and stopping criteria under speculation: each committed position sees what plain decoding would
show it.

The loop processes logits of drafted positions before it knows which of them survive. Most processors of Transformers
depend on their arguments only; one that keeps state (a user's grammar, a watermark, the unconditional branch of
classifier-free guidance) must not notice.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.utils import logging


logger = logging.get_logger(__name__)

# the processors of Transformers that remember earlier calls, and the one that asks a callable of the user; all others
# there are functions of their arguments
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
_ASKS_USER = "PrefixConstrainedLogitsProcessor"
_LIBRARY = "transformers.generation.logits_process"
# objects inside a processor; copying more than these in each round would cost more than a draft saves
_MOST_PARTS = 10_000


class SpeculativeProcessors(LogitsProcessorList):
    """
    The processors of a call, safe to run on positions that may be rejected.

    The first position of a round is always committed, so the processors themselves run there. Later positions run on
    copies, and [`~SpeculativeProcessors.commit`] replays those that were committed. So each processor is called
    exactly as in plain decoding: once for each committed position, in order.

    What counts as a function of its arguments, and is not copied: the processors of Transformers without a memory, and
    plain functions without closure, defaults and attributes, also as `prefix_allowed_tokens_fn`; the globals that
    these read are taken not to change. So the trie of a `prefix_allowed_tokens_fn` is best read as a global. Any other
    object, method or closure is copied with all it holds, but for models and tokenizers. If that cannot be done,
    nothing is drafted.

    Args:
        processors (`Iterable[LogitsProcessor]`): Those of the call.
        eos_ids (`set[int]`): Tokens that end the text. A user's processor is not asked behind one.
    """

    def __init__(
        self, processors: Iterable[LogitsProcessor], eos_ids: frozenset[int] | set[int] = frozenset()
    ) -> None:
        super().__init__(processors)
        self._stateful = [index for index, processor in enumerate(self) if not is_stateless(processor)]
        self._eos_ids = eos_ids
        self.users_own = any(map(_is_users_own, self))
        self._copies: LogitsProcessorList | None = None
        self._speculative: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._committed: int | None = None
        self.can_speculate = self._can_copy()

    def _can_copy(self) -> bool:
        for index in self._stateful:
            inside, name = _inside(self[index]), type(_inside(self[index])).__name__
            try:
                if len(list(itertools.islice(_parts(inside, set()), _MOST_PARTS + 1))) > _MOST_PARTS:
                    raise ValueError(f"it holds more than {_MOST_PARTS} objects")
                twins(inside)
            except Exception as error:  # whatever a user's class raises when it is copied
                logger.warning_once(
                    f"{name} keeps state and cannot be copied ({error}), so nothing is drafted in this call. A "
                    "`__deepcopy__` method, or a plain function that reads unchanging globals, would allow it."
                )
                return False
        return True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not self._stateful and not self.users_own:
            return super().__call__(input_ids, scores, **kwargs)
        if self._committed is None:
            self._committed = input_ids.shape[1]
            return super().__call__(input_ids, scores, **kwargs)
        if self.users_own and not self._eos_ids.isdisjoint(input_ids[0, self._committed :].tolist()):
            return scores  # the text ends before this position
        if not self._stateful:
            return super().__call__(input_ids, scores, **kwargs)
        if self._copies is None:
            self._copies = self._copied_list()
        self._speculative.append((input_ids, scores.clone()))
        return self._copies(input_ids, scores, **kwargs)

    def commit(self, length: int) -> None:
        """Ends a round: the sequence now has `length` tokens, so the logits behind shorter prefixes were used."""
        for input_ids, scores in self._speculative:
            if input_ids.shape[1] < length:
                super().__call__(input_ids, scores)
        self._copies, self._speculative, self._committed = None, [], None

    def for_drafting(self) -> LogitsProcessorList:
        """
        Processors to run on the drafter's logits. One that runs a model is left out: it would cost more than the draft
        saves.
        """
        return self._copied_list(without_models=True) if self._stateful else LogitsProcessorList(self)

    def _copied_list(self, without_models: bool = False) -> LogitsProcessorList:
        # copied together: two of them may share an object
        copies = dict(zip(self._stateful, twins([self[index] for index in self._stateful]), strict=True))
        return LogitsProcessorList(
            copies.get(index, processor)
            for index, processor in enumerate(self)
            if not (without_models and index in copies and _holds_model(processor))
        )


class SpeculativeStopping(StoppingCriteriaList):
    """
    The stopping criteria of a call, asked once for each committed token.

    The loop itself asks only at the end of a round, when an accepted stop string may lie some tokens back.
    """

    def __init__(self, criteria: StoppingCriteriaList, with_scores: bool) -> None:
        super().__init__(criteria)
        self._scores: tuple[torch.Tensor, ...] | None = () if with_scores else None
        self._answer: tuple[int, torch.Tensor] | None = None

    def kept(self, input_ids: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> int:
        """
        Number of new tokens to keep: up to the first that ends generation.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): Committed tokens.
            tokens (`torch.LongTensor` of shape `(1, n)`): Tokens about to be committed.
            scores (`torch.FloatTensor` of shape `(1, n, vocab)`): Processed target logits at their positions.
        """
        joined = torch.cat((input_ids, tokens), dim=1)
        for count in range(1, tokens.shape[1] + 1):
            so_far = None if self._scores is None else (*self._scores, *scores[:, :count].unbind(1))
            done = super().__call__(joined[:, : input_ids.shape[1] + count], so_far)
            self._answer = (input_ids.shape[1] + count, done)
            if done.all():
                return count
        return tokens.shape[1]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._scores = scores
        if self._answer is not None and self._answer[0] == input_ids.shape[1]:
            return self._answer[1]
        return super().__call__(input_ids, scores, **kwargs)


def asks_user(processor: Any) -> bool:
    """Whether it is the library's processor that asks a callable of the user's."""
    return type(processor).__module__ == _LIBRARY and type(processor).__name__ == _ASKS_USER


def _inside(processor: Any) -> Any:
    """What may keep state: the processor, or the user's callable that it asks."""
    if not asks_user(processor):
        return processor
    return next(iter(inner for inner in vars(processor).values() if callable(inner)))


def _is_users_own(processor: Any) -> bool:
    return type(processor).__module__ != _LIBRARY or asks_user(processor)


def is_stateless(processor: Any) -> bool:
    """Whether a processor is a function of its arguments, see [`SpeculativeProcessors`]."""
    inside = _inside(processor)
    if isinstance(inside, types.FunctionType):
        return not _can_remember(inside)
    return type(inside).__module__ == _LIBRARY and type(inside).__name__ not in _STATEFUL


def _can_remember(function: types.FunctionType) -> bool:
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


def twins(value: Any) -> Any:
    """A copy with state of its own. Models and tokenizers are shared: they are large, and nothing decoding changes."""
    memo: dict[int, Any] = {}
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    cells: dict[int, tuple[types.CellType, types.CellType]] = {}
    for part in _parts(value, set()):
        if isinstance(part, torch.Generator):
            memo[id(part)] = part.clone_state()
        elif isinstance(part, (nn.Module, PreTrainedTokenizerBase, types.ModuleType)):
            memo[id(part)] = part
        elif isinstance(part, types.FunctionType) and _can_remember(part):
            closure = [cells.setdefault(id(cell), (cell, types.CellType()))[1] for cell in part.__closure__ or ()]
            twin = types.FunctionType(part.__code__, part.__globals__, part.__name__, None, tuple(closure))
            memo[id(part)] = twin
            functions.append((part, twin))
    for part, twin in functions:
        if copy.deepcopy(part, memo) is not twin:
            raise TypeError("this Python copies no functions")
        twin.__defaults__ = copy.deepcopy(part.__defaults__, memo)
        twin.__kwdefaults__ = copy.deepcopy(part.__kwdefaults__, memo)
        vars(twin).update(copy.deepcopy(vars(part), memo))
    for cell, fresh in cells.values():
        if _contents(cell):
            fresh.cell_contents = copy.deepcopy(cell.cell_contents, memo)
    return copy.deepcopy(value, memo)


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _holds_model(processor: Any) -> bool:
    return any(isinstance(part, nn.Module) for part in _parts(processor, set()))


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Everything that a copy of `value` would reach, without looking into models, tokenizers and tensors."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, torch.Tensor)):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, (nn.Module, PreTrainedTokenizerBase, torch.Generator, types.ModuleType)):
        return
    if isinstance(value, dict):
        inner: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif isinstance(value, types.MethodType):  # copied with its object
        inner = [value.__self__]
    elif isinstance(value, functools.partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, types.FunctionType):
        inner = [value.__defaults__, value.__kwdefaults__, vars(value)]
        inner += itertools.chain.from_iterable(map(_contents, value.__closure__ or ()))
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for part in inner:
        yield from _parts(part, seen)


__all__ = ["SpeculativeProcessors", "SpeculativeStopping"]
