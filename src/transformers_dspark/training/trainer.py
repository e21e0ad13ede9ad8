"""The `Trainer` of drafters: the frozen target runs beside the drafter, and nothing but token ids lies on disk."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerControl

from ..lending import lent_forwards
from ..modeling_dspark import DSparkDrafter
from ..target import decoder_layers
from ..telemetry import GenerationStats
from .anchors import Blocks, pack_blocks, sample_anchors
from .arguments import DSparkTrainingArguments
from .data import AnswerDataset, BatchLoader, TokenBatches, collate, sequences_of
from .fresh import check_answers
from .held_out import decoded_accepted_length, held_out_accepted_length, target_states
from .losses import loss_sums
from .objective import Objective
from .optimizer import MuonWithAdamW
from .pace import Pace, share_of_peak
from .state_cache import StateCache, cache_facts


# Without cuDNN's: that one makes a new plan for each shape, which takes longer than the whole step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PARTS = ("cross_entropy", "l1", "confidence")


class DSparkTrainer(Trainer):
    """
    [`~transformers.Trainer`] of a drafter against its frozen target.

    ```python
    >>> drafter = new_drafter(target, DrafterShape(), sequences, seed=0)
    >>> trainer = DSparkTrainer(drafter, DSparkTrainingArguments("out"), target=target, train_dataset=dataset)
    >>> trainer.train()
    ```

    Args:
        model (`DSparkDrafter` or `PeftModel` of one): What is trained. It is bound to the target.
        args (`DSparkTrainingArguments`): See there.
        target (`PreTrainedModel`): Its parameters are frozen. It moves to the trainer's device, unless it is spread
            over several, by `device_map` or `shard_target`. Layers may carry adapters of `peft`.
        train_dataset, eval_dataset (`Dataset`): Rows with `input_ids` and `loss_mask`, or `labels`, such as
            [`AnswerDataset`]. Rows of `eval_dataset` are answers that the target wrote at temperature 0.
        kwargs: As for any `Trainer`.

    Raises:
        ValueError: the drafter does not fit the target, or the answers are not the target's.
        NotImplementedError: a drafter that is to be sharded; or a target whose layers are to be compiled and were not
            found.
    """

    args: DSparkTrainingArguments
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    control: TrainerControl
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: DSparkDrafter | nn.Module,
        args: DSparkTrainingArguments,
        *,
        target: PreTrainedModel,
        **kwargs: Any,
    ) -> None:
        self.target = target.requires_grad_(False).eval()
        wrapped: Any = model
        self.drafter: DSparkDrafter = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped
        for dataset in (kwargs.get("train_dataset"), kwargs.get("eval_dataset")):
            if isinstance(dataset, AnswerDataset) and len(dataset):
                check_answers(target, dataset.sequences)
        if args.pure_bf16:
            model.to(torch.bfloat16)
        told = "use_cache" in self.drafter.config.to_dict()
        kwargs.setdefault("data_collator", collate)
        super().__init__(model, args, **kwargs)
        if not told:
            del self.drafter.config.use_cache  # `Trainer` sets it on any model; a drafter's configuration has none
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise NotImplementedError(
                "A drafter is small and is not sharded: launch without FSDP or DeepSpeed, and give shard_target=True "
                "if the target does not fit one device."
            )
        self.cache: StateCache | None = None
        if args.state_cache is not None:
            facts = cache_facts(target, self.drafter.config.target_layer_ids)
            self.cache = StateCache(args.state_cache, facts, args.process_index)
        self._place_target()
        self.drafter.bind_target(target)
        self.add_callback(Pace(args.max_seconds, args.save_seconds, args.evaluations))
        cuda = args.device.type == "cuda"
        self.objective = Objective(
            self.drafter,
            args.loss_weights,
            chunk_bytes=int(args.logits_memory * 2**30),
            detach_confidence=args.detach_confidence,
            flex={"auto": None, "flex": True, "plain": False}[args.block_attention],
            sums=torch.compile(loss_sums, dynamic=True) if cuda else loss_sums,
        )
        self._parts = torch.zeros(len(PARTS), device=args.device)
        self._parts_steps = 0  # steps whose losses these are

    def _place_target(self) -> None:
        args = self.args
        self.target_is_sharded = args.shard_target and args.world_size > 1
        if getattr(self.target, "hf_device_map", None) is None:
            if self.target_is_sharded:
                from torch.distributed.fsdp import fully_shard

                # The layers alone: the drafter borrows embedding and head, which stay whole on every device.
                for layer in decoder_layers(self.target):
                    fully_shard(layer.to(args.device))
            self.target.to(args.device)
        # Layer by layer: they share what is compiled, which the whole would take for each of them again.
        layers = decoder_layers(self.target) if args.compile_target else ()
        self._compiled = {layer: torch.compile(layer.forward, dynamic=True) for layer in layers}

    @property
    def pace(self) -> Pace:
        """The budget of time; a resumed run has another one than the trainer was made with."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, Pace))

    # ---- data

    def get_train_dataloader(self) -> DataLoader:
        """Batches of so many sequences, or with `tokens_per_batch` of so many tokens."""
        args = self.args
        if args.tokens_per_batch is None or self.train_dataset is None:
            return super().get_train_dataloader()
        lengths = np.array([len(ids) for ids in sequences_of(self.train_dataset).ids])
        seed = args.seed if args.data_seed is None else args.data_seed
        batches = TokenBatches(lengths, args.tokens_per_batch, seed, args.process_index, args.world_size)
        return BatchLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """
        The batches of a step with their blocks, and the summed weights of the positions that all processes learn in
        it. Dividing by these makes the loss that of one large batch, however it is cut.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = [self.with_blocks(sample) for sample in samples]
        weights = [self.objective.position_weights(sample["blocks"]).sum() for sample in samples]
        total = torch.stack(weights).sum() if weights else torch.zeros(())
        self._parts_steps += bool(samples)
        return samples, self.accelerator.reduce(total.to(device), "sum")

    def with_blocks(self, batch: dict[str, Any]) -> dict[str, Any]:
        """
        Draws the anchors of a batch: of each text its own, by seed, step and text. So a resumed run draws the same,
        and so does one with other processes.
        """
        config, args, blocks = self.drafter.config, self.args, batch.get("blocks")
        if blocks is None:
            ids, mask = batch["input_ids"].cpu(), batch["loss_mask"].cpu()
            sums = [zlib.crc32(row[kept > 0].numpy().tobytes()) for row, kept in zip(ids, mask, strict=True)]
            generators = [np.random.default_rng((args.seed, self.state.global_step, number)) for number in sums]
            anchors, keep = sample_anchors(mask, args.anchors, generators)
            form = config.block_size, config.mask_token_id, config.first_draft_row
            blocks = pack_blocks(ids, mask, anchors, keep, *form)
        found = {"input_ids": batch["input_ids"], "blocks": blocks}
        if self.cache is not None:
            found["lengths"] = batch.get("lengths") or _lengths(batch["loss_mask"])
        return found

    # ---- a step

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """
        The loss of a batch of [`~DSparkTrainer.with_blocks`], divided by the weights `num_items_in_batch` of the whole
        step over all processes; gradients are averaged over these, so each counts as often as there are processes.
        """
        device, processes = self.args.device, self.accelerator.num_processes
        inputs = self.with_blocks(inputs)
        blocks: Blocks = inputs["blocks"].to(device)
        with sdpa_kernel(ATTENTION):
            with torch.no_grad():
                if self.cache is None:
                    states = self._states(inputs["input_ids"])
                else:
                    states = self.cache.states(inputs["input_ids"], inputs["lengths"], self._states)
            taps, last_hidden = (state.to(device) for state in states)
            denominator = None if num_items_in_batch is None else num_items_in_batch / processes
            with self.accelerator.autocast():
                loss = self.objective(taps, last_hidden, blocks, denominator, backbone=model)
        self._parts += torch.stack([getattr(loss, name).detach() for name in PARTS])
        return (loss.total, loss) if return_outputs else loss.total

    def _states(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with lent_forwards(self._compiled):
            return target_states(self.target, input_ids, self.drafter.config.target_layer_ids)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """What `drafter_optimizer` says."""
        args = self.args
        if self.optimizer is None and args.drafter_optimizer == "muon":
            trained = [(name, p) for name, p in (model or self.model).named_parameters() if p.requires_grad]
            betas = args.adam_beta1, args.adam_beta2
            self.optimizer = MuonWithAdamW(trained, args.learning_rate, betas, args.weight_decay)
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """That of `lr_scheduler_type`; with `max_seconds` a cosine over the nearer budget."""
        if self.args.max_seconds is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.create_optimizer(), lambda _: self.rate())
        self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        return scheduler

    def rate(self) -> float:
        """Share of the peak rate at this point of the nearer budget."""
        args, state = self.args, self.state
        warmup = args.warmup_steps if args.warmup_steps < 1 else args.warmup_steps / max(1, state.max_steps)
        return share_of_peak(self.pace.progress(state), state.global_step, warmup, args.final_rate)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the parts of the loss to what is logged of training."""
        if "loss" in logs:
            means = self.accelerator.reduce(self._parts, "mean") / max(1, self._parts_steps)
            logs |= dict(zip(PARTS, means.tolist(), strict=True))
            self._parts, self._parts_steps = torch.zeros_like(self._parts), 0
        super().log(logs, start_time)

    # ---- evaluation

    def accepted_length(self, eval_dataset: Any) -> GenerationStats:
        """The figures of `eval_dataset`, of whose rows each process takes its share."""
        sequences, args = sequences_of(eval_dataset), self.args
        share = not self.target_is_sharded  # else all processes have to run all of it, step by step together
        if share:
            sequences = sequences.pick(np.arange(args.process_index, len(sequences), args.world_size))
        training = self.model.training
        self.model.eval()
        try:
            if args.eval_decoding == "generate":
                stats = decoded_accepted_length(self.drafter, self.target, sequences, args.per_device_eval_batch_size)
            else:
                stats = held_out_accepted_length(self.drafter, self.target, sequences)
        finally:
            self.model.train(training)
        return GenerationStats.merge(gather_object([stats])) if share and args.world_size > 1 else stats

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """
        Accepted length of `eval_dataset`, a dataset or a dictionary of them.

        Returns:
            `dict[str, float]`: `eval_accepted_length`, `eval_rounds`, and `eval_acceptance_1` and so on, the
            conditional acceptance of each drafted position.
        """
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if eval_dataset is None:
            raise ValueError("DSparkTrainer: evaluation requires an eval_dataset.")
        named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        metrics: dict[str, float] = {}
        for name, dataset in named.items():
            stats = self.accepted_length(dataset)
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            metrics |= {f"{prefix}_accepted_length": stats.mean_accepted_length, f"{prefix}_rounds": stats.rounds}
            for position, share in enumerate(stats.acceptance_by_position, start=1):
                if share is not None:
                    metrics[f"{prefix}_acceptance_{position}"] = share
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _lengths(loss_mask: torch.Tensor) -> list[int]:
    """Tokens of each row up to the last one that is learned; nothing behind it matters."""
    places = torch.arange(1, loss_mask.shape[1] + 1, device=loss_mask.device)
    return ((loss_mask > 0) * places).amax(dim=1).clamp(min=1).tolist()


__all__ = ["DSparkTrainer"]
