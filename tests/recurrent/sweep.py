"""
Greedy generation with a drafter against plain decoding on tiny targets with recurrent state: tokens, and after each
round the states. Rejection is forced at every slot of a block in turn.

    python -m tests.recurrent.sweep --json benchmarks/results/recurrent_identity.json [FAMILY ...]

100 prompts of each family alone and 100 in batches of 5; blocks of 1 to 8 take turns, or all serve each prompt
(`--every-block`). What the file already has is not done again, so that a run can be continued.

States are compared in float32, and for fewer prompts in float64 as well: what is rounding there shrinks by nine
orders of magnitude, and what is not stays.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.batch.conftest import BatchLab, ragged, texts_of
from transformers_dspark import DSparkGenerationConfig, GenerationStats
from transformers_dspark.decoding import Batch
from transformers_dspark.environment import environment

from .families import RECURRENT


NEW_TOKENS = 24


class RecurrentLab(BatchLab):
    def target(self, kind="llama", **changes):
        if kind in RECURRENT and kind not in self.targets:
            torch.manual_seed(0)
            self.targets[kind] = RECURRENT[kind]().eval()
        return self.targets[kind] if kind in RECURRENT else super().target(kind, **changes)


class Watched:
    """The batched loop, with the states of all rows compared after every round."""

    def __init__(self, plain_states: list[list[dict]] | None) -> None:
        self._plain, self.compared, self.rejected = plain_states, 0, set()
        self.gap, self.gap_of_a_token = 0.0, float("inf")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, the batched loop's rounds are followed by a comparison."""
        play = Batch.round

        def round_and_compare(batch: Batch) -> list[list[int]]:
            tokens = play(batch)
            self._compare(batch)
            return tokens

        with mock.patch.object(Batch, "round", round_and_compare):
            yield

    def reject(self, stats: GenerationStats) -> None:
        """Notes the slots at which drafts were rejected."""
        for sent, accepted in zip(stats.verify_lengths, stats.accepted_lengths, strict=True):
            self.rejected |= {tokens - 1 for width, tokens in zip(sent, accepted, strict=True) if tokens <= width}

    def _compare(self, batch: Batch) -> None:
        if self._plain is None:
            return
        for place in range(batch.live):
            length = batch.cache.lengths[place]
            plain = self._plain[batch.places[place]]
            for index, layer in batch.cache.recurrent.states(place, length).items():
                for name, states in plain[length][index].items():
                    for number, state in states.items():
                        found, before = getattr(layer, name)[number], plain[length - 1][index][name][number]
                        self.gap = max(self.gap, gap_between(found, state))
                        self.gap_of_a_token = min(self.gap_of_a_token, gap_between(found, before))
                        self.compared += 1


@torch.no_grad()
def plain_states(target: PreTrainedModel, prompt: list[int], text: list[int]) -> dict[int, dict]:
    """States of plain decoding behind the prompt and behind each later token, by number of tokens and layer."""
    cache, states = DynamicCache(config=target.config), {}
    for done in range(len(prompt), len(text)):
        ids = prompt if done == len(prompt) else text[done - 1 : done]
        positions = torch.arange(done - len(ids), done)[None]
        target(torch.tensor([ids]), position_ids=positions, cache=cache, use_cache=True)
        states[done] = states_of(cache)
    return states


def states_of(cache: DynamicCache) -> dict[int, dict]:
    return {
        index: {
            name: {n: state.clone() for n, state in getattr(layer, name).items() if state is not None}
            for name in ("conv_states", "recurrent_states")
        }
        for index, layer in enumerate(cache.layers)
        if hasattr(layer, "conv_states")
    }


@torch.no_grad()
def gap_of_forms(target: PreTrainedModel, text: list[int], after: dict[int, dict]) -> float:
    """How far the states of plain decoding are from those of the same target that reads a text at once."""
    cache = DynamicCache(config=target.config)
    target(torch.tensor([text]), position_ids=torch.arange(len(text))[None], cache=cache, use_cache=True)
    return max(
        gap_between(state, after[index][name][number])
        for index, names in states_of(cache).items()
        for name, states in names.items()
        for number, state in states.items()
    )


