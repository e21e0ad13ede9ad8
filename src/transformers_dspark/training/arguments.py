"""What a training run is told: shape of the drafter, losses, budget. Defaults follow the released recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from .losses import LossWeights


@dataclass(frozen=True)
class DrafterShape:
    """
    Shape of a new drafter; everything else is read off the target.

    Args:
        num_layers (`int`): Backbone layers.
        block_size (`int`): Rows of a block.
        sample_from_anchor (`bool`): Layout A, where each row of a block drafts a token. False for layout F, where the
            anchor's row drafts none.
        target_layer_ids (`tuple[int, ...]`, *optional*): Taps; by default five, spread from the second layer to the
            last but one.
        markov_rank (`int`): Rank of the sequential head; 0 for none.
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        draft_vocab_size (`int`, *optional*): Keep only the most frequent tokens of the answers as proposals.
        mask_token_id (`int`, *optional*): Defaults to the target's padding token, unless that also ends
            answers; then its last token.
    """

    num_layers: int = 5
    block_size: int = 7
    sample_from_anchor: bool = True
    target_layer_ids: tuple[int, ...] | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] of a drafter: other defaults, which follow the released recipe, and these.

    Args:
        anchors (`int`): Anchors a sequence and step.
        tokens_per_batch (`int`, *optional*): Build batches of similar length with so many padded tokens, instead of
            `per_device_train_batch_size` sequences.
        cross_entropy, l1, confidence (`float`): Weights of the three losses.
        position_decay (`float`): Positions of a block weigh `exp(-k / position_decay)`, from k = 0.
        detach_confidence (`bool`): The confidence loss trains the confidence head alone.
        drafter_optimizer (`str`): `"adamw"` for what `optim` says, or `"muon"` for the backbone's matrices beside
            AdamW for the rest.
        final_rate (`float`): Share of the peak rate that is left at the end of the cosine.
        max_seconds (`float`, *optional*): Stop after this much training time. The rate follows whichever of the two
            budgets, time or steps, is nearer its end, so a run that is cut by time has still cooled down.
        save_seconds (`float`, *optional*): Save a checkpoint whenever so much training time has passed.
        evaluations (`int`, *optional*): Cut the run into so many parts and evaluate between them.
        eval_decoding (`str`): `"replay"` reads the accepted length off the greedy answers of `eval_dataset` without
            decoding them again, which gives what decoding would; `"generate"` decodes their prompts.
        logits_memory (`float`): GiB for the logits that exist at one time.
        block_attention (`str`): `"flex"`, `"plain"`, or `"auto"`: flex attention on CUDA, a plain mask elsewhere.
        pure_bf16 (`bool`): Keep the drafter's weights and the optimiser's state in bfloat16. `bf16` instead keeps them
            in float32 and computes in bfloat16.
        compile_target (`bool`): Compile the target's layers for training.
        shard_target (`bool`): Spread the target's layers over all processes, for one that does not fit a device.
        state_cache (`str`, *optional*): Folder that keeps the target's hidden states, so that they are computed once.

    Raises:
        ValueError: a value outside its range.
    """

    learning_rate: float = 6e-4
    warmup_steps: float = 0.04
    lr_scheduler_type: str = "cosine_with_min_lr"
    weight_decay: float = 0.0
    adam_beta2: float = 0.95
    num_train_epochs: float = 10.0
    logging_steps: float = 20
    logging_nan_inf_filter: bool = False  # looking costs a device sync a step
    remove_unused_columns: bool = False  # the trainer reads columns that the drafter's forward does not name
    ddp_find_unused_parameters: bool | None = False  # the heads run outside the drafter's forward
    restore_callback_states_from_checkpoint: bool = True
    label_names: list[str] | None = field(default_factory=list)
    lr_scheduler_kwargs: dict[str, float] | str | None = None

    anchors: int = 512
    tokens_per_batch: int | None = None
    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    position_decay: float = 4.0
    detach_confidence: bool = False
    drafter_optimizer: str = "adamw"
    final_rate: float = 0.02
    max_seconds: float | None = None
    save_seconds: float | None = None
    evaluations: int | None = None
    eval_decoding: str = "replay"
    logits_memory: float = 2.0
    block_attention: str = "auto"
    pure_bf16: bool = False
    compile_target: bool = False
    shard_target: bool = False
    state_cache: str | None = None

    def __post_init__(self) -> None:
        positive: tuple[str, ...] = (
            "anchors",
            "tokens_per_batch",
            "learning_rate",
            "num_train_epochs",
            "position_decay",
            "max_seconds",
        )
        positive += ("save_seconds", "evaluations", "logits_memory")
        given = {name: getattr(self, name) for name in positive if getattr(self, name) is not None}
        wrong = [f"{name}={value} must be more than 0" for name, value in given.items() if not value > 0]
        wrong += [f"{name}={value} must be finite" for name, value in given.items() if value == math.inf]
        wrong += [
            f"{name}={getattr(self, name)} must be 0 or more"
            for name in ("cross_entropy", "l1", "confidence")
            if not 0 <= getattr(self, name) < math.inf
        ]
        if not 0 <= self.final_rate < 1:
            wrong.append(f"final_rate={self.final_rate} must lie in 0..1 (below 1)")
        if not 0 <= self.warmup_steps < math.inf:
            wrong.append(f"warmup_steps={self.warmup_steps} must be a share below 1, or a number of steps")
        choices: dict[str, tuple[str, ...]] = {"drafter_optimizer": ("adamw", "muon")}
        choices |= {"eval_decoding": ("replay", "generate"), "block_attention": ("auto", "flex", "plain")}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                wrong.append(f"{name}={value!r} must be one of {allowed}")
        if self.pure_bf16 and self.bf16:
            wrong.append("pure_bf16=True and bf16=True exclude each other: give one of them")
        if self.state_cache is not None and self.shard_target:
            wrong.append("state_cache and shard_target exclude each other: give one of them")
        if wrong:
            raise ValueError(f"Training arguments: {'; '.join(wrong)}.")
        if self.lr_scheduler_type == "cosine_with_min_lr" and not self.lr_scheduler_kwargs:
            self.lr_scheduler_kwargs = {"min_lr_rate": self.final_rate}
        super().__post_init__()

    @property
    def n_gpu(self) -> int:
        """At most one a process: several need `accelerate launch`, since `DataParallel` knows nothing of a target."""
        return min(1, super().n_gpu)

    @property
    def loss_weights(self) -> LossWeights:
        """The weights of the losses and the decay of the positions."""
        return LossWeights(self.cross_entropy, self.l1, self.confidence, self.position_decay)


__all__ = ["DSparkTrainingArguments", "DrafterShape"]
