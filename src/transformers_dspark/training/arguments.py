"""What a training run is told: shape of the drafter, budget, optimiser. Defaults follow the released recipe."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from .losses import LossWeights


@dataclass(frozen=True)
class DrafterShape:
    """
    Shape of a new drafter; everything else is read off the target.

    Args:
        num_layers (`int`): Backbone layers.
        block_size (`int`): Rows of a block; in layout A, which is trained, each drafts a token.
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
    target_layer_ids: tuple[int, ...] | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None


@dataclass(frozen=True)
class TrainArguments:
    """
    Budget and optimiser of a run.

    Args:
        epochs (`float`): Passes over the answers.
        max_seconds (`float`, *optional*): Stop after this much training time. The learning rate follows whichever of
            the two budgets is nearer its end, so a run that is cut by time has still cooled down.
        tokens_per_batch (`int`): Padded tokens of context a step.
        anchors (`int`): Anchors a sequence.
        max_length (`int`): Longer answers are cut.
        optimizer (`str`): `"adamw"`, or `"muon"` for the backbone's matrices and AdamW for the rest.
        learning_rate, warmup, final_rate (`float`): Peak rate, share of the budget spent warming up, and the share of
            the peak that is left at the end of the cosine.
        clip (`float`): Largest gradient norm.
        held_out (`int`): Greedy answers kept aside for the accepted-length figure.
        evaluations (`int`): How often it is measured over the run.
        save_seconds (`float`): Interval between checkpoints to resume from.
        seed (`int`): Of initialisation, order and anchors.
        losses (`LossWeights`): Weights of the three losses.

    Raises:
        ValueError: a value outside its range.
    """

    epochs: float = 10.0
    max_seconds: float | None = None
    tokens_per_batch: int = 32768
    anchors: int = 64
    max_length: int = 1024
    optimizer: str = "adamw"
    learning_rate: float = 6e-4
    warmup: float = 0.04
    final_rate: float = 0.02
    clip: float = 1.0
    held_out: int = 256
    evaluations: int = 5
    save_seconds: float = 120.0
    seed: int = 0
    losses: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        positive = ("epochs", "max_seconds", "tokens_per_batch", "anchors", "learning_rate", "clip", "evaluations")
        given = {name: getattr(self, name) for name in positive if getattr(self, name) is not None}
        wrong = [f"{name}={value} must be more than 0" for name, value in given.items() if not value > 0]
        wrong += [f"{name}={value} must be finite" for name, value in given.items() if value == math.inf]
        if not 0 <= self.seed < 2**63:
            wrong.append(f"seed={self.seed} must lie in 0..2**63-1")
        if self.optimizer not in ("adamw", "muon"):
            wrong.append(f"optimizer={self.optimizer!r} must be 'adamw' or 'muon'")
        if self.max_length < 2:
            wrong.append(f"max_length={self.max_length} must be at least 2")
        if self.held_out < 0:
            wrong.append(f"held_out={self.held_out} must be 0 or more")
        wrong += [
            f"{name}={getattr(self, name)} must lie in 0..1 (below 1)"
            for name in ("warmup", "final_rate")
            if not 0 <= getattr(self, name) < 1
        ]
        if wrong:
            raise ValueError(f"Training arguments: {'; '.join(wrong)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
