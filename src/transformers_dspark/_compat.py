"""The private and undocumented names of Transformers that this package relies on.

Each entry says why it is needed and what would make it superfluous; `tests/test_compat.py` fails when one changes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any


# Methods of GenerationMixin that `integration` wraps. `_validate_generation_mode`: the last point before any work at
# which `generate` shows configuration and assistant together. `_assisted_decoding`: chosen whenever there is an
# assistant. Both become superfluous when `generate` lets an assistant bring its own candidate generator.
WRAPPED_METHODS: dict[str, tuple[str, ...]] = {
    "_validate_generation_mode": ("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": (
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "inputs_tensor",
        "assistant_model",
        "assistant_tokenizer",
        "tokenizer",
        "model_kwargs",
    ),
}

# Functions that `_assisted_decoding` finds among its module's globals. `_speculative_sampling` decides what is
# accepted; Transformers' own divides by a residual that can be zero, takes no generator and cannot end at a stop
# string. `_split_model_outputs` cuts attentions and hidden states into one entry a token; Transformers' own mistakes
# the columns of sliding windows and static caches.
REBOUND_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "_speculative_sampling": (
        "candidate_input_ids",
        "candidate_logits",
        "candidate_length",
        "new_logits",
        "assistant_ensemble_weight",
    ),
    "_split_model_outputs": ("outputs", "new_outputs", "cur_len", "added_len", "is_decoder_attention"),
}

# What `_assisted_decoding` asks of `self` and we answer in its place.
ANSWERED_METHODS = ("_get_candidate_generator", "prepare_inputs_for_generation")

# Set on the configuration by `generate`: the mask's length where an all-ones mask was dropped, needed to continue from
# a cache.
MASK_LENGTH = "_mask_length"


def rebind(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """
    The same code as `function`, with some global names bound to other objects. Neither `function` nor its module
    changes.

    Raises:
        RuntimeError: the function does not use one of the names, so binding it would have no effect.
    """
    plain = inspect.unwrap(function)
    used = plain.__code__.co_names if isinstance(plain, types.FunctionType) else ()
    if unused := names.keys() - set(used):
        raise RuntimeError(
            f"{getattr(function, '__qualname__', function)} of this release of Transformers no longer uses "
            f"{', '.join(sorted(unused))}. Install a release that the package metadata allows, or a newer "
            "transformers-dspark."
        )
    bound = types.FunctionType(
        plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    bound.__kwdefaults__ = plain.__kwdefaults__
    return bound


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters, seen through wrappers."""
    return tuple(inspect.signature(function).parameters)


__all__ = ["ANSWERED_METHODS", "MASK_LENGTH", "REBOUND_FUNCTIONS", "WRAPPED_METHODS", "parameters", "rebind"]
