"""Adapters of `peft` on a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..modeling_dspark import DSparkDrafter


if TYPE_CHECKING:
    from peft import PeftModel


def with_lora(drafter: DSparkDrafter, rank: int, seed: int = 0) -> PeftModel:
    """
    Puts LoRA adapters on every linear layer of a drafter, its heads included, but not on the one output of the
    confidence head, which is trained as a whole. Only these are trained.

    Args:
        drafter (`DSparkDrafter`): It is changed in place.
        rank (`int`): Of the adapters.
        seed (`int`): Of their initial values.
    """
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in drafter.named_modules() if isinstance(module, torch.nn.Linear)]
    confidence = [name for name in names if name.startswith("confidence_head.")]
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=[name for name in names if name not in confidence],
        modules_to_save=confidence or None,
    )
    return get_peft_model(drafter, config)


__all__ = ["with_lora"]
