"""
`python -m benchmarks.study`: what each part of a drafter brings, all of them trained alike.

All arms step together on the same batches, anchors and states of the frozen target, which runs once for all of them;
the arms that learn from other texts have a batch of theirs of the same size. Then each decodes the same prompts.

    dspark data answers --target TARGET --prompts prompts.jsonl.gz --out answers
    dspark data answers --target TARGET --prompts written.jsonl.gz --out asked               # answered by the target
    dspark data answers --target TARGET --prompts written.jsonl.gz --out written --written   # and by people
    python -m benchmarks.study --target TARGET --answers answers --asked asked --written written \
        --prompts humaneval.jsonl mt-bench.jsonl --minutes 6 --out study

On a GPU, `--jobs 8` spreads the arms over processes that keep step: alone, a process spends most of its time launching
small kernels. Run again, it goes on with what is missing: arms with a result are left alone, trained ones are only
measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.together import Company, launch
from transformers_dspark import DSparkDrafter
from transformers_dspark.cli import device_of, positive_float, positive_int, seed, target_place, write_json
from transformers_dspark.environment import environment
from transformers_dspark.evaluation.plots import draw
from transformers_dspark.evaluation.prompts import read_conversations
from transformers_dspark.evaluation.runs import Pair, converse
from transformers_dspark.telemetry import GenerationStats
from transformers_dspark.training import AnswerDataset, DrafterShape, load_sequences, new_drafter
from transformers_dspark.training.anchors import pack_blocks, sample_anchors
from transformers_dspark.training.data import Sequences, TokenBatches, collate
from transformers_dspark.training.held_out import target_states
from transformers_dspark.training.losses import loss_sums
from transformers_dspark.training.objective import Objective
from transformers_dspark.training.optimizer import MuonWithAdamW
from transformers_dspark.training.pace import share_of_peak
from transformers_dspark.training.trainer import ATTENTION, PARTS


WARM = 3  # steps whose time, with what is compiled in them, says nothing about the others
STRETCH = 5  # steps between two looks at the clock
LOGITS = 2**32  # bytes of them at one time, and of what the losses make of them
TEXTS = ("answers", "asked", "written")


@dataclass(frozen=True)
class Arm:
    """A drafter of the study: its sequential head (`"none"`: DFlash), drafted tokens, layers, and what it reads."""

    name: str
    head: str = "vanilla"
    block_size: int = 7
    num_layers: int = 5
    text: str = "answers"

    def shape(self, rank: int, draft_vocab_size: int | None) -> DrafterShape:
        head = {"markov_rank": 0} if self.head == "none" else {"markov_rank": rank, "markov_head_type": self.head}
        size = {"block_size": self.block_size, "num_layers": self.num_layers, "draft_vocab_size": draft_vocab_size}
        return DrafterShape(**head, **size)

    @property
    def cost(self) -> int:
        """Of a step, roughly and in no unit: what a layer takes to launch, and then for each drafted token."""
        return (2 + self.num_layers) * (10 + self.block_size)


SIZES = (7, 4, 8, 12, 16)
ARMS = [
    *(Arm(f"{name}-{k}", head, k) for k in SIZES for name, head in (("dflash", "none"), ("markov", "vanilla"))),
    Arm("gated-7", "gated"),
    Arm("rnn-7", "rnn"),
    Arm("markov-7-depth-1", num_layers=1),
    Arm("markov-7-depth-2", num_layers=2),
    Arm("markov-7-asked", text="asked"),
    Arm("markov-7-written", text="written"),
]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=(__doc__ or "").split("\n")[1])
    add = parser.add_argument
    add("--target", type=target_place, required=True)
    for text in TEXTS:
        add(f"--{text}", type=Path, nargs="+", metavar="DIR", help="by `dspark data answers`, see docs/training.md")
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="what is decoded in the end")
    add("--out", type=Path, required=True, metavar="DIR", help="a file for each arm, study.json, pictures, drafters")
    add("--arms", nargs="+", choices=[arm.name for arm in ARMS], metavar="NAME", help="(default: all with a text)")
    add("--steps", type=positive_int, default=100_000, metavar="N", help="at most so many (default: %(default)s)")
    add("--minutes", type=positive_float, default=6.0, help="until training ends, loading included (default: 6)")
    add(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="processes that share the arms (default: 1)",
    )
    add("--tokens-per-batch", type=positive_int, default=16384, metavar="N", help="(default: %(default)s)")
    add("--anchors", type=positive_int, default=32, metavar="N", help="of a text and step (default: %(default)s)")
    add("--max-length", type=positive_int, default=640, metavar="N", help="(default: %(default)s)")
    add("--learning-rate", type=positive_float, default=2e-3, help="(default: %(default)s)")
    add("--markov-rank", type=positive_int, default=256, metavar="N", help="(default: %(default)s)")
    add("--draft-vocab-size", type=int, default=16384, metavar="N", help="0 for all tokens (default: %(default)s)")
    add("--rows", type=positive_int, default=160, metavar="N", help="decoded together (default: %(default)s)")
    add("--limit", type=positive_int, metavar="N", help="prompts of a file")
    add("--max-new-tokens", type=positive_int, default=96, metavar="N", help="of an answer (default: %(default)s)")
    add("--seed", type=seed, default=0)
    add("--device")
    add("--member", nargs=4, help=argparse.SUPPRESS)  # of `--jobs`: file, index, count and when the first one began
    args = parser.parse_args(words)
    args.words = list(sys.argv[1:] if words is None else words)
    return study(args)


def study(args: argparse.Namespace) -> int:
    """Trains what has no drafter yet, measures what has no result yet, shows all of it."""
    begun = time.perf_counter()
    named = [arm for arm in ARMS if arm.name in args.arms] if args.arms else ARMS
    arms = [arm for arm in named if getattr(args, arm.text)]
    if left_out := [arm.name for arm in named if arm not in arms]:
        print(f"without their texts: {', '.join(left_out)}")
    args.out.mkdir(parents=True, exist_ok=True)
    waiting = [arm for arm in arms if not (args.out / f"{arm.name}.json").exists()]
    new = [arm for arm in waiting if not (args.out / "drafters" / arm.name / "training.json").exists()]
    if args.jobs > 1 and len(waiting) > 1:
        share_out(args, new, waiting, begun)
    elif waiting:
        train_and_measure(args, new, waiting, begun)
    if args.member is None:
        report(args, device_of(args.device))
    return 0


def share_out(args: argparse.Namespace, new: list[Arm], waiting: list[Arm], begun: float) -> None:
    """Has every arm trained and measured by one of several processes, spread over the GPUs that there are."""
    trained = [arm for arm in waiting if arm not in new]
    groups = [group for arms in (new, trained) for group in shares(arms, args.jobs) if group]
    learning, gpus = sum(group[0] in new for group in groups), torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        words = []
        for index, group in enumerate(groups):
            own = [*args.words, "--jobs", "1", "--arms", *(arm.name for arm in group)]
            if gpus and args.device is None:
                own += ["--device", f"cuda:{index % gpus}"]
            words.append([*own, "--member", f"{folder}/steps", str(index), str(learning), repr(begun)])
        launch("benchmarks.study", words)


def shares(arms: Sequence[Arm], count: int) -> list[list[Arm]]:
    """The arms in groups of nearly the same work, part of which is the target's, once for each text."""
    groups: list[list[Arm]] = [[] for _ in range(count)]

    def work(group: list[Arm]) -> int:
        return sum(arm.cost for arm in group) + 60 * len({arm.text for arm in group})

    for arm in sorted(arms, key=lambda arm: -arm.cost):
        min(groups, key=lambda group: work([*group, arm])).append(arm)
    return groups


