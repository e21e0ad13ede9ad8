"""What a call of the batched loop starts from: each row's real tokens, their positions, and the caches to write to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .._compat import MASK_LENGTH
from ..cache import RaggedCache
from ..mixers import heeds_bounds, mixers
from ..modeling_dspark import DSparkDrafter


# arguments of a forward that the loop makes anew in each round, or that say nothing about the text
_HANDLED = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "token_type_ids"}


@dataclass(frozen=True)
class BatchInputs:
    """
    Args:
        ids (`list[torch.LongTensor]`): Each row's tokens `(n,)` without padding.
        positions (`list[torch.LongTensor]`): Their absolute positions.
        columns (`list[torch.LongTensor]`): Their columns in the caller's `input_ids`.
        shifts (`list[int]`): What a row's position is ahead of its number of earlier tokens.
        cache (`RaggedCache`): Holds a row's beginning already where a cache of an earlier call was given.
        pad_id (`int`): Stands behind a text that ended.
        continued (`bool`): The cache was given, and is whole again when the call ends.
    """

    ids: list[torch.Tensor]
    positions: list[torch.Tensor]
    columns: list[torch.Tensor]
    shifts: list[int]
    cache: RaggedCache
    pad_id: int
    continued: bool

    @classmethod
    def read(
        cls,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        capacity: int,
        model_kwargs: dict[str, Any],
        new_cache: Callable[[], RaggedCache],
    ) -> BatchInputs:
        """
        Args:
            capacity (`int`): Most tokens of a text.
            new_cache (`Callable`): Makes an empty cache, if none was given; called last, when nothing is refused any
                more.

        Raises:
            NotImplementedError: inputs other than text, or a cache that the loop cannot go on from.
            ValueError: no row, an empty row, padding on the right, or a mask that does not fit.
        """
        known = inspect.signature(target.forward).parameters.keys() - _HANDLED
        if others := sorted(n for n in known if isinstance(model_kwargs.get(n), torch.Tensor)):
            raise NotImplementedError(
                f"The batched loop reads text only, and was given {', '.join(others)}: generate without the drafter, "
                "or, if no layer keeps a recurrent state, for one prompt at a time with dspark_loop='transformers'."
            )
        if input_ids.numel() == 0:
            raise ValueError("The batch is empty: give at least one prompt of at least one token.")
        given = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if given is None else given
        # `generate` drops a mask of ones, but notes its length
        length = getattr(config, MASK_LENGTH, -1) if given is None else -1
        if mask.shape != input_ids.shape or length not in (-1, input_ids.shape[1]):
            raise ValueError(
                f"The attention mask has {length if given is None else mask.shape[-1]} columns, the ids "
                f"{input_ids.shape[1]}: the batched loop needs a mask of the whole text, and ids that repeat what a "
                "cache holds."
            )
        real = mask.bool()
        if not bool(real[:, -1].all()):
            row = int((~real[:, -1]).nonzero()[0])
            raise ValueError(
                f"Row {row} is empty or padded on the right: set `tokenizer.padding_side = 'left'`, and give each "
                "prompt at least one token."
            )
        position_ids = model_kwargs.get("position_ids")
        if position_ids is None:
            position_ids = (real.long().cumsum(dim=1) - 1).clamp(min=0)
        elif position_ids.dim() == 3:
            position_ids = position_ids[0]  # multimodal rotary positions: the first axis is the text's
        position_ids = position_ids[:, -input_ids.shape[1] :].expand(input_ids.shape)
        counts, at = real.sum(dim=1), real.nonzero(as_tuple=True)
        sizes, shifts = torch.stack((counts, position_ids[:, -1] + 1 - counts)).tolist()
        flat = at[1], position_ids[at], input_ids[at]
        columns, positions, ids = (list(tensor.split(sizes)) for tensor in flat)
        pad_id = _pad_id(config)
        cache = _continued(target, drafter, ids, positions, capacity, model_kwargs.get("cache"))
        if cache is None:
            cache = new_cache()
        return cls(ids, positions, columns, shifts, cache, pad_id, cache is model_kwargs.get("cache"))


def _continued(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    ids: list[torch.Tensor],
    positions: list[torch.Tensor],
    capacity: int,
    given: Cache | None,
) -> RaggedCache | None:
    """The given cache with what the texts share with it, if it is one that can be gone on from."""
    if not isinstance(given, RaggedCache) or not given.is_of(target, drafter):
        return None  # any other knows nothing of this drafter's context, so the whole text is read once more
    if not given.ids:
        raise ValueError("The cache belongs to a call that did not come to its end: leave it out.")
    if len(given.ids) != len(ids):
        raise ValueError(
            f"The cache holds {len(given.ids)} texts, and this call has {len(ids)}: they must be the same."
        )
    given.rearrange(range(len(ids)), max(capacity, given.context.capacity))
    anew = any(map(heeds_bounds, mixers(target).values()))  # a prompt's states are others than those of written tokens
    for row, (old, new) in enumerate(zip(given.ids, ids, strict=True)):
        # at least the last token is read again: its logits choose the next one
        most = min(given.lengths[row], len(new) - 1)
        same = old[:most] == new[:most].to(old.device)
        places = given.context.positions[row, :most]
        same &= (places == positions[row][:most].to(places.device)).to(same.device)
        given.cut(row, 0 if anew else int(same.long().cumprod(dim=0).sum()))
    given.ids = []  # until this call has ended
    return given


def _pad_id(config: GenerationConfig) -> int:
    eos = config.eos_token_id
    first = eos[0] if isinstance(eos, (list, tuple)) else eos
    return int(next(value for value in (config.pad_token_id, first, 0) if value is not None))


__all__ = ["BatchInputs"]
