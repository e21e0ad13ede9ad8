"""Registration with Transformers: the Auto classes and the slot in `generate`.

It waits until Transformers itself loads the modules concerned, so importing this package loads no PyTorch.
`unregister` puts back the very objects that were there before.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from . import _compat


_MODEL_TYPE = "dspark"
_MARK = "_transformers_dspark_original"
_AUTO = "transformers.models.auto.modeling_auto"
_MODELING = f"{__package__}.modeling_dspark"
_PROCESSING = "transformers.processing_utils"


def register() -> None:
    """Registers the Auto classes and the slot. Runs when the package is imported; calling it again changes nothing."""
    with _state.lock:
        _state.active = True
        for name, (attach, _) in _SEAMS.items():
            if not _state.hooked:
                wrapt.register_post_import_hook(functools.partial(_on_import, attach), name)
            elif name in sys.modules:
                attach(sys.modules[name])
        _state.hooked = True


def unregister() -> None:
    """
    Undoes [`register`]. A DSpark drafter is then unknown to Transformers, as if the package had not been imported.
    """
    with _state.lock:
        _state.active = False
        for name, (_, detach) in _SEAMS.items():
            if name in sys.modules:
                detach(sys.modules[name])


class _State:
    """Import hooks cannot be taken back, so they ask here whether they still apply."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.active = False
        self.hooked = False


_state = _State()


def _on_import(attach: Callable[[ModuleType], None], module: ModuleType) -> None:
    if _state.active:
        attach(module)


# ---- the slot in generate()
# ------------------------------------------------------------------------------------------


def _is_drafter(assistant: Any) -> bool:
    """By its configuration: a drafter with code from the Hub is of another class."""
    return getattr(getattr(assistant, "config", None), "model_type", None) == _MODEL_TYPE


def _wrap_validation(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        drafter: Any = generation_mode_kwargs.get("assistant_model")
        if _is_drafter(drafter):
            from .assisted import check_request, check_tokenizers

            check_request(self, drafter, generation_config, generation_mode)
            check_tokenizers(*map(generation_mode_kwargs.get, ("tokenizer", "assistant_tokenizer")))
            # what is left are checks of the target; those of the assistant assume a language model with a tokenizer
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1  # several texts of a prompt are rows of the batched loop
            generation_mode = _compat.unassisted_mode(self, generation_config, generation_mode)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_drafter(kwargs.get("assistant_model")):
            return original(self, *args, **kwargs)
        from .slot import decoding

        return decoding(self, *args, **kwargs)

    return decode


_WRAPPERS = {
    _compat.VALIDATE_MODE: _wrap_validation,
    _compat.ASSISTED_LOOP: _wrap_loop,
}


def _attach_slot(module: ModuleType) -> None:
    for name, wrap in _WRAPPERS.items():
        current = getattr(module.GenerationMixin, name)
        if not hasattr(current, _MARK):
            wrapper = wrap(current)
            setattr(wrapper, _MARK, current)
            setattr(module.GenerationMixin, name, wrapper)


def _detach_slot(module: ModuleType) -> None:
    for name in _WRAPPERS:
        current = module.GenerationMixin.__dict__[name]
        if hasattr(current, _MARK):
            setattr(module.GenerationMixin, name, getattr(current, _MARK))


# ---- Auto classes
# ----------------------------------------------------------------------------------------------------


def _attach_config(module: ModuleType) -> None:
    from .configuration_dspark import DSparkConfig

    module.AutoConfig.register(_MODEL_TYPE, DSparkConfig, exist_ok=True)


def _detach_config(module: ModuleType) -> None:
    _compat.forget(module.CONFIG_MAPPING, _MODEL_TYPE)


def _attach_model(module: ModuleType) -> None:
    ours = sys.modules.get(_MODELING)
    if ours is None:
        ours = importlib.import_module(_MODELING)
    if not hasattr(ours, "DSparkDrafter"):
        return  # it is loading and has caused this import itself; `_attach_drafter` follows
    import transformers

    module.AutoModel.register(ours.DSparkConfig, ours.DSparkDrafter, exist_ok=True)
    # `pipeline(assistant_model="org/drafter")` looks the architecture's name up there. Loading `_PROCESSING` puts
    # another module object in its place, before this or after; then this runs again.
    transformers.DSparkDrafter = ours.DSparkDrafter


def _attach_drafter(module: ModuleType) -> None:
    if hasattr(sys.modules.get(_AUTO), "AutoModel"):  # else it has not loaded to its end, and `_attach_model` follows
        _attach_model(sys.modules[_AUTO])


def _detach_model(module: ModuleType) -> None:
    import transformers

    from .configuration_dspark import DSparkConfig

    _compat.forget(module.MODEL_MAPPING, DSparkConfig)
    vars(transformers).pop("DSparkDrafter", None)


def _nothing(module: ModuleType) -> None:
    """`_detach_model` has undone it."""


_Seam = tuple[Callable[[ModuleType], None], Callable[[ModuleType], None]]
_SEAMS: dict[str, _Seam] = {
    "transformers.generation.utils": (_attach_slot, _detach_slot),
    "transformers.models.auto.configuration_auto": (_attach_config, _detach_config),
    _AUTO: (_attach_model, _detach_model),
    _MODELING: (_attach_drafter, _nothing),
    _PROCESSING: (_attach_drafter, _nothing),
}


__all__ = ["register", "unregister"]