def train_and_measure(args: argparse.Namespace, new: list[Arm], waiting: list[Arm], begun: float) -> None:
    """Trains the new arms side by side, then decodes with each that waits for a result."""
    company = None
    if args.member is not None:
        file, index, count, first_begun = args.member
        company, begun = Company(Path(file), int(index), int(count)), float(first_begun)  # the same clock for all
    device = device_of(args.device)
    prompts = {path.stem: [turns[:1] for turns in read_conversations(path, args.limit)] for path in args.prompts}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    if new:
        train(new, target, args, begun, company)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the graphs of decoding, in this process and the others
    for arm in waiting:
        folder = args.out / "drafters" / arm.name
        drafter = DSparkDrafter.from_pretrained(folder, dtype=dtype).to(device).eval().bind_target(target)
        start = time.perf_counter()
        results = judge(Pair(target, tokenizer, drafter), prompts, args)
        trained = json.loads((folder / "training.json").read_text())
        result = {**asdict(arm), **trained, "results": results, "decoding_seconds": time.perf_counter() - start}
        write_json(args.out / f"{arm.name}.json", result)
        lengths = ", ".join(f"{r['accepted_length']:.3f} at T={r['temperature']:g}" for r in results)
        print(f"{arm.name}: {lengths} ({result['decoding_seconds']:.0f} s)", flush=True)


