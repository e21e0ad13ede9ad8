"""Greedy tokens that are bit by bit those of the same call without drafts, whatever the dtype.

A product of matrices may sum in another order when it has more rows, so a token's logits depend on how many tokens
share its step. In bfloat16 that turns near-ties. Here every step of a call has the same number of tokens, the last one
repeated as often as needed, and each token attends alone; then its bits depend on its text and nothing else, as long
as an operation treats all places of a shape alike. The repeats show whether it does.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel

from ._compat import keeps_recurrent_state


def check_strict(target: PreTrainedModel, config: GenerationConfig, batched: bool) -> None:
    """
    Raises:
        ValueError: the call samples, or asks for the loop of Transformers.
        NotImplementedError: the target mixes the tokens of a step in other places than attention.
    """
    if config.do_sample or not batched:
        raise ValueError(
            "strict_greedy=True is about greedy texts of the batched loop: it needs do_sample=False, and "
            "dspark_loop 'auto' or 'batched'."
        )
    if keeps_recurrent_state(target):
        raise NotImplementedError(
            f"strict_greedy=True cannot hold for {type(target).__name__}, whose recurrent layers read a window in one "
            "piece: leave it out."
        )
    grouped = any(type(module).__name__.endswith("Experts") for module in target.modules())
    if grouped and set(target.get_experts_implementation().values()) != {"batched_mm"}:
        raise NotImplementedError(
            "strict_greedy=True cannot hold while experts compute in groups, whose sizes depend on every token of a "
            "step: call target.set_experts_implementation('batched_mm') first, or leave it out."
        )


def tokens_of_a_step(rows: int, gamma: int) -> int:
    """
    Those of whole windows of so many rows, up to a multiple of eight: vector units take elements in groups, and what
    is left behind the last group of a tensor may be computed otherwise.
    """
    return -(-rows * (1 + gamma) // 8) * 8


def filled(packed: torch.Tensor, total: int) -> torch.Tensor:
    """`(n,)` values of tokens, the last one repeated until there are `total`."""
    return torch.cat((packed, packed[-1:].expand(total - len(packed))))


def check_repeats(logits: torch.Tensor) -> None:
    """
    Args:
        logits (`torch.FloatTensor` of shape `(n, vocab)`): Of a token and its repeats in one step.

    Raises:
        NotImplementedError: they differ.
    """
    bits = logits.view(torch.int32)
    if not torch.equal(bits[1:], bits[:1].expand(len(bits) - 1, -1)):
        raise NotImplementedError(
            "strict_greedy=True cannot hold here: this device computes other bits for the same token at another place "
            "of a step. Leave it out."
        )


__all__ = ["check_repeats", "check_strict", "filled", "tokens_of_a_step"]
