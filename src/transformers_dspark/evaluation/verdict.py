"""What limits the speed of a generation, decided from measured figures alone: no model, no clock, no device."""

from __future__ import annotations

from dataclasses import dataclass


MEMORY_FULL = 0.92  # from this share on, an allocator spends its time freeing and fragments fail
WORTH_NAMING = 1.05  # a limit whose removal would bring less than this is none


@dataclass(frozen=True)
class SpeedFigures:
    """
    A drafted generation and the plain one beside it.

    Args:
        rows (`int`): Rows of the batch.
        plain_tokens_per_second, drafted_tokens_per_second (`float`): Over all rows, prefill included.
        plain_step_seconds (`float`): Target's forward for one token of each row.
        draft_seconds, verify_seconds, host_seconds (`float`): Of a round: inside the drafter, inside the target, rest.
        verify_length (`float`): Drafted tokens sent to the target, per row and round.
        accepted_length (`float`): Committed tokens per row and round, bonus included.
        scheduled (`bool`): Whether a table of step costs chose what was verified.
        memory_share (`float`, *optional*): Peak of the device's memory over what it has; `None` where nobody knows.
    """

    rows: int
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    plain_step_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    verify_length: float
    accepted_length: float
    scheduled: bool
    memory_share: float | None = None

    @property
    def round_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def speed_up(self) -> float:
        return self.drafted_tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class Verdict:
    """
    The limit and its three sentences.

    Args:
        limit (`str`): `"drafter acceptance"`, `"verify cost"`, `"draft cost"`, `"host overhead"`, `"memory"` or
            `"nothing"`.
        gains (`dict[str, float]`): How many times as fast decoding would be if one limit alone were gone.
        sentences (`tuple[str, str, str]`): The comparison, the limit with its figure, the option to try.
    """

    limit: str
    gains: dict[str, float]
    sentences: tuple[str, str, str]


def gains(figures: SpeedFigures) -> dict[str, float]:
    """
    How many times as fast decoding would be with a drafter whose sent tokens all pass, with windows that cost a plain
    step, with drafts for nothing, and with a host that takes no time.
    """
    total = figures.round_seconds
    parts = {
        "verify cost": max(0.0, figures.verify_seconds - figures.plain_step_seconds),
        "draft cost": figures.draft_seconds,
        "host overhead": figures.host_seconds,
    }
    found = {"drafter acceptance": max(1.0, (figures.verify_length + 1) / figures.accepted_length)}
    return found | {name: total / max(total - part, total / 100) for name, part in parts.items()}


def judge(figures: SpeedFigures) -> Verdict:
    """Names the limit whose removal would bring most; memory that is nearly full comes before all others."""
    found = gains(figures)
    limit = max(found, key=lambda name: found[name])
    if figures.memory_share is not None and figures.memory_share >= MEMORY_FULL:
        limit = "memory"
    elif found[limit] < WORTH_NAMING:
        limit = "nothing"
    first = (
        f"With the drafter {figures.drafted_tokens_per_second:.1f} tokens/s, without it "
        f"{figures.plain_tokens_per_second:.1f}, measured in turn over {figures.rows} "
        f"row{'s' if figures.rows > 1 else ''}: {figures.speed_up:.2f}x."
    )
    gain = f"; without this limit decoding would be {found[limit]:.2f}x as fast" if limit in found else ""
    named = "Nothing limits it much" if limit == "nothing" else f"The limit is {limit}"
    second = f"{named}: {_evidence(limit, figures)}{gain}."
    return Verdict(limit, found, (first, second, _advice(limit, figures)))


def _evidence(limit: str, figures: SpeedFigures) -> str:
    total = figures.round_seconds
    return {
        "drafter acceptance": f"of {figures.verify_length:.2f} drafted tokens sent for a row and round, "
        f"{figures.accepted_length - 1:.2f} pass",
        "verify cost": f"a window's step takes {1e3 * figures.verify_seconds:.1f} ms, a plain step "
        f"{1e3 * figures.plain_step_seconds:.1f} ms",
        "draft cost": f"drafting takes {figures.draft_seconds / total:.0%} of a round of {1e3 * total:.1f} ms",
        "host overhead": f"{figures.host_seconds / total:.0%} of a round of {1e3 * total:.1f} ms passes outside both "
        "models",
        "memory": f"{figures.memory_share or 0:.0%} of the device's memory was in use",
        "nothing": "no single part costs more than a twentieth",
    }[limit]


def _advice(limit: str, figures: SpeedFigures) -> str:
    tokens = max(1, round(figures.accepted_length))
    cheaper = (
        f"Try max_verify_tokens={tokens} (--max-verify-tokens {tokens}), near what passes."
        if figures.scheduled
        else "Try a table of `dspark profile`, with which only tokens that pay are sent: step_cost_table=FILE "
        "(--costs FILE)."
    )
    return {
        "drafter acceptance": "Try a drafter trained on answers to your own prompts: `dspark data answers`, then "
        "`dspark train --from DRAFTER`.",
        "verify cost": cheaper,
        "draft cost": "Try a drafter with fewer layers or a smaller vocabulary: `dspark train --num-layers 2 "
        "--draft-vocab-size 16384`.",
        "host overhead": "Try more rows in a batch (--rows): the host's work hardly grows with them.",
        "memory": "Try fewer rows or a smaller max_new_tokens, which leave room for the caches.",
        "nothing": "Try more rows in a batch (--rows) if requests are waiting; no single option brings much.",
    }[limit]


__all__ = ["SpeedFigures", "Verdict", "gains", "judge"]
