"""Continuous batching of plain generation: R slots that decode together and are refilled one by one.

One decode step (embedding, layers, logits, draw, stop rules, bookkeeping) touches only static device tensors, so on
CUDA it is a single graph. The host looks at the flags every so many steps. This module does not know prompts, files or
chat templates.

A row's draws depend on its own seed and text, not on its slot or its batch mates: token k comes from the inverse of
the cumulative distribution at a uniform number hashed from (seed, k).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..cache import ragged_cache
from ..windows import RaggedWindow


logger = logging.getLogger(__name__)

LOOP_TOKENS = 64
LOOP_PERIOD = 16
FILL_TOKENS = 65_536


@dataclass(frozen=True)
class Request:
    """
    A prompt waiting for a slot.

    Args:
        key (`tuple[int, int]`): Caller's name of the request (prompt index, turn).
        ids (`Sequence[int]`): The prompt, at least one token.
        temperature (`float`): 0 is greedy.
        seed (`int`): Seed of the row's draws, 0 .. 2**62.
        max_new_tokens (`int`): Most answer tokens; the slot's capacity may end the answer earlier.
    """

    key: tuple[int, int]
    ids: Sequence[int]
    temperature: float
    seed: int
    max_new_tokens: int


def hashed_uniforms(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    One uniform number a row, a pure function of the row's seed and token count.

    Args:
        seeds (`torch.LongTensor` of shape `(rows,)`): Seeds of the rows.
        counts (`torch.LongTensor` of shape `(rows,)`): Index of the token to draw.

    Returns:
        `torch.FloatTensor` of shape `(rows,)`: In [0, 1), multiples of 2**-24.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), with arithmetic shifts masked into logical ones.
    """

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seeds + (counts + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    x = x ^ shifted(x, 31)
    return shifted(x, 40).to(torch.float32) * 2.0**-24


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """
    Draws one token a row.

    Unlike `sampling.draw` it sums in float32: float64 over a vocabulary would take gigabytes for thousands of rows.

    Args:
        logits (`torch.Tensor` of shape `(rows, vocabulary)`): Raw logits.
        temperatures (`torch.FloatTensor` of shape `(rows,)`): 0 takes the most likely token.
        uniforms (`torch.FloatTensor` of shape `(rows,)`): Noise, in [0, 1).

    Returns:
        `torch.LongTensor` of shape `(rows,)`: Token ids.
    """
    logits = logits.float()
    greedy = logits.argmax(dim=-1)
    warm = temperatures > 0
    cumulative = (logits / temperatures.masked_fill(~warm, 1.0)[:, None]).softmax(dim=-1).cumsum(dim=-1)
    # Just below the total, so that rounding can never select a token beyond the last possible one.
    points = uniforms[:, None] * cumulative[:, -1:] * (1 - 2.0**-22)
    sampled = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return torch.where(warm, sampled, greedy)


class SlotDecoder:
    """
    R slots of a target, each decoding its own sequence.

    The target must already attend through [`~transformers_dspark.attention.use_ragged_attention`].

    Args:
        target ([`PreTrainedModel`]): The model, on its device and in its dtype.
        slots (`int`): Sequences decoded together.
        capacity (`int`): Tokens a slot holds, prompt included; rounded up to a multiple of 8, which attention kernels
            want.
        eos_token_ids (`Iterable[int]`): Tokens that end an answer (and stay in it).
    """

    def __init__(self, target: PreTrainedModel, slots: int, capacity: int, eos_token_ids: Iterable[int]):
        self.target = target
        self.slots = slots
        self.capacity = -(-capacity // 8) * 8
        self.cache = ragged_cache(target.config, slots, self.capacity)
        device = target.device
        self.device = device

        def longs(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=device)

        self.eos = torch.tensor(sorted(eos_token_ids), dtype=torch.long, device=device)  # [eos]
        self.row_index = torch.arange(slots, device=device)  # [rows]
        self.periods = torch.arange(1, LOOP_PERIOD + 1, device=device)  # [periods]
        self.last = longs(slots)  # the token whose keys and values come next
        self.lengths = longs(slots)  # cache entries, which is also the position of `last`
        self.counts = longs(slots)  # answer tokens so far
        self.limits = longs(slots)  # answer tokens allowed
        self.seeds = longs(slots)
        self.temperatures = torch.zeros(slots, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.looping = torch.zeros(slots, dtype=torch.bool, device=device)
        self.repeats = longs(slots, LOOP_PERIOD)  # how long the tail has had each period
        # One column more than a row can fill: rows that are not active write there, which needs no branch.
        self.answers = longs(slots, self.capacity + 1)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.wants_graph = device.type == "cuda"

    @torch.inference_mode()
    def fill(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """
        Starts requests in free slots.

        All but a prompt's last token go through the model here; the last one is the first input of the shared step,
        which therefore also draws the first answer token.

        Raises:
            ValueError: A prompt is empty or leaves no room for an answer.
        """
        for request in requests:
            if not 0 < len(request.ids) < self.capacity:
                raise ValueError(
                    f"Prompt {request.key} has {len(request.ids)} tokens; slots of capacity {self.capacity} take 1 to"
                    f" {self.capacity - 1}. Drop the prompt or raise the capacity."
                )
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))
        while order:
            width = max(1, len(requests[order[-1]].ids) - 1)
            group = order[-max(1, FILL_TOKENS // width) :]
            del order[-len(group) :]
            self._fill_group([rows[i] for i in group], [requests[i] for i in group], width)

    def _fill_group(self, rows: list[int], requests: list[Request], width: int) -> None:
        device = self.device
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for i, request in enumerate(requests):
            ids[i, : len(request.ids) - 1] = request.ids[:-1]
        row_index = torch.tensor(rows, device=device)  # [n]
        # A fresh slot must not show its predecessor's entries, nor must the padding of this fill ever be read: both
        # lie at or beyond the row's length, where the step's mask hides them until they are overwritten.
        self.target(
            input_ids=torch.from_numpy(ids).to(device),
            position_ids=torch.arange(width, device=device).expand(len(rows), width),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
            ragged_window=RaggedWindow(rows=row_index),
        )

        def put(name: str, values: list[int] | list[float]) -> None:
            buffer = getattr(self, name)
            buffer[row_index] = torch.tensor(values, dtype=buffer.dtype, device=device)

        put("last", [request.ids[-1] for request in requests])
        put("lengths", [len(request.ids) - 1 for request in requests])
        put("limits", [min(request.max_new_tokens, self.capacity - len(request.ids)) for request in requests])
        put("temperatures", [request.temperature for request in requests])
        put("seeds", [request.seed for request in requests])
        self.counts[row_index] = 0
        self.repeats[row_index] = 0
        self.looping[row_index] = False
        self.active[row_index] = True

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """Advances all slots by `steps` tokens; slots that finish on the way idle."""
        if self.wants_graph and self.graph is None:
            self._capture()
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads active, counts and looping, each of shape `(rows,)`, in one transfer."""
        flags = torch.stack([self.active.long(), self.counts, self.looping.long()]).cpu().numpy()
        return flags[0].astype(bool), flags[1], flags[2].astype(bool)

    def take(self, rows: Sequence[int], counts: np.ndarray) -> list[np.ndarray]:
        """Returns the answers of some slots as arrays of ids."""
        if not len(rows):
            return []
        width = max(1, int(counts[list(rows)].max()))
        block = self.answers[torch.tensor(list(rows), device=self.device), :width].cpu().numpy()
        return [block[i, : counts[row]] for i, row in enumerate(rows)]

    def _step(self) -> None:
        window = RaggedWindow.step(self.lengths, self.capacity, self.target.dtype)
        output = self.target(
            input_ids=self.last[:, None],
            position_ids=self.lengths[:, None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
            ragged_window=window,
        )
        logits = output.logits[:, -1]  # [rows, vocabulary]
        token = draw(logits, self.temperatures, hashed_uniforms(self.seeds, self.counts))  # [rows]

        earlier = self.counts[:, None] - self.periods  # [rows, periods]
        same = self.answers.gather(1, earlier.clamp(min=0)) == token[:, None]
        self.repeats.add_(1).mul_(same & (earlier >= 0))
        loops = (self.repeats >= LOOP_TOKENS - self.periods).any(dim=-1)

        trash = self.answers.shape[1] - 1
        self.answers[self.row_index, self.counts.masked_fill(~self.active, trash)] = token
        self.counts.add_(self.active)
        self.lengths.add_(self.active)
        self.last.copy_(torch.where(self.active, token, self.last))
        ended = (token[:, None] == self.eos).any(dim=-1) | (self.counts >= self.limits)
        self.looping.logical_or_(self.active & loops & ~ended)
        self.active.logical_and_(~(ended | loops))

    def _capture(self) -> None:
        """Captures the step; rows are idle during warm-up, so that nothing moves."""
        saved = self.active.clone()
        self.active.zero_()
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.device), torch.cuda.graph(graph):  # capture is of the current device
                self._step()
            self.graph = graph
        except RuntimeError as error:
            self.wants_graph = False
            torch.cuda.synchronize(self.device)
            logger.warning("the decode step runs without a CUDA graph: %s", error)
        self.active.copy_(saved)
        self.repeats.zero_()


@dataclass(frozen=True)
class Decoded:
    """What came of a request: its new tokens, and whether it was stopped for repeating itself or for lack of time."""

    request: Request
    ids: np.ndarray
    looping: bool
    cut: bool


def decoded(
    decoder: SlotDecoder,
    take: Callable[[int], list[Request]],
    check_every: int = 32,
    max_seconds: float | None = None,
) -> Iterator[tuple[list[Decoded], int]]:
    """
    Keeps all slots busy until there is nothing left to do.

    Args:
        decoder ([`SlotDecoder`]): The slots.
        take (`Callable`): Given a number of free slots, returns at most as many requests; none means that nothing is
            left, unless what comes out brings new ones.
        check_every (`int`): Steps between two looks at the flags.
        max_seconds (`float`, *optional*): Stop after so long; what is unfinished comes out as it stands.

    Yields:
        `tuple[list[Decoded], int]`: At every look, what has finished, and the tokens of what has not.
    """
    began = time.monotonic()
    occupied: dict[int, Request] = {}
    while True:
        free = [row for row in range(decoder.slots) if row not in occupied]
        requests = take(len(free))
        if requests:
            decoder.fill(free[: len(requests)], requests)
            occupied.update(zip(free, requests, strict=False))
        if not occupied:
            return
        decoder.run(check_every)
        active, counts, looping = decoder.read()
        late = max_seconds is not None and time.monotonic() - began > max_seconds
        rows = [row for row in occupied if late or not active[row]]
        done = [
            Decoded(occupied.pop(row), ids, bool(looping[row]), bool(active[row]))
            for row, ids in zip(rows, decoder.take(rows, counts), strict=True)
        ]
        yield done, int(counts[list(occupied)].sum())
        if late:
            return
