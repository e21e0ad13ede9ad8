"""Logits processors and stopping criteria under speculation: each committed position sees what plain decoding would
show it.

The loop processes logits of drafted positions before it knows which of them survive. Most processors of Transformers
depend on their arguments only; one that keeps state (a user's grammar, a watermark, the unconditional branch of
classifier-free guidance) must not notice.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.utils import logging


logger = logging.get_logger(__name__)

# the processors of Transformers that remember earlier calls; all others there are functions of their arguments
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
_LIBRARY = "transformers.generation.logits_process"


class SpeculativeProcessors(LogitsProcessorList):
    """
    The processors of a call, safe to run on positions that may be rejected.

    The first position of a round is always committed, so the processors themselves run there. Later positions run on
    copies, and [`~SpeculativeProcessors.commit`] replays those that were committed. So each processor is called
    exactly as in plain decoding: once for each committed position, in order.
    """

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        super().__init__(processors)
        self._stateful = {index for index, processor in enumerate(self) if not _is_stateless(processor)}
        self._copies: LogitsProcessorList | None = None
        self._speculative: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._round_open = False
        self.can_speculate = self._can_copy()

    def _can_copy(self) -> bool:
        for index in self._stateful:
            try:
                _copied(self[index])
            except Exception as error:  # whatever a user's class raises when it is copied
                logger.warning_once(
                    f"{type(self[index]).__name__} keeps state and cannot be copied ({error}), so nothing is drafted "
                    "in this call. A `__deepcopy__` method would allow it."
                )
                return False
        return True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not self._stateful:
            return super().__call__(input_ids, scores, **kwargs)
        if not self._round_open:
            self._round_open = True
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
        self._copies, self._speculative, self._round_open = None, [], False

    def for_drafting(self) -> LogitsProcessorList:
        """
        Processors to run on the drafter's logits. One that runs a model is left out: it would cost more than the draft
        saves.
        """
        return self._copied_list(without_models=True) if self._stateful else LogitsProcessorList(self)

    def _copied_list(self, without_models: bool = False) -> LogitsProcessorList:
        return LogitsProcessorList(
            _copied(processor) if index in self._stateful else processor
            for index, processor in enumerate(self)
            if not (without_models and index in self._stateful and _holds_model(processor))
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


def _is_stateless(processor: Any) -> bool:
    return type(processor).__module__ == _LIBRARY and type(processor).__name__ not in _STATEFUL


def _copied(processor: Any) -> Any:
    """A copy with state of its own. Models and tokenizers are shared: they are large, and nothing decoding changes."""
    shared: dict[int, Any] = {}
    for part in _parts(processor, set()):
        if isinstance(part, torch.Generator):
            shared[id(part)] = part.clone_state()
        elif isinstance(part, (nn.Module, PreTrainedTokenizerBase)):
            shared[id(part)] = part
    return copy.deepcopy(processor, shared)


def _holds_model(processor: Any) -> bool:
    return any(isinstance(part, nn.Module) for part in _parts(processor, set()))


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Everything that a copy of `value` would reach, without looking into models, tokenizers and tensors."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, types.ModuleType, torch.Tensor)):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, (nn.Module, PreTrainedTokenizerBase, torch.Generator)):
        return
    if isinstance(value, dict):
        inner: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif isinstance(value, types.MethodType):  # copied with its object
        inner = [value.__self__]
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for part in inner:
        yield from _parts(part, seen)


__all__ = ["SpeculativeProcessors", "SpeculativeStopping"]