# ---- training


@dataclass
class Learner:
    """An arm's drafter and what moves it."""

    arm: Arm
    drafter: DSparkDrafter
    objective: Objective
    optimizer: MuonWithAdamW
    parts: torch.Tensor  # the latest mean losses
    positions: torch.Tensor  # learned so far

    @classmethod
    def of(cls, arm: Arm, target: PreTrainedModel, answers: Sequences, args: argparse.Namespace) -> Learner:
        vocabulary = min(args.draft_vocab_size, target.config.get_text_config().vocab_size) or None
        drafter = new_drafter(target, arm.shape(args.markov_rank, vocabulary), answers, args.seed).train()
        sums = torch.compile(loss_sums, dynamic=True) if target.device.type == "cuda" else loss_sums
        optimizer = MuonWithAdamW(drafter.named_parameters(), args.learning_rate)
        counts = torch.zeros(len(PARTS), device=target.device), torch.zeros((), device=target.device)
        return cls(arm, drafter, Objective(drafter, chunk_bytes=LOGITS, sums=sums), optimizer, *counts)

    def step(self, batch: dict[str, torch.Tensor], states: Sequence[torch.Tensor], rate: float) -> None:
        """One step on a batch with the target's taps and last hidden states."""
        config = self.drafter.config
        form = config.block_size, config.mask_token_id, config.first_draft_row
        blocks = pack_blocks(batch["input_ids"], batch["loss_mask"], batch["anchors"], batch["keep"], *form)
        cuda = states[0].device.type == "cuda"
        with torch.autocast(states[0].device.type, torch.bfloat16, enabled=cuda):
            loss = self.objective(*states, blocks)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.parts = torch.stack([getattr(loss, name) for name in PARTS])
        self.positions += loss.positions


