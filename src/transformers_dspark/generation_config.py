"""Options of drafting: the configuration that users write, and the record that the loop reads."""

from __future__ import annotations

import copy
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ._compat import generation_defaults


logger = logging.get_logger(__name__)

LOOPS = ("auto", "transformers", "batched")
VERIFY_MODES = ("static", "compact", "cap-accept")
SCHEDULERS = ("lagged", "causal")


class DSparkGenerationConfig(GenerationConfig):
    r"""
    [`~transformers.GenerationConfig`] with the options of DSpark. Give it to `generate` as `generation_config`, where
    each of them is then also a keyword, or save it beside the drafter, whose defaults it then holds.

    Args:
        dspark_loop (`str`): `"transformers"` is the assisted loop of Transformers, for batch size 1; `"batched"` is
            ours, for any batch size; `"auto"` takes the second where a call asks for what it alone has, or where the
            rounds of one prompt can be captured on a GPU, with memory to spare and a new cache of the usual kind.
        verify_mode (`str`, *optional*): `"static"` verifies every drafted token; `"compact"` only those that the
            schedule admits; `"cap-accept"` verifies all and commits no more than compact would. Defaults to
            `"compact"` with a cost table, else to `"static"`.
        step_cost_table (`str`, `os.PathLike`, `Mapping` or `StepCostTable`, *optional*): What a step of the target
            costs on this machine, as measured by `dspark profile`. With it, rows and batches for which drafting does
            not pay decode without drafts. `False` switches off one that is saved beside the drafter.
        scheduler (`str`): `"lagged"` takes the budget from confidences two rounds old, `"causal"` stops at the first
            token that does not pay.
        max_verify_tokens (`int`, *optional*): Most drafted tokens sent to the target per row and round. Defaults to
            the drafter's `num_draft_tokens`.
        use_cuda_graphs (`bool` or `str`): Whether the batched loop plays its rounds as CUDA graphs. `"auto"` does so
            on a GPU wherever a call allows it; `True` refuses a call that does not. With `compile_config` the target
            and parts of the drafter are compiled as well, once for any number of rows and tokens.
        seed (`int` or `list[int]`, *optional*): Seeds drafts, acceptance and bonus of each call; row r of a batch
            takes `seed + r`, or its own of a list. Defaults to PyTorch's global generator. One seed means other texts
            in another loop.
        assistant_confidence_threshold (`float`): In 0..1: a block ends before its first token whose confidence is
            lower. Defaults to 0.0, which never cuts. With a plain `GenerationConfig`, Transformers' own default of 0.4
            counts as not set.
        round_callback (`Callable`, `str` or `os.PathLike`, *optional*): Receives a [`RoundRecord`] of every round, as
            [`RoundStatistics`] does; a path gets them as lines of JSON. It is not saved with the other options.
        report_divergence (`bool`): Holds every token of a greedy call against plain decoding, one token at a time,
            which costs more than plain decoding alone; the output's `divergence` is the [`DivergenceReport`].
        strict_greedy (`bool`): Gives every step of the target the same shape, so that greedy tokens are bit by bit
            those of the same call without drafts (`max_verify_tokens=0`), in bfloat16 and float16 as well. Only the
            batched loop can; steps for few tokens cost as much as those for whole blocks of all rows.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.dspark_loop = kwargs.pop("dspark_loop", "auto")
        self.verify_mode = kwargs.pop("verify_mode", None)
        self.step_cost_table = kwargs.pop("step_cost_table", None)
        self.scheduler = kwargs.pop("scheduler", "lagged")
        self.max_verify_tokens = kwargs.pop("max_verify_tokens", None)
        self.use_cuda_graphs = kwargs.pop("use_cuda_graphs", "auto")
        self.seed = kwargs.pop("seed", None)
        self.round_callback = kwargs.pop("round_callback", None)
        self.report_divergence = kwargs.pop("report_divergence", False)
        self.strict_greedy = kwargs.pop("strict_greedy", False)
        if kwargs.get("assistant_confidence_threshold") is None:
            kwargs["assistant_confidence_threshold"] = 0.0
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """
        As for any configuration, in values that JSON knows: a table of step costs becomes the numbers it is loaded
        from, and those of NumPy become Python's.
        """
        bare = copy.copy(self)
        bare.round_callback = None
        written = GenerationConfig.to_dict(bare)
        return {name: _plain(value) for name, value in written.items() if name != "round_callback"}

    def __deepcopy__(self, memo: dict[int, Any]) -> DSparkGenerationConfig:
        """`generate` works on a copy; the callable in it stays the caller's own."""
        new = copy.copy(self)
        memo[id(self)] = new
        for name, value in vars(self).items():
            setattr(new, name, value if name == "round_callback" else copy.deepcopy(value, memo))
        return new

    def validate(self, *args: Any, **kwargs: Any) -> None:
        super().validate(*args, **kwargs)
        for name, allowed in (
            ("dspark_loop", LOOPS),
            ("verify_mode", (None, *VERIFY_MODES)),
            ("scheduler", SCHEDULERS),
            ("use_cuda_graphs", ("auto", True, False)),
            ("report_divergence", (False, True)),
            ("strict_greedy", (False, True)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}.")
        _check_range("max_verify_tokens", self.max_verify_tokens, 0, None)
        _check_seed(self.seed)
        _check_table(self.step_cost_table)
        _check_callback(self.round_callback)
        _check_range("assistant_confidence_threshold", self.assistant_confidence_threshold, 0.0, 1.0)


@dataclass(frozen=True)
class DraftingOptions:
    """
    What a call asked for, defaults resolved.

    Args:
        width (`int`): Most drafted tokens per row and round, 0..gamma.
        confidence_threshold (`float`): In 0..1; 0.0 never cuts.
        seed (`int` or `list[int]`, *optional*): Seed of this call, or of each row.
        loop (`str`): One of `LOOPS`.
        verify_mode (`str`): One of `VERIFY_MODES`.
        scheduler (`str`): One of `SCHEDULERS`.
        use_cuda_graphs (`bool` or `str`): As it was given.
        step_cost_table (`str`, `os.PathLike` or `StepCostTable`, *optional*): As it was given.
        round_callback (`Callable`, `str` or `os.PathLike`, *optional*): As it was given.
        report_divergence (`bool`): Whether a greedy call is held against plain decoding.
        strict_greedy (`bool`): Whether every step has the same shape.
    """

    width: int
    confidence_threshold: float = 0.0
    seed: int | list[int] | None = None
    loop: str = "auto"
    verify_mode: str = "static"
    scheduler: str = "lagged"
    use_cuda_graphs: bool | str = "auto"
    step_cost_table: Any = None
    round_callback: Any = None
    report_divergence: bool = False
    strict_greedy: bool = False

    def seed_of(self, row: int) -> int | None:
        """Seed of a row; `None` leaves it to PyTorch's global generator."""
        if not isinstance(self.seed, (list, tuple)):
            return None if self.seed is None else int(self.seed) + row
        if row >= len(self.seed):
            raise ValueError(f"seed has {len(self.seed)} numbers, and there are more rows: give one for each.")
        return int(self.seed[row])

    def row_seeds(self, rows: int) -> list[int]:
        """Seeds of so many rows; where none was given, from PyTorch's global generator."""
        if isinstance(self.seed, (list, tuple)) and len(self.seed) != rows:
            raise ValueError(f"seed has {len(self.seed)} numbers, and the call has {rows} rows: give one for each.")
        given = [self.seed_of(row) for row in range(rows)]
        drawn = torch.randint(2**62, (rows,)).tolist() if self.seed is None else given
        return [seed for seed in drawn if seed is not None]

    @classmethod
    def resolve(cls, generation_config: GenerationConfig, drafter: Any) -> DraftingOptions:
        """
        Reads the options from the call's configuration, then from the one saved beside the drafter.

        Args:
            generation_config (`GenerationConfig`): Configuration of the call, as `generate` completes it.
            drafter (`DSparkDrafter`): The drafter; its `generation_config` is optional.

        Raises:
            ValueError: an option out of range; a threshold or a schedule for a drafter without a confidence head; a
                schedule without a cost table.
        """
        gamma = drafter.config.num_draft_tokens
        beside = getattr(drafter, "generation_config", None)
        asked = [_given(name, generation_config, beside) for name in ("num_assistant_tokens", "max_verify_tokens")]
        for name, value in zip(("num_assistant_tokens", "max_verify_tokens"), asked, strict=True):
            _check_range(name, value, 0, None)
            if value is not None and value > gamma:
                logger.warning_once(
                    f"{name}={value} is more than the {gamma} tokens of the drafter's block; {gamma} are drafted."
                )
        threshold = _given("assistant_confidence_threshold", generation_config, beside) or 0.0
        _check_range("assistant_confidence_threshold", threshold, 0.0, 1.0)
        if threshold > 0 and not drafter.config.enable_confidence_head:
            raise ValueError(
                f"assistant_confidence_threshold={threshold} needs a drafter with a confidence head, which this one "
                "lacks: leave it at 0."
            )
        table = _given("step_cost_table", generation_config, beside)
        _check_table(table)
        table = None if table is False else table
        schedules = table is not None and drafter.config.enable_confidence_head
        mode = _given("verify_mode", generation_config, beside) or ("compact" if schedules else "static")
        if mode != "static" and not schedules:
            lacks = "step_cost_table, see `dspark profile`" if table is None else "a drafter with a confidence head"
            raise ValueError(f"verify_mode={mode!r} needs {lacks}: or use 'static'.")
        seed = _given("seed", generation_config, beside)
        _check_seed(seed)
        graphs = _given("use_cuda_graphs", generation_config, beside)
        return cls(
            width=min([gamma, *(value for value in asked if value is not None)]),
            confidence_threshold=threshold,
            seed=seed,
            loop=_given("dspark_loop", generation_config, beside) or "auto",
            verify_mode=mode,
            scheduler=_given("scheduler", generation_config, beside) or "lagged",
            use_cuda_graphs="auto" if graphs is None else graphs,
            step_cost_table=table,
            round_callback=_given("round_callback", generation_config),
            report_divergence=bool(_given("report_divergence", generation_config)),
            strict_greedy=bool(_given("strict_greedy", generation_config, beside)),
        )


def eos_ids(*configs: Any) -> set[int]:
    """Every token that ends a text, by the `eos_token_id` of configurations or tokenizers."""
    found: set[int] = set()
    for value in (getattr(config, "eos_token_id", None) for config in configs):
        found.update([] if value is None else [value] if isinstance(value, int) else map(int, value))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "curve", None)):  # a table of step costs, see `_check_table`
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _given(name: str, *configs: GenerationConfig | None) -> Any:
    """
    The first value that someone set. `generate` fills in Transformers' global defaults before we look; they do not
    count.
    """
    for config in configs:
        value = getattr(config, name, None)
        ours = isinstance(config, DSparkGenerationConfig) and name == "assistant_confidence_threshold"
        default = generation_defaults().get(name)
        if value is not None and (ours or not (isinstance(value, type(default)) and value == default)):
            return value
    return None


