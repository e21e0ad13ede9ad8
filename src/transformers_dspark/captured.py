"""
What rounds in captured graphs need to stand where it is from call to call: caches, texts, and the graphs themselves.

A graph reads and writes fixed addresses. So the buffers belong to the drafter and not to a call, and a later call that
fits into them finds its graphs made. They are made anew when the models have changed.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import CompileConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ._compat import has_hooks, is_of_adapters, keeps_recurrent_state
from .batch.processors import RowProcessors
from .cache import RaggedCache
from .generation_config import DraftingOptions
from .graphs import Graph
from .mixers import mixers
from .modeling_dspark import DSparkDrafter
from .quicker import Quicker
from .static_round import RoundResult, RoundState, StaticRound
from .target import TargetTaps
from .window_layers import missing_windows
from .windows import VerifyWindow


logger = logging.get_logger(__name__)

CAPACITY_STEP = 256  # texts of nearly the same length share their graphs
MOST_GRAPHS = 128  # each processor's setting makes others; the oldest goes
GROWTH_SHARE = 0.5  # of free memory, for caches beyond what the call in hand needs
Done = TypeVar("Done")


class Report(NamedTuple):
    """
    A [`RoundResult`] in as few tensors as can be, for its way to the host.

    Args:
        numbers (`torch.LongTensor` of shape `(rows, width + 5)`): Tokens; how many were kept, were accepted drafts,
            were sent; whether the row failed.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): Of the drafts.
    """

    numbers: torch.Tensor
    confidence: torch.Tensor | None


class CaptureError(RuntimeError):
    """A round could not be captured; nothing of it has happened."""


class Needs(NamedTuple):
    """
    What a call asks of captured rounds.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`DSparkDrafter`): Bound to it.
        rows (`int`): Most rows.
        length (`int`): Most tokens of a text.
        compiling (`CompileConfig`, *optional*): How the target's forward and parts of the drafter are compiled; `None`
            leaves them as they are.
    """

    target: PreTrainedModel
    drafter: DSparkDrafter
    rows: int
    length: int
    compiling: CompileConfig | None


class CapturedRounds:
    """
    The buffers and graphs of a pair, for calls of up to a number of rows and tokens.

    Args:
        needs (`Needs`): Of the largest of these calls.
    """

    def __init__(self, needs: Needs) -> None:
        target, drafter, rows, length, compiling = self._needs = needs
        self.cache = RaggedCache(target, drafter, rows + 1, length)
        self.state = RoundState(rows, length, drafter.config.num_draft_tokens, target.device)
        self._target, self._drafter = target, drafter
        try:
            self._quicker = Quicker(target, drafter, self.cache.recurrent, compiling)
        except Exception as error:  # a backend or an option that the compiler does not know
            self._quicker = self._uncompiled(error)
        self.taps = TargetTaps(target, drafter.config.target_layer_ids, step=self._quicker.step)
        self.failure: str | None = None  # why there are no graphs, after a capture that failed
        self._starved = False  # there was too little memory, which says nothing of another call
        self._addresses = _addresses(target, drafter)
        self._graphs: dict[tuple[Any, ...], Graph[Report]] = {}
        self.count = 0  # graphs made so far
        self._pool = _pool(target.device)
        self._lock = threading.Lock()
        self._reads_prompts = False
        self._last_use: torch.cuda.Event | None = None

    @classmethod
    def lend(cls, needs: Needs) -> CapturedRounds | str:
        """
        Those that an earlier call left with the drafter, or new ones, for this call alone until it calls
        [`~CapturedRounds.give_back`]; in words why there are none while another thread has them, or after a capture
        that failed.
        """
        needs = needs._replace(length=-(-needs.length // CAPACITY_STEP) * CAPACITY_STEP)
        found: CapturedRounds | None = needs.drafter.captured
        if found is not None and not found._lock.acquire(blocking=False):
            return "another call has them"
        if found is None or not found._serves(needs):
            made_for = needs if found is None else found._grown(needs)
            needs.drafter.captured = None  # first of all: the old buffers make room for the new
            del found
            found = needs.drafter.captured = cls(made_for)
            found._lock.acquire()
        if found.failure is not None:
            found.give_back()
            return found.failure
        if found._last_use is not None:  # maybe on another stream
            torch.cuda.current_stream(needs.target.device).wait_event(found._last_use)
        found.cache.restart(needs.rows)
        return found

    def give_back(self, error: BaseException | None = None, *, read: bool = True) -> None:
        """
        Ends a call's use. Where memory ran out, all is freed: a smaller call would find no more of it than this one.

        Args:
            error (`BaseException`, *optional*): What ended the call.
            read (`bool`): Whether the prompts had been read. Models that cannot do that are not tried again.
        """
        self._starved |= ran_out_of_memory(error)
        if isinstance(error, NotImplementedError) and not read:
            self.failure = in_a_line(error)
            logger.warning(f"DSpark captures no rounds of this pair: {self.failure}.")
        if self._starved and self._drafter.captured is self:
            self._drafter.captured = None
        self.state.live.fill_(False)
        if self.state.text.is_cuda:
            self._last_use = torch.cuda.current_stream(self.state.text.device).record_event()
        self._lock.release()

    def _serves(self, needs: Needs) -> bool:
        rows, length = self.room
        return needs.rows <= rows and needs.length <= length and self._is_for(needs)

    def _is_for(self, needs: Needs) -> bool:
        pair = needs.target, needs.drafter
        same = self.cache.is_of(*pair) and self._needs.compiling == needs.compiling
        return same and self._addresses == _addresses(*pair)

    def _grown(self, needs: Needs) -> Needs:
        """
        Needs of this call and of those before it, so that calls of two kinds do not take turns in making everything
        anew; what is too small is doubled, so that texts which get longer from call to call do not either. Less where
        that would take more than `GROWTH_SHARE` of the memory, and in the end no more than the call itself needs.
        """
        if not self._is_for(needs):
            return needs
        had, held = self.room, self.cache.nbytes
        most = GROWTH_SHARE * (free_memory(needs.target.device) + held)
        for factor in (2, 1):
            rows, length = (
                before if wanted <= before else max(wanted, factor * before)
                for wanted, before in zip((needs.rows, needs.length), had, strict=True)
            )
            if held * (rows + 1) * length <= most * (had[0] + 1) * had[1]:
                return needs._replace(rows=rows, length=length)
        return needs

    def graph(
        self,
        rows: int,
        total: int,
        drafting: bool,
        processors: RowProcessors,
        eos_ids: Collection[int],
        *,
        vocabulary: int,
        sampling: bool,
    ) -> Graph[Report]:
        """
        Rounds of the first `rows` rows, see [`StaticRound`], to be replayed; captured when they are first asked for.
        The hooks of `taps` have to be in place.

        Args:
            rows (`int`): Rows of the round.
            total (`int`): Tokens that they send.
            drafting (`bool`): Whether they draft.
            processors, eos_ids, vocabulary, sampling: As for [`StaticRound`].

        Raises:
            CaptureError: something in the models cannot be captured or compiled.
        """
        total = max(total, 2)  # for a single token everything would be compiled once more
        key = (rows, total, drafting, processors.signature, frozenset(eos_ids), vocabulary, sampling)
        if key not in self._graphs:
            logger.info(f"DSpark captures rounds of {rows} rows and {total} tokens.")
            static = StaticRound(
                self._drafter,
                self.taps,
                self.cache,
                self.state.first(rows),
                processors,
                eos_ids,
                vocabulary=vocabulary,
                sampling=sampling,
                quick=self._quicker.part,
            )
            self.taps.renew()
            live = self.state.live.clone()
            self.state.live.fill_(False)  # nothing is committed while a round warms up
            try:
                made = self.quickly(
                    lambda: Graph(lambda: _report(static(total, drafting)), self._target.device, self._pool)
                )
            except Exception as error:
                self.failure, self._starved = in_a_line(error), ran_out_of_memory(error)
                raise CaptureError(self.failure) from error
            finally:
                self.state.live.copy_(live)
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = made
            self.count += 1
        return self._graphs[key]

    def quickly(self, work: Callable[[], Done]) -> Done:
        """Done with compiled parts, or without them from the first time on that they do not compile."""
        try:
            with self._quicker():
                return work()
        except Exception as error:  # whatever the models, their libraries or the compiler raise
            self._give_up_compiling(error)
        return self.quickly(work)

    def reads_prompts(self) -> bool:
        """
        Whether the step of rounds also reads prompts, through [`~CapturedRounds.quickly`]: where it is compiled. The
        first time, that happens here, in the form of a round, so that the first call reads its prompts as later ones.
        """
        if self.cache.recurrent is None and self._quicker.compiling is not None and not self._reads_prompts:
            rows, width = len(self.cache.lengths), self._drafter.config.num_draft_tokens + 1
            spare, capacity = self.room[0], self.cache.context.capacity
            places = torch.zeros(3, rows * width, dtype=torch.long, device=self._target.device)
            places[0], places[1] = spare, capacity - 1
            spans = places.new_zeros(2, rows + 1, dtype=torch.int32)
            window = VerifyWindow.over(places, spans, spare + 1, (width, capacity, capacity))
            step = torch.zeros_like(places[0]), torch.zeros_like(places[0]), window, self.cache
            self.taps.step(*step, quick=False)  # layers of the cache are made, outside of the compiler
            self.taps.renew()
            try:
                with self._quicker():
                    self.taps.step(*step)
                self._reads_prompts = True
            except Exception as error:
                self._give_up_compiling(error)
        return self._reads_prompts and self._quicker.compiling is not None

    def _give_up_compiling(self, error: Exception) -> None:
        if self._quicker.compiling is None or ran_out_of_memory(error):
            raise error
        self._quicker = self._uncompiled(error)
        self.taps.forward, self._pool = self._quicker.step, _pool(self._target.device)

    def _uncompiled(self, error: Exception) -> Quicker:
        """What makes rounds quicker where compilation failed."""
        logger.warning(f"DSpark goes on without compiling the rounds of this pair: {in_a_line(error)}.")
        return Quicker(self._target, self._drafter, self.cache.recurrent, None)

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and tokens of each text, for which there are buffers."""
        return self._needs.rows, self._needs.length


