"""
A round of the batched loop as one function of tensors whose shapes never change: the form that a captured graph can
replay.

Rows, drafted tokens of a block, packed tokens of the window, capacity of the caches: all are fixed. What changes from
round to round, lengths and texts and which rows are alive, lies in tensors, and nothing is read back. A window that is
not full is filled up with tokens of no text: they are written to the last entry of the row behind those of the round,
which no text reaches. Rejected tokens stay where they were written: their row's number of entries does not count them,
and the next window overwrites them.

The number of tokens that all rows together may send is part of the shape, so it has to be known before the round
starts, as the lagged scheduler knows it. What the anchors of live rows leave of it is the drafts' budget.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch.nn import functional as F

from . import ragged_ops
from .backbone_dspark import KeysValues
from .batch.drafting import Drafts, Quick, RowDrafting, ends_text, plain
from .batch.processors import RowProcessors
from .cache import RaggedCache
from .configuration_dspark import SLIDING, DSparkConfig
from .masks_dspark import Masks
from .modeling_dspark import DSparkDrafter
from .ragged_context import RaggedContext
from .sampling import accept, accept_greedy, best
from .scheduling import survival, top_k_lengths
from .target import TargetTaps
from .windows import VerifyWindow


class RoundResult(NamedTuple):
    """
    What a round did; every tensor is on the device.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, width + 1)`): New tokens; the first `kept` of each row count.
        kept (`torch.LongTensor` of shape `(rows,)`): Tokens committed, 0 for a row that had ended before.
        accepted (`torch.LongTensor` of shape `(rows,)`): Drafts among them.
        sent (`torch.LongTensor` of shape `(rows,)`): Drafts that the target checked.
        confidence (`torch.FloatTensor` of shape `(rows, width)`, *optional*): Of the drafts.
        failed (`torch.BoolTensor` of shape `(rows,)`): The target's scores left no token to choose.
    """

    tokens: torch.Tensor
    kept: torch.Tensor
    accepted: torch.Tensor
    sent: torch.Tensor
    confidence: torch.Tensor | None
    failed: torch.Tensor


class StaticContext(RaggedContext):
    """
    What a [`RaggedContext`] holds, shared with it, for its first `len(entries)` rows. Where kernels serve the device,
    blocks are staged behind their own row's entries; elsewhere behind the capacity of all.
    """

    def __init__(self, context: RaggedContext, entries: torch.Tensor) -> None:
        vars(self).update(vars(context))
        self.live, self._entries = len(entries), entries
        self._kernels = ragged_ops.served(self._places)
        starts = torch.arange(self.live + 1, device=entries.device) * self._block_size
        self._spans = torch.stack((torch.zeros_like(starts), starts)).int()
        tokens = torch.arange(self.live * self._block_size, device=entries.device)
        self._block = torch.stack((tokens // self._block_size, tokens % self._block_size))

    @property  # type: ignore[misc]  # there is nothing to set
    def length(self) -> int:  # type: ignore[override]
        """All entries that a row can have."""
        return self.capacity

    @property  # type: ignore[misc]
    def has_gaps(self) -> bool:  # type: ignore[override]
        """Rows end somewhere in front of a block."""
        return True

    @property
    def positions(self) -> torch.Tensor:
        """`(live, capacity)` absolute positions of the committed tokens; -1 behind a row's last."""
        behind = torch.arange(self.capacity, device=self._entries.device) >= self._entries[:, None]
        return self._places[: self.live].masked_fill(behind.to(self._places.device), -1)

    def stage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Writes a block's entries; returns views of all live rows, or with kernels the whole buffers."""
        if not self._kernels:
            return super().stage(layer, keys, values)
        buffers = self._buffer(layer, keys, values)
        places = torch.stack((self._block[0], self._entries[self._block[0]] + self._block[1]))
        packed = (new.transpose(1, 2).flatten(0, 1) for new in (keys, values))
        ragged_ops.write(*packed, *buffers, places)
        return buffers

    def attention(self, config: DSparkConfig) -> Masks | None:
        """The kernels' attention of a block, for each kind of layers, where they know all that the layers ask for."""
        anchored = config.sliding_window is not None and config.sliding_window_from == "anchor"
        if not self._kernels or config.has_attention_sinks or config.is_sparse or anchored:
            return None
        self._spans[0, :-1] = self._entries
        return {kind: functools.partial(self._attend, config, kind) for kind in dict.fromkeys(config.layer_types)}

    def _attend(
        self,
        config: DSparkConfig,
        kind: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """What `(rows, heads, block_size, head_dim)` queries mix to, over the whole buffers of keys and values."""
        rows, heads, size, _ = query.shape
        mixed = ragged_ops.attend(
            query.transpose(1, 2).flatten(0, 1),
            key,
            value,
            self._spans,
            scale,
            kind in config.causal_layer_types,
            config.sliding_window if kind == SLIDING else None,
            None,
            None,
            size,
            self.capacity,
        )
        return mixed.view(rows, size, heads, -1).transpose(1, 2)


class RoundState:
    """
    Where the texts of a call stand, in tensors that rounds write to. Each has a place for every row there may ever be.

    Args:
        rows (`int`): Most rows.
        length (`int`): Most tokens of a text.
        width (`int`): Most drafted tokens of a block.
        device (`torch.device`): Where texts are.

    Attributes:
        text (`torch.LongTensor` of shape `(rows, length + 1)`): Prompts and committed tokens; the last column is
            nobody's.
        ends, entries, shifts (`torch.LongTensor` of shape `(rows,)`): Tokens of each text; its entries in the caches;
            what a token's position is ahead of the number of entries before it.
        starts (`torch.LongTensor` of shape `(rows,)`): Where processors begin to read each text.
        most, limit (`torch.LongTensor` of shape `()`): Tokens that a row may draft; tokens with which a text ends.
        live (`torch.BoolTensor` of shape `(rows,)`): Whether a text goes on.
        uniforms (`torch.DoubleTensor` of shape `(rows, 2 * width + 1)`): When sampling, the noise of the coming round:
            drafts, their tests, the bonus.
    """

    def __init__(self, rows: int, length: int, width: int, device: torch.device) -> None:
        self.text = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        # each alone: a compiler would have to ask which of them share their memory
        self.ends, self.entries, self.shifts, self.starts = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4)
        )
        self.most = torch.tensor(width, device=device)
        self.limit = torch.tensor(length, device=device)
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(rows, 2 * width + 1, dtype=torch.float64, device=device)

    def first(self, rows: int) -> RoundState:
        """Views of the first rows."""
        some = copy.copy(self)
        for name, tensor in vars(self).items():
            if tensor.dim():
                setattr(some, name, tensor[:rows])
        return some


class StaticRound:
    """
    Rounds of fixed shape over the first rows of a state.

    Args:
        drafter (`DSparkDrafter`): Bound to its target.
        taps (`TargetTaps`): Of the target.
        cache (`RaggedCache`): With one row more than there are texts; each text has `capacity` room.
        state (`RoundState`): Of these rows alone.
        processors (`RowProcessors`): Of the call; all rows must share them.
        eos_ids (`Collection[int]`): Any of them ends a text.
        vocabulary (`int`): Of the target's logits.
        sampling (`bool`): Whether tokens are drawn.
        quick (`Callable`): What makes a function of tensors quicker. Rounds that draft nothing do without, as their
            shapes are others.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        taps: TargetTaps,
        cache: RaggedCache,
        state: RoundState,
        processors: RowProcessors,
        eos_ids: Collection[int],
        *,
        vocabulary: int,
        sampling: bool,
        quick: Quick = plain,
    ) -> None:
        self.state, self.width, self._quick = state, state.uniforms.shape[1] // 2, quick
        rows, device = len(state.ends), state.text.device
        self._drafter, self._taps, self._cache = drafter, taps, cache
        self._processors = processors.reading_from(state.starts)
        self._context = StaticContext(cache.context, state.entries)
        self._drafting = RowDrafting(drafter, self._processors, 0.0, eos_ids, device, quick)
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
        self._rows, self._vocabulary, self._sampling = torch.arange(rows, device=device), vocabulary, sampling

    def __call__(self, total: int, drafting: bool = True) -> RoundResult:
        """
        One round in which all rows together send `total` tokens, anchors included, or less if there are no more.

        Args:
            total (`int`): At least the rows whose text goes on.
            drafting (`bool`): Without it, rows send their anchors alone.
        """
        state, rows, capacity = self.state, len(self._rows), self._cache.context.capacity
        quick = self._quick if drafting else plain
        drafts = self._draft() if drafting else Drafts.none(state.text, rows)
        cut = total < drafts.tokens.numel() + rows
        confidence = None if drafts.confidence is None else drafts.confidence.to(state.text.device)
        plan = quick(_planned)(state, drafts.tokens, drafts.usable, confidence, total, capacity, cut)
        window = VerifyWindow.over(plan.places, plan.spans, rows + 1, (self.width + 1, capacity, capacity))
        with self._cache.stepping(window):
            outputs, logits = self._taps.step(plan.ids, plan.positions, window, self._cache)
        scores = self._processors(state.text, plan.owners, plan.prefixes, logits)
        taps = self._taps.read(outputs, self._drafter.device, self._drafter.dtype)
        self._cache.context.extend(self._drafter, taps, plan.positions[None], window)
        tokens, kept, accepted, failed = quick(_closed)(
            state,
            scores,
            plan.checked,
            drafts.tokens,
            drafts.probs,
            plan.sent,
            self._eos,
            self._vocabulary,
            self._sampling,
        )
        self._cache.take(kept)
        return RoundResult(tokens, kept, accepted, plan.sent, drafts.confidence, failed)

    def _draft(self) -> Drafts:
        state = self.state
        room = (state.limit - 1 - state.ends).clamp(min=0)  # behind the drafts the bonus has its place
        return self._drafting(
            state.text,
            self._rows,
            state.ends,
            state.entries + state.shifts,
            torch.where(state.live, torch.minimum(room, state.most), 0),
            width=self.width,
            context=self._context,
            drawn=state.uniforms if self._sampling else None,
            vocabulary=self._vocabulary,
        )


class _Plan(NamedTuple):
    """
    What a round sends.

    Args:
        sent (`torch.LongTensor` of shape `(rows,)`): Drafts of each row.
        places, spans: As a [`VerifyWindow`] has them; the row behind the last has the tokens of no text.
        ids, positions (`torch.LongTensor` of shape `(total,)`): The packed tokens.
        owners, prefixes (`torch.LongTensor` of shape `(total,)`): Row of each token, and the tokens up to it.
        checked (`torch.LongTensor` of shape `(rows, width + 1)`): Place of each of a row's tokens; where it sends
            fewer, anything.
    """

    sent: torch.Tensor
    places: torch.Tensor
    spans: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor
    prefixes: torch.Tensor
    checked: torch.Tensor


def _planned(
    state: RoundState,
    tokens: torch.Tensor,
    usable: torch.Tensor,
    confidence: torch.Tensor | None,
    total: int,
    capacity: int,
    cut: bool,
) -> _Plan:
    """Windows of anchors and drafts, packed, and tokens of no text up to `total`; `cut` where there are too many."""
    sent, device = usable, usable.device
    if cut:
        certain = torch.ones_like(tokens) if confidence is None else confidence
        sent = top_k_lengths(survival(certain), total - state.live.sum(), usable)
    counts = torch.where(state.live, 1 + sent, 0)
    ends = counts.cumsum(dim=0)
    starts, packed = ends - counts, torch.arange(total, device=device)
    rows = torch.searchsorted(ends, packed, right=True)
    spare, owners = rows == len(counts), rows.clamp(max=len(counts) - 1)
    offsets = torch.where(spare, 0, packed - starts[owners])
    columns = torch.where(spare, capacity - 1, state.entries[owners] + offsets)
    anchors = state.text.gather(1, state.ends[:, None] - 1)
    ids = torch.where(spare, 0, torch.cat((anchors, tokens), dim=1)[owners, offsets])
    positions = torch.where(spare, 0, columns + state.shifts[owners])
    return _Plan(
        sent,
        torch.stack((rows, columns, offsets)),
        torch.stack((F.pad(state.entries, (0, 1)), F.pad(ends, (1, 0)))).int(),
        ids,
        positions,
        owners,
        state.ends[owners] + offsets,
        (starts[:, None] + torch.arange(tokens.shape[1] + 1, device=device)).clamp(max=total - 1),
    )


def _closed(
    state: RoundState,
    scores: torch.Tensor,
    checked: torch.Tensor,
    drafted: torch.Tensor,
    probs: torch.Tensor | None,
    sent: torch.Tensor,
    eos: torch.Tensor,
    vocabulary: int,
    sampling: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepts or replaces drafts by packed `(total, vocab)` scores and commits; some of what [`RoundResult`] holds."""
    (count, drafts), width = drafted.shape, state.uniforms.shape[1] // 2
    if sampling:
        if probs is None:
            probs = scores.new_zeros(count, drafts, vocabulary)
        tests, last = state.uniforms[:, width : width + drafts], state.uniforms[:, -1]
        accepted, bonus = accept(scores.softmax(dim=-1)[checked], probs, drafted, tests, last, sent)
    else:
        greatest, ids = best(scores)
        accepted, bonus = accept_greedy(ids[checked], drafted, sent)
        chosen = greatest[checked].gather(1, accepted[:, None]).squeeze(1)
        bonus = torch.where(chosen > float("-inf"), bonus, vocabulary)  # there may be no token to choose
    offsets = torch.arange(width + 1, device=drafted.device)
    failed = state.live & (bonus >= vocabulary)
    padded = F.pad(drafted, (0, width + 1 - drafts))
    tokens = torch.where(offsets < accepted[:, None], padded, bonus[:, None])
    ended = ends_text(tokens, eos) | (state.ends[:, None] + offsets + 1 >= state.limit)
    before = F.pad(ended[:, :-1], (1, 0)).long().cumsum(dim=1)
    counts = (before == 0) & (offsets <= accepted[:, None]) & state.live[:, None]
    kept = counts.sum(dim=1)
    places = torch.where(counts, state.ends[:, None] + offsets, state.text.shape[1] - 1)
    rows = torch.arange(count, device=kept.device)
    state.text.index_put_((rows[:, None], places), tokens)  # a compiler would copy the whole text to scatter into it
    state.ends.add_(kept)
    state.entries.add_(kept)
    state.live.logical_and_(~((ended & counts).any(dim=1) | failed))
    return tokens, kept, torch.minimum(accepted, kept), failed


__all__ = ["RoundResult", "RoundState", "StaticContext", "StaticRound"]
