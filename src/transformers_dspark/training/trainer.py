"""One process, one device: the loop that trains a drafter against its frozen target, and can stop and go on."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..generation_config import eos_ids
from ..modeling_dspark import DSparkDrafter
from ..telemetry import GenerationStats
from .anchors import pack_blocks, sample_anchors
from .arguments import DrafterShape, TrainArguments
from .data import Sequences, batches, count_batches, frequent_tokens, split
from .held_out import held_out_accepted_length, target_states
from .losses import loss_sums
from .objective import Objective


STATE_NAME, LOG_NAME = "state.pt", "log.jsonl"
# Without cuDNN's: that one makes a new plan for each shape, which takes longer than the whole step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _geometry(text: PreTrainedConfig) -> dict[str, Any]:
    """
    Sizes of a backbone beside a target. Only the hidden size has to be the target's; the others follow it where they
    can. Attributes are read as a dictionary, since a configuration with other sizes in some layers refuses `getattr`.
    """
    values = text.to_dict()

    def size(name: str, default: int) -> int:
        value = values.get(text.attribute_map.get(name, name))
        return value if isinstance(value, int) and value > 0 else default

    hidden = text.hidden_size
    heads = size("num_attention_heads", max(1, hidden // 64))
    key_value_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", hidden // heads)
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope  # where kinds of layers have their own, as in Gemma3
    return {
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size", 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads if heads % key_value_heads == 0 else heads,
        "head_dim": max(2, head_dim - head_dim % 2),  # a rotary embedding needs pairs
        "rms_norm_eps": values.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": size("max_position_embeddings", 32768),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0},
    }


def new_drafter(target: PreTrainedModel, shape: DrafterShape, sequences: Sequences, seed: int) -> DSparkDrafter:
    """A fresh drafter of a shape, with the target's geometry, bound to it."""
    text = target.config.get_text_config()
    layers = text.num_hidden_layers
    # the released recipe's spacing: 1, 9, 17, 25, 33 of 36 layers; a target of two layers has only 0, of one only -1
    spread = (min(max(round(1 + i * (layers - 4) / 4), 1), layers - 2) for i in range(5))
    taps = shape.target_layer_ids or tuple(sorted(set(spread)))
    mask_token = shape.mask_token_id
    if mask_token is None:
        mask_token = text.vocab_size - 1 if text.pad_token_id in (None, *eos_ids(text)) else text.pad_token_id
    config = DSparkConfig(
        vocab_size=text.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        num_hidden_layers=shape.num_layers,
        **_geometry(text),
        block_size=shape.block_size,
        mask_token_id=mask_token,
        target_layer_ids=list(taps),
        num_target_layers=layers,
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=shape.markov_rank > 0,
        pad_token_id=text.pad_token_id,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
    )
    torch.manual_seed(seed)
    drafter = DSparkDrafter(config)
    if config.has_reduced_vocabulary:
        kept = frequent_tokens(sequences, config.draft_vocab_size, config.vocab_size)
        drafter.d2t.copy_(kept - torch.arange(len(kept)))
    return drafter.to(target.device).bind_target(target)