def _report(result: RoundResult) -> Report:
    numbers = (result.kept, result.accepted, result.sent, result.failed.long())
    return Report(torch.cat((result.tokens, torch.stack(numbers, dim=1)), dim=1), result.confidence)


def reason_against(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    options: DraftingOptions,
    *,
    row_by_row: bool,
    records: bool,
    last_position: bool,
) -> str | None:
    """
    Why the rounds of a call cannot be captured, in words; `None` if they can.

    Args:
        target (`PreTrainedModel`), drafter (`DSparkDrafter`): The pair.
        options (`DraftingOptions`): Of the call.
        row_by_row (`bool`): A processor or criterion has to be asked about one row at a time.
        records (`bool`): Scores, logits or hidden states are to be returned.
        last_position (`bool`): The target has a table of positions, which ends.
    """
    if reason := _reason_against_device(target, drafter):
        return reason
    compact = options.verify_mode == "compact"
    modules = list(target.modules())
    reasons = {
        "use_cuda_graphs=False": options.use_cuda_graphs is False,
        "a logits processor or stopping criterion is asked about one row at a time": row_by_row,
        "scores, logits or hidden states are to be returned": records,
        "every round is to be reported": options.round_callback is not None,
        "assistant_confidence_threshold cuts blocks": options.confidence_threshold > 0,
        "verify_mode='cap-accept' sends what it does not admit": options.verify_mode == "cap-accept",
        "scheduler='causal' looks at the block in hand": compact and options.scheduler == "causal",
        "strict_greedy=True lets tokens attend one by one": options.strict_greedy,
        "nothing is to be drafted": options.width == 0,
        "the target has a last position": last_position,
        "the target keeps states that are no keys and values": keeps_recurrent_state(target) and not mixers(target),
        "a model is in training mode": target.training or drafter.training,
        "autocast is on": torch.is_autocast_enabled("cuda"),
        "the target carries adapters, which may be switched": any(map(is_of_adapters, modules)),
        "modules of the target have forward hooks": any(map(has_hooks, modules)),
    }
    met = next((reason for reason, met in reasons.items() if met), None)
    return met or missing_windows(target)