def _check_seed(value: Any) -> None:
    # a row's number is added to it, and generators take 64 bits
    listed = isinstance(value, (list, tuple))
    if listed and None in value:
        raise ValueError(f"seed={value!r} must name a whole number for each row.")
    for seed in value if listed else [value]:
        _check_range("seed", seed, 0, 2**63 - 1)


def _check_table(value: Any) -> None:
    known = value is None or value is False or isinstance(value, (str, os.PathLike, Mapping))
    if not known and not callable(getattr(value, "curve", None)):
        raise ValueError(
            f"step_cost_table={value!r} must be the path of a table that `dspark profile` wrote, a StepCostTable, or "
            "what its to_dict() returns."
        )


def _check_callback(value: Any) -> None:
    if not (value is None or callable(value) or isinstance(value, (str, os.PathLike))):
        raise ValueError(
            f"round_callback={value!r} must be a callable that takes the record of a round, or the path of a file."
        )


def _check_range(name: str, value: Any, low: float, high: float | None) -> None:
    """A range that begins with an `int` is one of whole numbers."""
    if value is None:
        return
    whole = isinstance(low, int)
    most = math.inf if high is None else high
    kind: Any = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= most:  # NaN is in no range
        bounds = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}={value!r} must be {'a whole number ' if whole else ''}{bounds}.")


__all__ = ["DSparkGenerationConfig", "DraftingOptions", "eos_ids"]