def batches(sequences: Sequences, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of a text with their anchors, without end."""
    sampler = TokenBatches(np.array([len(ids) for ids in sequences.ids]), args.tokens_per_batch, args.seed)
    answers, number = AnswerDataset(sequences), 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for group in sampler:
            batch = collate([answers[index] for index in group])
            generators = [np.random.default_rng((args.seed, number, index)) for index in group]
            anchors, keep = sample_anchors(batch["loss_mask"], args.anchors, generators)
            yield batch | {"anchors": anchors, "keep": keep}
            number += 1


def load_texts(args: argparse.Namespace) -> dict[str, Sequences]:
    """
    The texts by name. What the target answered and what people wrote to the same prompts are cut to equal length, so
    that neither arm of the two sees its text more often.
    """
    given = {name: load_sequences(getattr(args, name), args.max_length) for name in TEXTS if getattr(args, name)}
    pair = {name: np.cumsum([len(ids) for ids in given[name].ids]) for name in ("asked", "written") if name in given}
    for name, ends in pair.items():
        kept = int(np.searchsorted(ends, min(sums[-1] for sums in pair.values()), side="right"))
        given[name] = given[name].pick(np.arange(max(1, kept)))
    return given


def train(
    arms: Sequence[Arm], target: PreTrainedModel, args: argparse.Namespace, begun: float, company: Company | None
) -> None:
    """Trains arms side by side and saves their drafters; in company all take as many steps."""
    if target.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64  # arms differ in more ways than the default allows for
    given = load_texts(args)
    first = next(iter(given.values()))  # decides for all arms which tokens are drafted
    names = [text for text in given if any(arm.text == text for arm in arms)]
    texts = {name: batches(given[name], args) for name in names}
    learners = [Learner.of(arm, target, first, args) for arm in arms]
    layers = learners[0].drafter.config.target_layer_ids
    deadline, warm, step, tokens = begun + 60 * args.minutes, begun, 0, dict.fromkeys(names, 0)
    print(f"{len(arms)} arms, {args.minutes:g} minutes", flush=True)
    by_time = 0.0

    def time_used() -> float:
        return (time.perf_counter() - warm) / max(1e-9, deadline - warm)

    while True:
        if step >= WARM and (step - WARM) % STRETCH == 0:
            if step == WARM:
                warm = time.perf_counter()
            by_time = time_used() if company is None else company.agree(f"step {step}", time_used)
        done = max(step / args.steps, by_time)
        if done >= 1:
            break
        rate = args.learning_rate * share_of_peak(done, step, 0.04, 0.02)
        for name, stream in texts.items():
            batch = {key: value.to(target.device, non_blocking=True) for key, value in next(stream).items()}
            tokens[name] += batch["input_ids"].numel()
            with sdpa_kernel(ATTENTION):
                with torch.no_grad():
                    states = target_states(target, batch["input_ids"], layers)
                for learner in learners:
                    if learner.arm.text == name:
                        learner.step(batch, states, rate)
        step += 1
        if step == WARM or step % 50 == 0:
            losses = " ".join(f"{learner.arm.name} {float(learner.parts[1]):.3f}" for learner in learners)
            seconds = time.perf_counter() - begun  # behind the losses, which wait for the device
            print(f"{seconds:6.0f} s  step {step}  l1: {losses}", flush=True)
    seconds = time.perf_counter() - warm
    for learner in learners:
        folder = args.out / "drafters" / learner.arm.name
        learner.drafter.to(torch.bfloat16).save_pretrained(folder)
        trained = {"steps": step, "tokens": tokens[learner.arm.text], "positions": int(learner.positions)}
        trained["tokens_of_text"] = sum(map(len, given[learner.arm.text].ids))
        trained |= {"parameters": sum(p.numel() for p in learner.drafter.parameters())}
        trained |= dict(zip(PARTS, learner.parts.tolist(), strict=True))
        write_json(folder / "training.json", {**trained, "seconds_per_step_of_all": seconds / max(1, step - WARM)})


# ---- measuring


def judge(pair: Pair, prompts: dict[str, list[list[str]]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decodes all prompts together, greedily and at temperature 1."""
    texts, results = list(itertools.chain(*prompts.values())), []
    for temperature in (0.0, 1.0):
        form = args.rows, args.max_new_tokens, temperature, args.seed
        calls = converse(pair, texts, *form, disable_compile=True)  # compiling would take longer than decoding
        stats, first, by_file = GenerationStats.merge(call.stats for call in calls), 0, {}
        for name, own in prompts.items():
            rows = list(itertools.chain(*stats.accepted_lengths[first : first + len(own)]))
            by_file[name], first = sum(rows) / max(1, len(rows)), first + len(own)
        results.append(
            {
                "temperature": temperature,
                "answers": len(texts),
                "accepted_length": stats.mean_accepted_length,
                "accepted_length_by_prompts": by_file,
                "acceptance_by_position": stats.acceptance_by_position,
            }
        )
    return results


def report(args: argparse.Namespace, device: torch.device) -> None:
    """Gathers the files of all arms, also those of other runs into the same folder, and shows them."""
    files = {arm.name: args.out / f"{arm.name}.json" for arm in ARMS}
    found = [json.loads(file.read_text()) for file in files.values() if file.exists()]
    if not found:
        return
    sets = list(found[0]["results"][0]["accepted_length_by_prompts"])
    table = Table("arm", "steps", *(f"{name}, T={t}" for t in (0, 1) for name in [*sets, "all"]))
    for arm in found:
        cells = [str(arm["steps"])]
        for result in arm["results"]:
            lengths = [*result["accepted_length_by_prompts"].values(), result["accepted_length"]]
            cells += [f"{length:.3f}" for length in lengths]
        table.add_row(arm["name"], *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    lengths = {arm["name"]: np.array([r["accepted_length"] for r in arm["results"]]) for arm in found}
    gains = {
        gamma: (lengths[f"markov-{gamma}"] / lengths[f"dflash-{gamma}"] - 1).tolist()
        for gamma in sorted(SIZES)
        if {f"markov-{gamma}", f"dflash-{gamma}"} <= lengths.keys()
    }
    for gamma, (greedy, sampled) in gains.items():
        print(f"Markov over DFlash at {gamma} drafted tokens: {greedy:+.1%} greedy, {sampled:+.1%} at temperature 1")
    settings = {k: v for k, v in vars(args).items() if k not in ("words", "out", "member")}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    settings = {k: [Path(x).name for x in v] if isinstance(v, list) else v for k, v in settings.items()}
    words = ["python", "-m", "benchmarks.study", *args.words]
    result = {"environment": environment(device, words), "settings": settings, "gains": gains, "arms": found}
    write_json(args.out / "study.json", result)
    try:
        print("\n".join(map(str, draw(result, args.out, "study"))))
    except ImportError as error:
        print(error)


if __name__ == "__main__":
    sys.exit(main())