def worth_a_try(target: PreTrainedModel, drafter: DSparkDrafter, length: int) -> bool:
    """
    Whether graphs are captured on the pair's device, and caches for a text of that many tokens, which have their whole
    length at once, are there or leave memory to others.
    """
    if _reason_against_device(target, drafter):
        return False
    held = drafter.captured
    if held is not None and length <= held.room[1] and held.cache.is_of(target, drafter):
        return True
    freed = 0 if held is None else held.cache.nbytes
    needed = 3 * length * _entry_bytes(target, drafter)  # the row, a spare one, the caller's
    return needed <= GROWTH_SHARE * (free_memory(target.device) + freed)


def _entry_bytes(target: PreTrainedModel, drafter: DSparkDrafter) -> int:
    """About the bytes of a token's keys and values in all attention layers, as the configurations tell."""

    def numbers(layer: PreTrainedConfig) -> int:
        if latent := getattr(layer, "kv_lora_rank", None):
            return int(latent + layer.qk_rope_head_dim)
        queries = getattr(layer, "num_attention_heads", 0)
        heads = getattr(layer, "num_key_value_heads", None) or queries
        size = getattr(layer, "head_dim", None) or layer.hidden_size // max(1, queries)
        return int(2 * heads * size)

    layers = (*target.config.get_text_config(decoder=True).per_layer_config, *drafter.config.per_layer_config)
    return target.dtype.itemsize * sum(map(numbers, layers))


def _reason_against_device(*models: PreTrainedModel) -> str | None:
    if models[0].device.type != "cuda":  # before every parameter is looked at
        return f"the target is on {models[0].device.type}"
    devices = {tensor.device for model in models for tensor in model.parameters()}
    return "the models lie on several devices" if len(devices) > 1 else None


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated there; infinite where only the system knows."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _pool(device: torch.device) -> Any:
    """Memory for graphs that never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def in_a_line(error: Exception) -> str:
    """What went wrong. The compiler's own first line only announces what comes in the second."""
    first, *more = f"{type(error).__name__}: {error}".split("\n")
    return f"{first} {more[0]}" if more and first.endswith(":") else first.rstrip(".")


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or an error on the way to it, is one of a device's memory."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _addresses(*models: torch.nn.Module) -> tuple[int, ...]:
    """Where the weights are: graphs read them there."""
    tensors = itertools.chain.from_iterable((*model.parameters(), *model.buffers()) for model in models)
    return tuple(tensor.data_ptr() for tensor in tensors)


__all__ = [
    "CaptureError",
    "CapturedRounds",
    "Needs",
    "in_a_line",
    "reason_against",
    "worth_a_try",
]
