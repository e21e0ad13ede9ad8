"""Options of drafting: the configuration that users write, and the record that the loop reads."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, logging

from ._compat import generation_defaults
from .checkpoints import HUB_ARGUMENTS


logger = logging.get_logger(__name__)

LOOPS = ("auto", "transformers", "batched")


class DSparkGenerationConfig(GenerationConfig):
    r"""
    [`~transformers.GenerationConfig`] with the options of DSpark. Give it to `generate` as `generation_config`, where
    each of them is then also a keyword, or save it beside the drafter, whose defaults it then holds.

    Args:
        dspark_loop (`str`): `"transformers"` is the assisted loop of Transformers, for batch size 1; `"auto"` chooses
            it as well in this version.
        max_verify_tokens (`int`, *optional*): Most drafted tokens sent to the target per row and round. Defaults to
            the drafter's block size.
        seed (`int`, *optional*): Seeds drafts, acceptance and bonus of each call. Defaults to PyTorch's global
            generator.
        assistant_confidence_threshold (`float`): In 0..1: a block ends before its first token whose confidence is
            lower. Defaults to 0.0, which never cuts. With a plain `GenerationConfig`, Transformers' own default of 0.4
            counts as not set.

    Raises:
        ValueError: an option out of range.
        NotImplementedError: `dspark_loop="batched"`.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.dspark_loop = kwargs.pop("dspark_loop", "auto")
        self.max_verify_tokens = kwargs.pop("max_verify_tokens", None)
        self.seed = kwargs.pop("seed", None)
        if kwargs.get("assistant_confidence_threshold") is None:
            kwargs["assistant_confidence_threshold"] = 0.0
        super().__init__(**kwargs)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        super().validate(*args, **kwargs)
        if self.dspark_loop not in LOOPS:
            raise ValueError(f"dspark_loop={self.dspark_loop!r} must be one of {LOOPS}.")
        if self.dspark_loop == "batched":
            raise NotImplementedError(
                "dspark_loop='batched' is not available in this version: use 'auto' or 'transformers', one prompt at "
                "a time."
            )
        _check_range("max_verify_tokens", self.max_verify_tokens, 0, None)
        _check_range("assistant_confidence_threshold", self.assistant_confidence_threshold, 0.0, 1.0)


@dataclass(frozen=True)
class DraftingOptions:
    """
    What a call asked for, defaults resolved.

    Args:
        width (`int`): Most drafted tokens per row and round, 0..gamma.
        confidence_threshold (`float`): In 0..1; 0.0 never cuts.
        seed (`int`, *optional*): Seed of this call.
    """

    width: int
    confidence_threshold: float = 0.0
    seed: int | None = None

    @classmethod
    def resolve(cls, generation_config: GenerationConfig, drafter: Any) -> DraftingOptions:
        """
        Reads the options from the call's configuration, then from the one saved beside the drafter.

        Args:
            generation_config (`GenerationConfig`): Configuration of the call, as `generate` completes it.
            drafter (`DSparkDrafter`): The drafter; its `generation_config` is optional.

        Raises:
            ValueError: an option out of range, or a threshold for a drafter without a confidence head.
        """
        gamma = drafter.config.num_draft_tokens
        beside = getattr(drafter, "generation_config", None)
        asked = [_given(name, generation_config, beside) for name in ("num_assistant_tokens", "max_verify_tokens")]
        for name, value in zip(("num_assistant_tokens", "max_verify_tokens"), asked, strict=True):
            _check_range(name, value, 0, None)
            if value is not None and value > gamma:
                logger.warning_once(
                    f"{name}={value} is more than the drafter's block of {gamma} tokens; {gamma} are drafted."
                )
        threshold = _given("assistant_confidence_threshold", generation_config, beside) or 0.0
        _check_range("assistant_confidence_threshold", threshold, 0.0, 1.0)
        if threshold > 0 and not drafter.config.enable_confidence_head:
            raise ValueError(
                f"assistant_confidence_threshold={threshold} needs a drafter with a confidence head, which this one "
                "lacks: leave it at 0."
            )
        return cls(
            width=min([gamma, *(value for value in asked if value is not None)]),
            confidence_threshold=threshold,
            seed=_given("seed", generation_config, beside),
        )


def options_beside(path: str | os.PathLike[str], subfolder: str = "", **kwargs: Any) -> DSparkGenerationConfig | None:
    """
    The options saved beside a drafter's weights, or `None` if there are none.

    Args:
        path (`str` or `os.PathLike`): Folder or Hub repository.
        subfolder (`str`): Where in it.
        kwargs: Those of `from_pretrained`; the arguments that choose a file on the Hub are used.

    Raises:
        ValueError: an option out of range.
        OSError: the file is damaged.
    """
    file = Path(path, subfolder, GENERATION_CONFIG_NAME)
    if Path(path).is_dir():
        if not file.is_file():
            return None
    else:
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        try:
            file = Path(hf_hub_download(str(path), GENERATION_CONFIG_NAME, subfolder=subfolder or None, **hub))
        except EntryNotFoundError:
            return None
    return DSparkGenerationConfig.from_pretrained(file.parent)


def eos_ids(*configs: Any) -> set[int]:
    """Every token that ends a text, by the `eos_token_id` of configurations or tokenizers."""
    found: set[int] = set()
    for value in (getattr(config, "eos_token_id", None) for config in configs):
        found.update([] if value is None else [value] if isinstance(value, int) else map(int, value))
    return found


def _given(name: str, *configs: GenerationConfig | None) -> Any:
    """
    The first value that someone set. `generate` fills in Transformers' global defaults before we look; they do not
    count.
    """
    for config in configs:
        value = getattr(config, name, None)
        ours = isinstance(config, DSparkGenerationConfig) and name == "assistant_confidence_threshold"
        if value is not None and (ours or value != generation_defaults().get(name)):
            return value
    return None


def _check_range(name: str, value: Any, low: float, high: float | None) -> None:
    """A range without an upper end is one of whole numbers."""
    if value is None:
        return
    kind: Any = numbers.Integral if high is None else numbers.Real
    most = math.inf if high is None else high
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= most:  # NaN is in no range
        allowed = f"a whole number of at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}={value!r} must be {allowed}.")


__all__ = ["DSparkGenerationConfig", "DraftingOptions", "eos_ids", "options_beside"]
