"""The private and undocumented names of Transformers and PyTorch that this package relies on.

Each entry says who needs it, why, and what would make it superfluous; `tests/test_compat.py` fails when one changes.
Code uses them through this module, with one exception: the flat `*_dspark.py` files, which travel without it. Theirs
are what every author of a model writes, and are listed at the end.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers.generation import GenerationMode

# Methods of GenerationMixin that `integration` wraps. The first is the last point before any work at which `generate`
# shows configuration and assistant together; the second is chosen whenever there is an assistant, and is the loop that
# `slot` runs. Both become superfluous when `generate` lets an assistant bring its own candidate generator.
VALIDATE_MODE = "_validate_generation_mode"
ASSISTED_LOOP = "_assisted_decoding"

# Functions that the loop finds among its module's globals, and that `slot` replaces there. Transformers' own rule of
# acceptance divides by a residual that can be zero, takes no generator and cannot end at a stop string; its own cut of
# attentions and hidden states into one entry a token mistakes the columns of sliding windows and static caches.
ACCEPT = "_speculative_sampling"
SPLIT_OUTPUTS = "_split_model_outputs"

# The method that the loop asks of `self` for a candidate generator; `slot` answers in its place.
CANDIDATE_GENERATOR = "_get_candidate_generator"

# Set on the configuration by `generate`: the mask's length where an all-ones mask was dropped, which `slot` needs to
# continue from a cache.
MASK_LENGTH = "_mask_length"

# In the flat files. When one of them changes, a saved drafter does not load, or loads slowly or wrongly:
#   _auto_class          configuration, model: saved folders bring their code, as `register_for_auto_class` arranges
#   _supports_sdpa       model: Transformers chooses its attention without a warning
#   _no_split_modules    model: a layer stays on one device under `device_map`
#   _tied_weights_keys   model: an own head may share the own embedding
#   "RotaryEmbedding" in the class's name, `rope_type`, `original_inv_freq`, `compute_default_rope_parameters`
#                        backbone: loading on the meta device fills in the frequencies again by these
#   ROPE_INIT_FUNCTIONS, dynamic_rope_update (transformers.modeling_rope_utils)
#                        backbone: every kind of rotary embedding, without importing a model


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


def generation_defaults() -> dict[str, Any]:
    """
    What `generate` fills in where neither call nor model gave a value; `generation_config` tells it from what was
    given. Superfluous when `generate` hands on the configuration that it was called with.
    """
    from transformers import GenerationConfig

    return GenerationConfig._get_default_generation_params()


def keeps_recurrent_state(target: PreTrainedModel) -> bool:
    """
    Whether a model's own cache cannot go back to a shorter text. The batched loop serves most of those, that of
    Transformers the ones whose caches `rewinding` lets go back. Superfluous with a public flag.
    """
    return getattr(target, "_is_stateful", False)


def unassisted_mode(target: PreTrainedModel, config: GenerationConfig, mode: GenerationMode) -> GenerationMode:
    """
    The mode of the same call without an assistant, where `VALIDATE_MODE` would refuse every assistant of a model that
    keeps recurrent states; `integration` leaves that to our loops, which refuse the ones that they cannot serve.
    Superfluous when an assistant may say so itself.
    """
    from transformers.generation import GenerationMode

    if mode != GenerationMode.ASSISTED_GENERATION or not keeps_recurrent_state(target):
        return mode
    return GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH


def learns_prompt(target: PreTrainedModel) -> bool:
    """
    Whether a PEFT adapter with virtual tokens serves this call; `slot` refuses it, since PEFT then feeds one token a
    step. PEFT lends its target its own `prepare_inputs_for_generation` while it generates. Superfluous when that
    method can feed several.
    """
    lender = getattr(target.prepare_inputs_for_generation, "__self__", None)
    return bool(getattr(getattr(lender, "active_peft_config", None), "is_prompt_learning", False))


def attention_implementations(config: PreTrainedConfig) -> dict[str, str]:
    """
    Names of a model's attention and of those of its parts, for `attention` to put back; the setter is public, the
    getter is not.
    """
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    names = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    names = {name: chosen for name, chosen in names.items() if chosen is not None}  # a part without attention
    return {"": config._attn_implementation, **names}


def is_of_adapters(module: Any) -> bool:
    """
    Whether PEFT put a module into a model. Models tell of adapters that were loaded through them alone, and one that
    `get_peft_model` changed does not know of it.
    """
    return type(module).__module__.partition(".")[0] == "peft"


def own_attention(module: Any) -> Callable[..., tuple[Any, Any]]:
    """
    The attention function in the file of a model's attention module, its "eager" implementation; `attention` uses it
    where a module has to attend just as in plain decoding. Superfluous when `AttentionInterface` offers it by name.
    """
    return sys.modules[type(module).__module__].eager_attention_forward


@contextmanager
def one_build_for_all_shapes() -> Iterator[None]:
    """
    While it lasts, PyTorch's compiler does not take two sizes for one because they were equal once, and takes numbers
    of a model's configuration for constants at once, where it would otherwise trace everything twice; `quicker`
    compiles for any sizes. Superfluous when `torch.compile` has options for it.
    """
    from torch._dynamo import config
    from torch.fx.experimental import _config

    shapes = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]  # made when the module is loaded
    with shapes, config.patch(specialize_float=True):
        yield


def mark_size(tensor: Any, dimension: int) -> None:
    """
    Tells PyTorch's compiler that a size of a tensor will change; `quicker` marks numbers of rows and tokens. It is
    documented, in a module whose name begins with an underscore.
    """
    import torch

    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def graph_pass(change: Callable[[Any], None], source: Path) -> Any:
    """
    A rewriting of graphs as PyTorch's Inductor takes it, known to its cache by the file that it stands in, for
    `linear_ops`. Documented, in a module whose name begins with an underscore.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            change(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((str(source),))

    return Pass()


def mode_options(mode: str | None) -> dict[str, Any]:
    """
    The options of Inductor that a mode of `torch.compile` stands for, since only one of both can be given; `quicker`
    adds one of its own. Documented, in a module whose name begins with an underscore.
    """
    import torch._inductor

    return {} if mode is None else dict(torch._inductor.list_mode_options(mode))


def has_hooks(module: Any) -> bool:
    """
    Whether someone watches or changes the forward of this module, for `captured`; only setters are public. Those with
    which Transformers collects hidden states stay on a model for good and do not count.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def forget(mapping: Any, key: Any) -> None:
    """Undoes `register` of an Auto class for `integration`, which has no public counterpart."""
    mapping._extra_content.pop(key, None)


__all__ = [
    "ACCEPT",
    "ASSISTED_LOOP",
    "CANDIDATE_GENERATOR",
    "MASK_LENGTH",
    "SPLIT_OUTPUTS",
    "VALIDATE_MODE",
    "attention_implementations",
    "forget",
    "generation_defaults",
    "graph_pass",
    "has_hooks",
    "is_of_adapters",
    "keeps_recurrent_state",
    "learns_prompt",
    "mark_size",
    "mode_options",
    "one_build_for_all_shapes",
    "own_attention",
    "rebind",
    "unassisted_mode",
]