def optimizers(drafter: DSparkDrafter, arguments: TrainArguments) -> list[torch.optim.Optimizer]:
    """
    AdamW for everything, or Muon for the backbone's matrices and AdamW for the rest.

    Source: Muon (Jordan et al., 2024) with updates of AdamW's size (Liu et al., 2025), so one rate serves both.
    """
    parameters = dict(drafter.named_parameters())
    matrices = {
        name: p
        for name, p in parameters.items()
        if arguments.optimizer == "muon" and p.ndim == 2 and name.startswith(("layers.", "fc."))
    }
    rest = [p for name, p in parameters.items() if name not in matrices]
    rate, fused = arguments.learning_rate, drafter.device.type == "cuda"
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    ]
    if matrices:
        found.append(torch.optim.Muon(matrices.values(), lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found


class Trainer:
    """
    Args:
        target (`PreTrainedModel`): Frozen; its dtype decides the precision of the matrix products.
        sequences (`Sequences`): The target's own answers.
        out (`Path`): Receives the drafter, `log.jsonl` and, while unfinished, `state.pt` to resume from.
        shape (`DrafterShape`), arguments (`TrainArguments`): See there.

    Raises:
        ValueError: the shape does not fit the target, or the answers are not of its vocabulary or exceed its
            context.
    """

    def __init__(
        self, target: PreTrainedModel, sequences: Sequences, out: Path, shape: DrafterShape, arguments: TrainArguments
    ) -> None:
        self.target, self.out = target.requires_grad_(False).eval(), out
        self.shape, self.arguments = shape, arguments
        text = target.config.get_text_config()
        largest, size = max(int(ids.max()) for ids in sequences.ids), text.vocab_size
        if largest >= size:
            raise ValueError(f"The answers hold token {largest}, the target has {size}: another target wrote them.")
        longest, context = max(map(len, sequences.ids)), _geometry(text)["max_position_embeddings"]
        if longest > context:
            raise ValueError(
                f"The longest answer has {longest} tokens, the target's context {context}: set max_length to that."
            )
        self.train_set, self.held_out_set = split(sequences, arguments.held_out, arguments.seed)
        self.drafter = new_drafter(target, shape, self.train_set, arguments.seed).train()
        cuda = target.device.type == "cuda"
        sums = torch.compile(loss_sums, dynamic=True) if cuda else loss_sums
        self.objective = Objective(self.drafter, arguments.losses, sums=sums)
        self.optimizers = optimizers(self.drafter, arguments)
        self.steps_per_epoch = count_batches(self.train_set, arguments.tokens_per_batch, arguments.seed)
        self.max_steps = max(1, round(arguments.epochs * self.steps_per_epoch))
        self.step, self.seconds, self.evaluations = 0, 0.0, 0
        out.mkdir(parents=True, exist_ok=True)

    def progress(self) -> float:
        """Share of the nearer budget that is used, 0..1."""
        by_time = self.seconds / self.arguments.max_seconds if self.arguments.max_seconds else 0.0
        return min(1.0, max(self.step / self.max_steps, by_time))

    def learning_rate(self) -> float:
        a, done = self.arguments, self.progress()
        if done < a.warmup:
            # a tenth of the peak is reached by steps alone: at first no budget has moved
            return a.learning_rate * max(done / a.warmup, min(1.0, (self.step + 1) / 100) * 0.1)
        cosine = 0.5 * (1 + math.cos(math.pi * (done - a.warmup) / (1 - a.warmup)))
        return a.learning_rate * (a.final_rate + (1 - a.final_rate) * cosine)

    def train(self) -> GenerationStats:
        """Runs until a budget is used, from where a previous run of the same folder stopped. Saves the drafter."""
        self._resume()
        bar = tqdm(total=self.max_steps, initial=self.step, unit="step", desc="training")
        saved = clock = time.perf_counter()
        for input_ids, loss_mask in self._batches():
            record = self._step(input_ids, loss_mask)
            now = time.perf_counter()
            self.seconds, clock = self.seconds + now - clock, now
            self.step += 1
            bar.update()
            if self.step % 20 == 0 or self.progress() >= 1:
                self._log(bar, {name: round(float(value), 5) for name, value in record.items()})
            if self.progress() >= (self.evaluations + 1) / self.arguments.evaluations and self.progress() < 1:
                self._evaluate(bar)
                clock = time.perf_counter()
            if self.progress() >= 1:
                break
            if now - saved > self.arguments.save_seconds:
                self._save_state()
                saved = time.perf_counter()
        bar.close()
        self.drafter.to(torch.bfloat16)  # what is saved is what is measured
        result = self._evaluate(bar)
        self.drafter.save_pretrained(self.out)
        (self.out / STATE_NAME).unlink(missing_ok=True)
        return result

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        done = self.step
        for epoch in itertools.count():
            for number, batch in enumerate(self._epoch(epoch)):
                if done <= number:
                    yield batch
            done = max(0, done - number - 1)

    def _epoch(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return batches(self.train_set, self.arguments.tokens_per_batch, self.arguments.seed, epoch)

    def _step(self, input_ids: torch.Tensor, loss_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        device, config, a = self.target.device, self.drafter.config, self.arguments
        generators = [np.random.default_rng((a.seed, self.step, row)) for row in range(len(input_ids))]
        anchors, keep = sample_anchors(loss_mask, a.anchors, generators)
        form = config.block_size, config.mask_token_id, config.first_draft_row
        blocks = pack_blocks(input_ids, loss_mask, anchors, keep, *form).to(device)
        input_ids = input_ids.to(device, non_blocking=True)
        rate = self.learning_rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with self._precision(), sdpa_kernel(ATTENTION):
            with torch.no_grad():
                taps, last_hidden = target_states(self.target, input_ids, config.target_layer_ids)
            loss = self.objective(taps, last_hidden, blocks)
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), a.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return {
            **{name: part.detach() for name, part in loss.__dict__.items()},
            "gradient_norm": norm,
            "learning_rate": torch.tensor(rate),
        }

    def _precision(self) -> torch.autocast:
        low = self.target.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.target.device.type, dtype=self.target.dtype if low else torch.bfloat16, enabled=low)

    def _evaluate(self, bar: tqdm) -> GenerationStats:
        self.drafter.eval()
        with self._precision():
            result = held_out_accepted_length(self.drafter, self.target, self.held_out_set)
        self.drafter.train()
        self.evaluations += 1
        by_position = [share if share is None else round(share, 4) for share in result.acceptance_by_position]
        figure = round(result.mean_accepted_length, 4) if result.rounds else None
        self._log(bar, {"held_out_accepted_length": figure, "held_out_by_position": by_position})
        return result

    def _log(self, bar: tqdm, record: dict[str, Any]) -> None:
        record = {"step": self.step, "seconds": round(self.seconds, 1), **record}
        with open(self.out / LOG_NAME, "a") as log:
            log.write(json.dumps(record) + "\n")
        shown = {name: record[name] for name in ("total", "held_out_accepted_length") if name in record}
        bar.set_postfix(shown)

    def _save_state(self) -> None:
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": {"step": self.step, "seconds": self.seconds, "evaluations": self.evaluations},
            "run": self._identity(),
        }
        part = self.out / (STATE_NAME + ".part")
        torch.save(state, part)
        os.replace(part, self.out / STATE_NAME)

    def _resume(self) -> None:
        path = self.out / STATE_NAME
        if not path.exists():
            if (self.out / "config.json").exists():
                raise ValueError(
                    f"{self.out} holds a finished drafter; give another folder, or remove it to train again."
                )
            self._cut_log()
            return
        damaged = f"{path} is damaged, or no state of a training run; remove it to train from the beginning"
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
        except Exception as error:  # whatever a file that is no archive of tensors makes of the unpickler
            raise ValueError(f"{damaged} ({type(error).__name__}).") from error
        if not isinstance(state, dict) or not isinstance(theirs := state.get("run"), dict):
            raise ValueError(f"{damaged}.")
        ours = self._identity()
        if changed := [name for name in ours if theirs.get(name) != ours[name]]:
            raise ValueError(
                f"{path} belongs to a run with other settings ({', '.join(changed)}); use the same, or another folder."
            )
        try:
            self.drafter.load_state_dict(state["drafter"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            counters = state["counters"]
            self.step, self.seconds, self.evaluations = (counters[k] for k in ("step", "seconds", "evaluations"))
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{damaged} ({type(error).__name__}).") from error
        self._cut_log()

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one that stopped."""
        config = self.drafter.config
        target = {"hidden size": config.hidden_size, "vocabulary": config.vocab_size, "taps": config.target_layer_ids}
        answers = {"answers": len(self.train_set), "tokens": sum(map(len, self.train_set.ids))}
        return self.arguments.to_dict() | asdict(self.shape) | target | answers

    def _cut_log(self) -> None:
        """Drops what an earlier run logged beyond the step to go on from, and a line that it did not finish."""
        log = self.out / LOG_NAME
        if not log.exists():
            return
        kept = []
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(step := record.get("step"), int) and step <= self.step:
                kept.append(line + "\n")
        log.write_text("".join(kept) if self.step else "")