def gap_between(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference of two tensors, relative to that of the second."""
    assert found.shape == expected.shape
    return float((found - expected).double().norm() / expected.double().norm())


@contextmanager
def in_double() -> Iterator[None]:
    """While it lasts, models are made of float64, and what asks for float32 gets float64: states, softmax, norms."""
    default = torch.get_default_dtype()
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def sweep_in_double(kind: str, prompts: dict[int, int]) -> dict:
    """The same as [`sweep`] in float64, with the states of every prompt compared."""
    with in_double():
        lab = RecurrentLab()
        lab.target(kind).set_experts_implementation("eager")  # grouped products know no float64
        return sweep(lab, kind, prompts)


def sweep(
    lab: RecurrentLab,
    kind: str,
    prompts: dict[int, int],
    every_block: bool = False,
    compared: int = 1,
    before: dict | None = None,
    end: float = float("inf"),
) -> dict:
    """
    Args:
        prompts (`dict[int, int]`): By rows of a batch, how many prompts.
        every_block (`bool`): Each prompt is served with blocks of 1 to 8, or they take turns.
        compared (`int`): States are compared for every so manieth batch.
        before (`dict`, *optional*): What an earlier call returned, to go on from.
        end (`float`): By `time.monotonic()`; no batch but the first begins later.

    Returns:
        `dict`: Counts; slots by block at which drafts were rejected; and gaps of states: the largest to plain
            decoding's; the smallest to those of plain decoding one token earlier, which is 0 where a text repeats
            itself; the largest of plain decoding to one reading of the same text.
    """
    target, largest = lab.target(kind), 8
    figures = (
        copy.deepcopy(before)
        if before
        else {
            **dict.fromkeys(("calls", "prompts", "other_tokens", "states"), 0),
            **dict.fromkeys(("largest_gap", "gap_of_plain_forms"), 0.0),
            "smallest_gap_of_a_token": float("inf"),
            "rejected_slots": {},
            "batches": {},
        }
    )
    rejected = figures["rejected_slots"]
    batches = [(rows, seed) for rows, count in prompts.items() for seed in range(count // rows)]
    for rows, seed in batches:
        if seed < figures["batches"].get(str(rows), 0) or (figures["calls"] and time.monotonic() > end):
            continue
        ids, mask = ragged(rows, seed=seed)
        greedy = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        plain = target.generate(ids, attention_mask=mask, **greedy)
        texts, states = texts_of(plain, mask), None
        if seed % compared == 0:
            states = [plain_states(target, text[:-NEW_TOKENS], text) for text in texts]
            pairs = zip(texts, states, strict=True)
            gaps = [gap_of_forms(target, text[:-1], after[len(text) - 1]) for text, after in pairs]
            figures["gap_of_plain_forms"] = max(figures["gap_of_plain_forms"], *gaps)
        for block in range(1, largest + 1) if every_block else [1 + seed % largest]:
            drafter = lab.knowing(texts, block_size=block)
            drafter.rounds = seed // largest  # begins with another slot
            watched = Watched(states)
            config = DSparkGenerationConfig(dspark_loop="batched", return_dict_in_generate=True, **greedy)
            with watched.watching():
                output = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
            watched.reject(output.dspark)
            figures["calls"] += 1
            figures["prompts"] += rows
            figures["other_tokens"] += int((output.sequences != plain).sum())
            figures["states"] += watched.compared
            figures["largest_gap"] = max(figures["largest_gap"], watched.gap)
            figures["smallest_gap_of_a_token"] = min(figures["smallest_gap_of_a_token"], watched.gap_of_a_token)
            rejected[str(block)] = sorted(watched.rejected.union(rejected.get(str(block), [])))
        figures["batches"][str(rows)] = seed + 1
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens and states of recurrent targets against plain decoding.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="(default: all)")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--every-block", action="store_true", help="blocks of 1 to 8 for each prompt: 8 times as long")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many, to be continued")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    measured = environment(torch.device("cpu"), ["python", "-m", "tests.recurrent.sweep", *sys.argv[1:]])
    lab, prompts = RecurrentLab(), {1: args.prompts, 5: args.prompts}
    for kind in args.families or RECURRENT:
        if time.monotonic() > end:
            break
        found = results.setdefault(kind, {"float64": sweep_in_double(kind, {1: 8, 5: 5}), "float32": None, "runs": []})
        done = found["float32"]
        found["float32"] = sweep(lab, kind, prompts, args.every_block, 5, done, end)
        # a file may hold several runs; where one went on from another, of both
        if found["float32"] != done and measured not in found["runs"]:
            found["runs"].append(measured)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{kind}: {found}", flush=True)


if __name__ == "__main__":
    main()
