"""The batched loop: draft, schedule, verify, commit, for rows that advance at different speeds.

Every round is one packed forward of the target over the windows of all live rows. Everything here lives for one call.
Rows are numbered as the caller gave them; live rows fill the places 0, 1, ... of the caches, and when a text ends the
last live row moves into its place.
"""

from __future__ import annotations

import functools
import time
from array import array
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput, logging

from .attention import use_ragged_attention
from .batch.drafting import Drafts, RowDrafting
from .batch.inputs import BatchInputs
from .batch.outputs import TokenRecords
from .batch.processors import RowProcessors, no_token_left
from .batch.schedule import RoundSchedule
from .batch.stopping import RowStopping
from .batch.trace import RoundTrace, RowCounts
from .cache import RaggedCache
from .captured import CapturedRounds, CaptureError, Needs, reason_against
from .captured_loop import CapturedLoop, CapturedRound
from .generation_config import DraftingOptions
from .modeling_dspark import DSparkDrafter
from .ragged_context import swap_items, to_the_front
from .sampling import RowNoise, Verdict, accept, accept_greedy, best
from .strict import check_repeats, filled, tokens_of_a_step
from .target import TargetTaps, few_rows_linears, learned_positions
from .telemetry import DSparkGenerateOutput, GenerationStats
from .windows import VerifyWindow


logger = logging.get_logger(__name__)

PREFILL_TOKENS = 8192  # packed tokens of a prompt forward


@torch.inference_mode(False)  # caches outlive the call, and later ones write to them
def batched_decoding(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DSparkDrafter,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> ModelOutput | torch.LongTensor:
    """
    Generates for a batch of prompts with a DSpark drafter.

    The tokens are those of plain generation (greedy), or follow its law (sampling), with these differences:

    - A row that has ended is followed by padding. Plain generation does so only if the call has an end-of-sequence
      token; otherwise it goes on with tokens of that row until all rows have ended.
    - Scores, logits and hidden states behind a row's end, and hidden states of padding, are zeros.
    - A user's processor or criterion is asked about one row at a time, as in a call for that row alone, and no more
      once the row has ended. One that keeps state is copied for each row. `max_time` is looked at once a round.
    - Where processors leave no token, this is an error; plain greedy decoding goes on with token 0.
    - Padding takes no room in windows of sliding or compressed attention, and inside a text recurrent states do not
      decay over it. In plain generation it does, and they do.

    Args:
        target (`PreTrainedModel`): The model whose distribution is kept.
        input_ids (`torch.LongTensor` of shape `(rows, length)`): Prompts, padded on the left.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepares them.
        drafter (`DSparkDrafter`): The drafter.
        streamer (`BaseStreamer`, *optional*): Receives the tokens of a single row as they are committed.

    Returns:
        The token ids, or a [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        NotImplementedError: a legal request that the batched loop does not serve.
        ValueError: options or inputs contradict each other.
    """
    if generation_config.output_attentions:
        raise NotImplementedError(
            "output_attentions=True is not possible in the batched loop, whose attention keeps no weights: leave it "
            "out, or generate without the drafter, or, if no layer keeps a recurrent state, for one prompt at a time "
            "with dspark_loop='transformers'."
        )
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"A streamer shows one text, and this call has {input_ids.shape[0]}: leave it out.")
    batch = Batch(target, input_ids, logits_processor, stopping_criteria, generation_config, drafter, model_kwargs)
    return batch.decode(streamer)


class Batch:
    """The state of one call."""

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        drafter: DSparkDrafter,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.drafter, self.config = target, drafter.bind_target(target), config
        self.device = input_ids.device
        self.options = DraftingOptions.resolve(config, drafter)
        rows, prompt = input_ids.shape
        self._stopping = RowStopping(stopping_criteria, int(config.max_length))
        self.start, self.max_length = prompt, self._stopping.max_length
        self.text = input_ids.new_zeros(rows, self.max_length, dtype=torch.long)  # and drafts behind their ends
        self.text[:, :prompt] = input_ids
        self.ends = [prompt] * rows  # tokens of each text
        self.places = list(range(rows))  # row in each place of the caches
        self.live = rows
        self.stats = GenerationStats(confidences=[array("f") for _ in range(rows)])
        wants, kinds = bool(config.return_dict_in_generate), ("scores", "logits", "hidden_states")
        wanted = {kind: wants and bool(getattr(config, f"output_{kind}")) for kind in kinds}
        self.records = TokenRecords(rows, **wanted)
        self.taps = TargetTaps(target, drafter.config.target_layer_ids, keep_all=self.records.hidden_states)
        self._eos_ids = self._stopping.eos_ids
        self._processors = RowProcessors(logits_processor, rows, self._eos_ids)
        self._row_by_row = self._processors.may_run_models or self._stopping.may_run_models
        self._seeds = [] if self.options.seed is None else self.options.row_seeds(rows)
        self._drafting = RowDrafting(
            drafter, self._processors, self.options.confidence_threshold, self._eos_ids, self.device
        )
        self._noise: RowNoise | None = None  # when sampling; PyTorch's generator gives seeds only once all is settled
        self._vocabulary = 0  # of the target's logits; known after the first forward
        self._gamma = drafter.config.num_draft_tokens
        self._drawn: torch.Tensor | None = None  # uniforms of the round: drafts, their tests, the bonus
        self._schedule = RoundSchedule(self.options, target, drafter, rows)
        self._trace = RoundTrace.asked_for(self.options, bool(config.do_sample))
        self._positions_end = learned_positions(target)
        self.captured: CapturedRounds | None = None
        self._loop: CapturedLoop | None = None
        self.begun = False  # prompts have been read
        # last of all: from here on the cache of an earlier call, or what captured rounds work on, is ours
        self.inputs = BatchInputs.read(
            target, drafter, input_ids, config, self.max_length, model_kwargs, self._new_cache
        )
        self.cache: RaggedCache = self.inputs.cache

    def decode(self, streamer: BaseStreamer | None, into: Cache | None = None) -> ModelOutput | torch.LongTensor:
        """The whole call. `into`, an empty cache of Transformers for a single text, is filled in the place of ours."""
        with self, torch.no_grad(), self.taps, few_rows_linears(self.target, self.drafter), self.attention():
            tokens = self.prefill()
            self.begun = True
            while True:
                if streamer is not None and tokens[0]:
                    streamer.put(torch.tensor(tokens[0]))
                if not self.live:
                    break
                tokens = self.captured_round() if self.plays_graphs else self.round()
            if streamer is not None:
                streamer.end()
            return self.output(into)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.captured is not None:
            self.captured.give_back(error, read=self.begun)

    @property
    def plays_graphs(self) -> bool:
        """Whether the next round is a captured one."""
        return self.captured is not None and self.captured.failure is None

    def _new_cache(self) -> RaggedCache:
        reason = reason_against(
            self.target,
            self.drafter,
            self.options,
            row_by_row=self._row_by_row,
            records=self.records.wanted,
            last_position=self._positions_end is not None,
        )
        if reason is None:
            compiling = None if self.config.disable_compile else self.config.compile_config
            lent = CapturedRounds.lend(Needs(self.target, self.drafter, len(self.ends), self.max_length, compiling))
            if isinstance(lent, CapturedRounds):
                self.captured, self.taps = lent, lent.taps
                return lent.cache
            reason = lent
        if self.options.use_cuda_graphs is True:
            raise NotImplementedError(
                f"use_cuda_graphs=True: the rounds of this call cannot be captured ({reason}). Leave it at 'auto'."
            )
        logger.info(f"DSpark captures no rounds of this call: {reason}.")
        return RaggedCache(self.target, self.drafter, len(self.ends), self.max_length)

    def attention(self) -> AbstractContextManager[Any]:
        """Ours for the whole call. Where others' code may run the target as well, only its own forwards have it."""
        return nullcontext() if self._row_by_row else use_ragged_attention(self.target)

    # ---- the steps of a round ---------------------------------------------------------------------------------------

    def prefill(self) -> list[list[int]]:
        """Reads all prompts and commits the first token of each row. Returns the new tokens by row."""
        rows, inputs = len(self.ends), self.inputs
        if self.config.do_sample:
            self._noise = RowNoise(self._seeds or self.options.row_seeds(rows))
        left = [len(ids) - done for ids, done in zip(inputs.ids, self.cache.lengths, strict=True)]
        last: torch.Tensor | None = None
        while any(left):
            share = max(1, PREFILL_TOKENS // sum(map(bool, left)))
            widths = [min(share, count) for count in left]
            lengths = list(self.cache.lengths)
            window = VerifyWindow.pack(lengths, widths, self.device, certain=True)
            spans = [(lengths[row], lengths[row] + widths[row]) for row in range(rows)]
            ids = torch.cat([inputs.ids[row][a:b] for row, (a, b) in enumerate(spans)])
            positions = torch.cat([inputs.positions[row][a:b] for row, (a, b) in enumerate(spans)])
            left = [count - width for count, width in zip(left, widths, strict=True)]
            finals = [row for row in range(rows) if widths[row] and not left[row]]
            ends = torch.tensor(widths).cumsum(0) - 1
            keep = (ends[finals] if finals else ends[:1]).to(self.device)
            outputs, logits = self._forward(ids, positions, window, keep)
            self._extend(outputs, positions, window, widths)
            last = logits.new_empty(rows, logits.shape[1]) if last is None else last
            last[finals] = logits[: len(finals)]
            self.records.keep_prompt(outputs, window, inputs.columns, self.start)
        assert last is not None  # for the type checker
        scores = self._processors(self.text, range(rows), self.ends, last.clone())
        if self._noise is not None:
            self._drawn = self._noise(range(rows), 2 * self._gamma + 1, self.device)
        none = self.text.new_empty(rows, 0)
        kept, _ = self._commit(none, self._judge(scores[:, None], none, None, [0] * rows), scores[:, None])
        self.records.keep_tokens(self.places, kept, [1] * rows, scores, last, None)
        return self._retire(kept)

    def round(self) -> list[list[int]]:
        """One round over the live rows. Returns the new tokens by row."""
        began = time.perf_counter()
        rows = self.places[: self.live]
        caps = [self._most_drafts(place) for place in range(self.live)]
        context = sum(self.cache.lengths[: self.live]) / self.live
        widths = self._schedule.widths(rows, caps, context)
        drafts = self._draft(widths)
        drafted, usable = time.perf_counter(), drafts.usable.tolist()
        confidence = None if drafts.confidence is None else drafts.confidence.cpu()
        lengths = self._schedule.lengths(rows, confidence, usable, context)
        sent = usable if self.options.verify_mode == "cap-accept" else lengths

        places = list(range(self.live))
        window = VerifyWindow.pack(self.cache.lengths[: self.live], [1 + count for count in sent], self.device)
        anchors = self.text[rows, [self.ends[row] - 1 for row in rows]]
        ids = window.packed(torch.cat((anchors[:, None], drafts.tokens), dim=1))
        positions = window.columns + torch.tensor(self.inputs.shifts, device=self.device)[rows][window.rows]
        outputs, logits = self._forward(ids, positions, window)
        rows_of_tokens = [rows[place] for place in places for _ in range(1 + sent[place])]
        ends = [self.ends[row] + k for row, count in zip(rows, sent, strict=True) for k in range(1 + count)]
        scores = self._processors(self.text, rows_of_tokens, ends, logits.clone() if self.records.logits else logits)
        by_row = window.padded(scores)
        verdict = self._judge(by_row, drafts.tokens, drafts.probs, lengths)
        kept, accepted = self._commit(drafts.tokens, verdict, by_row)
        self.records.keep_tokens(rows, kept, [1 + count for count in sent], scores, logits, outputs)
        self._extend(outputs, positions, window, [len(tokens) for tokens in kept])
        seconds = drafted - began, time.perf_counter() - drafted
        if self._trace is not None:  # before the table learns from the round
            tested = verdict if sent == lengths else self._judge(by_row, drafts.tokens, drafts.probs, sent)
            starts = [self.ends[row] - len(tokens) for row, tokens in zip(rows, kept, strict=True)]
            done = list(map(self._stopping.done, rows))
            counts = RowCounts(rows, starts, usable, lengths, sent, accepted, tested.accepted.tolist(), kept, done)
            self._trace.add(counts, drafts, by_row, context, seconds, self._schedule.table)
        drafting = [width > 0 and self._processors.can_speculate for width in widths]
        self._schedule.record(rows, drafting, lengths, accepted, len(ids), context, seconds)
        self._count(rows, sent, accepted, kept, seconds)
        if self.config.return_dict_in_generate:
            known = [[]] * self.live if confidence is None else confidence.tolist()
            for row, count, values in zip(rows, sent, known, strict=True):
                self.stats.confidences[row].extend(values[:count])
        return self._retire(kept)

    def captured_round(self) -> list[list[int]]:
        """Sends one round off, and commits the one before. Returns the new tokens of that, by row."""
        if self._loop is None:
            assert self.captured is not None  # for the type checker
            self._loop = CapturedLoop(
                self.captured,
                self.places[: self.live],
                self.text,
                self.ends,
                self.inputs.shifts,
                self._processors,
                self._eos_ids,
                self._schedule.captured,
                self._noise,
                width=self.options.width,
                vocabulary=self._vocabulary,
                limit=self.max_length,
            )
        try:
            return self._commit_captured(self._loop, self._loop.step())
        except CaptureError as error:
            if self.options.use_cuda_graphs is True:
                raise
            logger.warning(f"DSpark goes on without CUDA graphs: {error}.")
            tokens = self._commit_captured(self._loop, self._loop.leave())
            self._leave_graphs(self._loop)
            return tokens

    def _commit_captured(self, loop: CapturedLoop, done: CapturedRound | None) -> list[list[int]]:
        by_row: list[list[int]] = [[] for _ in self.ends]
        if done is None:
            return by_row
        for row, tokens, failed in zip(done.rows, done.tokens, done.failed, strict=True):
            if failed:
                raise no_token_left(row)
            by_row[row] = tokens
            self._stopping.kept(row, self.text, self.ends[row], tokens)
            self.ends[row] += len(tokens)
            if self._stopping.done(row):
                loop.end(row)
                self.live -= 1
        cost = done.size, done.total, done.context, done.seconds
        self._schedule.captured.record(*cost, done.sent, done.accepted, done.confidence)
        self._count(done.rows, done.sent, done.accepted, done.tokens, (0.0, done.seconds))
        if self.config.return_dict_in_generate and done.confidence is not None:
            for row, count, values in zip(done.rows, done.sent, done.confidence.tolist(), strict=True):
                self.stats.confidences[row].extend(values[:count])
        if not self.live:
            self._leave_graphs(loop)
        return by_row

    def _leave_graphs(self, loop: CapturedLoop) -> None:
        loop.write_back(self.text)
        self.places[: len(loop.order)] = loop.order
        self.cache.context.live = self.live

    def _draft(self, caps: list[int]) -> Drafts:
        """Up to `caps` drafts for each place; their tokens are also written behind the texts."""
        rows = self.places[: self.live]
        if self._noise is not None:  # as many numbers in every round, whatever comes of it
            self._drawn = self._noise(rows, 2 * self._gamma + 1, self.device)
        chosen = [place for place, cap in enumerate(caps) if cap]
        if not chosen or not self._processors.can_speculate:
            return Drafts.none(self.text, self.live)
        everyone = len(chosen) == self.live
        state = [
            (row, self.ends[row], self.cache.lengths[place] + self.inputs.shifts[row], caps[place])
            for place, row in ((place, rows[place]) for place in chosen)
        ]
        drafts = self._drafting(
            self.text,
            *torch.tensor(state, device=self.device).T,
            width=max(caps),
            context=self.cache.context if everyone else self.cache.context.picked(chosen),
            drawn=self._drawn if self._drawn is None or everyone else self._drawn[chosen],
            vocabulary=self._vocabulary,
        )
        return drafts.among(chosen, self.live)

    # ---- parts of a round -------------------------------------------------------------------------------------------

    def _most_drafts(self, place: int) -> int:
        """Drafts that still have room in a row's text, behind which the bonus has its own."""
        row = self.places[place]
        most = min(self.options.width, self.max_length - self.ends[row] - 1)
        if self._positions_end is not None:
            most = min(most, self._positions_end - 1 - self.cache.lengths[place] - self.inputs.shifts[row])
        return max(most, 0)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, window: VerifyWindow, keep: torch.Tensor | None = None
    ) -> tuple[ModelOutput, torch.Tensor]:
        """
        The target's outputs over packed tokens, and float32 logits `(total, vocab)` of all of them, or of those that
        `keep` names.
        """
        total = len(ids)
        if strict := self.options.strict_greedy and not window.certain:
            full = tokens_of_a_step(len(self.ends), self._gamma)
            ids, positions, window = filled(ids, full), filled(positions, full), window.filled(full)
        with use_ragged_attention(self.target), self.cache.reading(window):
            step = functools.partial(self.taps.step, ids, positions, window, self.cache, keep)
            if window.certain and window.width > 1 and self.captured is not None and self.captured.reads_prompts():
                outputs, logits = self.captured.quickly(step)
            else:
                outputs, logits = step(quick=False)
        self._vocabulary = logits.shape[-1]
        if strict:
            check_repeats(logits[total - 1 :])
            logits = logits[:total]
        return outputs, logits

    def _extend(self, outputs: ModelOutput, positions: torch.Tensor, window: VerifyWindow, counts: list[int]) -> None:
        """Commits the first `counts` tokens of each row's window to both caches."""
        taps = self.taps.read(outputs, self.drafter.device, self.drafter.dtype)
        if not window.certain:
            limits = torch.tensor(counts, device=self.device)
            keep = window.offsets < limits[window.rows]
            window = window.only(keep)
            taps, positions = taps[:, : len(keep)][:, keep.to(taps.device)], positions[keep]
        self.cache.context.extend(self.drafter, taps, positions[None], window)
        for place, count in enumerate(counts):
            self.cache.lengths[place] += count

    def _judge(
        self, scores: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor | None, lengths: list[int]
    ) -> Verdict:
        """Accepts or replaces drafts by `(rows, width + 1, vocab)` scores; `lengths` of each row's are admitted."""
        width, admitted = scores.shape[1] - 1, torch.tensor(lengths, device=self.device)
        tokens = tokens[:, :width]
        if self._drawn is None:
            greatest, ids = best(scores)
            verdict = accept_greedy(ids, tokens, admitted)
            chosen = greatest.gather(1, verdict.accepted[:, None]).squeeze(1)
            # NaN, or no token that is allowed; a draw notices both itself
            return verdict._replace(bonus=torch.where(chosen > float("-inf"), verdict.bonus, scores.shape[-1]))
        if probs is None:
            probs = scores.new_zeros(len(lengths), width, scores.shape[-1])
        tests, bonus = self._drawn[:, self._gamma : self._gamma + width], self._drawn[:, -1]
        return accept(scores.softmax(dim=-1), probs[:, :width], tokens, tests, bonus, admitted)

    def _commit(
        self, tokens: torch.Tensor, verdict: Verdict, scores: torch.Tensor
    ) -> tuple[list[list[int]], list[int]]:
        """Commits accepted drafts and bonus of each place. Returns the tokens kept, and how many were drafts."""
        accepted, bonus = torch.stack(verdict).tolist()
        if max(bonus) >= self._vocabulary:
            row = self.places[bonus.index(max(bonus))]
            raise no_token_left(row)
        rows = self.places[: len(bonus)]
        index = torch.tensor(rows, device=self.device)
        ends = torch.tensor([self.ends[row] for row in rows], device=self.device)
        self.text[index, ends + verdict.accepted] = verdict.bonus
        kept = []
        drafts = tokens.tolist()
        for place, (row, count, last) in enumerate(zip(rows, accepted, bonus, strict=True)):
            new = [*drafts[place][:count], last]
            seen = self.records.scores_with(row, scores[place, : count + 1])
            new = new[: self._stopping.kept(row, self.text, self.ends[row], new, seen)]
            self.ends[row] += len(new)
            self._processors.commit(row, self.ends[row])
            kept.append(new)
        return kept, [min(count, len(new)) for count, new in zip(accepted, kept, strict=True)]

    def _count(
        self, rows: list[int], sent: list[int], accepted: list[int], kept: list[list[int]], seconds: tuple[float, ...]
    ) -> None:
        self.stats.record_rows(len(self.ends), rows, sent, accepted, list(map(len, kept)))
        if self.cache.recurrent is not None:
            self.stats.reread_tokens.append(self.cache.recurrent.reread)
        self.stats.draft_seconds += seconds[0]
        self.stats.verify_seconds += seconds[1]

    def _retire(self, kept: list[list[int]]) -> list[list[int]]:
        """Takes rows whose text has ended out of the loop; returns the new tokens of all rows, by row."""
        by_row: list[list[int]] = [[] for _ in self.ends]
        for row, tokens in zip(self.places, kept, strict=False):
            by_row[row] = tokens
        done = [self._stopping.done(row) for row in self.places[: self.live]]
        pairs = to_the_front(done)
        swap_items(self.places, *pairs)
        self.cache.swap_rows(*pairs)
        self.live -= sum(done)
        self.cache.context.live = self.live
        return by_row

    def output(self, into: Cache | None = None) -> ModelOutput | torch.LongTensor:
        """What `generate` returns, see [`~Batch.decode`]."""
        length = max(self.ends)
        sequences = self.text[:, :length]
        behind = torch.arange(length, device=self.device) >= torch.tensor(self.ends, device=self.device)[:, None]
        sequences = sequences.masked_fill(behind, self.inputs.pad_id)
        if into is not None:
            self.cache.fill(into, 0)
        elif self.config.return_dict_in_generate or self.inputs.continued:  # someone will hold the cache
            order = [self.places.index(row) for row in range(len(self.ends))]
            if self.captured is None:
                self.cache.rearrange(order, self.cache.context.capacity)
            else:  # whose own stays where it is
                self.cache = self.cache.copied(order, self.max_length)
            new = (self.text[row, self.start : end] for row, end in enumerate(self.ends))
            self.cache.ids = [torch.cat(parts) for parts in zip(self.inputs.ids, new, strict=True)]
        if not self.config.return_dict_in_generate:
            return sequences
        self.stats.schedule = self._schedule.figures()
        return DSparkGenerateOutput(
            sequences=sequences,
            cache=self.cache if into is None else into,
            dspark=self.stats,
            **self.records.assembled(length - self.start),
        )


__all__ = ["Batch", "batched_decoding"]
