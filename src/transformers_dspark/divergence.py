"""Where greedy texts of a drafter part from those of plain decoding, and whether rounding explains it.

The judge is the plain path: the target's own forward, one token at a time with a cache of its own, on the committed
text. Nothing of the speculative loops has a part in it, and the tolerance comes from the dtype and the magnitude of
the logits alone, so that no fault of a loop can excuse itself by being large.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from .batch.processors import RowProcessors


# Units in the last place that a sound window may change the distance of two logits by. Sound loops on small models in
# bfloat16 showed 2 at most.
NEAR_TIE_ULPS = 8
VERDICTS = ("equal", "near-tie", "defect")


@dataclass(frozen=True)
class Divergence:
    """
    A committed token that plain decoding would not have chosen behind the same text.

    Args:
        position (`int`): Number of the new token in its row, from 0.
        token, plain_token (`int`): The committed token and the choice of the plain path.
        margin (`float`): Distance of the two largest logits of the plain path, after processors.
        deficit (`float`): Distance of the largest and the committed token's logit; infinite where it is forbidden.
        tolerance (`float`): The largest deficit that rounding explains here.
    """

    position: int
    token: int
    plain_token: int
    margin: float
    deficit: float
    tolerance: float

    @property
    def verdict(self) -> str:
        """`"near-tie"` or `"defect"`."""
        return "near-tie" if self.deficit <= self.tolerance else "defect"


@dataclass(frozen=True)
class RowDivergence:
    """
    What the plain path says of one row. The first divergence is where the texts of both paths part; later ones are
    found by going on along the committed text.

    Args:
        tokens (`int`): New tokens of the row.
        divergences (`tuple[Divergence, ...]`): In order of position.
    """

    tokens: int
    divergences: tuple[Divergence, ...] = ()

    @property
    def first(self) -> Divergence | None:
        """Where the texts part; `None` if they are equal."""
        return self.divergences[0] if self.divergences else None

    @property
    def verdict(self) -> str:
        """The worst of the row: `"equal"`, `"near-tie"` or `"defect"`."""
        return max((d.verdict for d in self.divergences), key=VERDICTS.index, default="equal")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        found = [{**asdict(d), "verdict": d.verdict} for d in self.divergences]
        return {"tokens": self.tokens, "verdict": self.verdict, "divergences": found}


@dataclass(frozen=True)
class DivergenceReport:
    """
    Args:
        dtype (`str`): That of the plain path's logits.
        rows (`tuple[RowDivergence, ...]`): One for each row of the call.
    """

    dtype: str
    rows: tuple[RowDivergence, ...]

    @property
    def verdict(self) -> str:
        """The worst of all rows."""
        return max((row.verdict for row in self.rows), key=VERDICTS.index, default="equal")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {"dtype": self.dtype, "verdict": self.verdict, "rows": [row.to_dict() for row in self.rows]}


def check_greedy(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    sequences: torch.Tensor,
    new_tokens: Sequence[int],
    attention_mask: torch.Tensor | None = None,
    logits_processor: Iterable[Any] = (),
) -> DivergenceReport:
    """
    Holds every committed token of a greedy call against the plain path.

    Args:
        target (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(rows, length)`): Prompts, padded on the left.
        sequences (`torch.LongTensor` of shape `(rows, length + n)`): What the call returned.
        new_tokens (`Sequence[int]`): New tokens of each row, without padding behind them.
        attention_mask (`torch.LongTensor` of shape `(rows, length)`, *optional*): 0 on padding.
        logits_processor (`LogitsProcessorList`, *optional*): As it was when the call began; a copy is asked.

    Raises:
        ValueError: the numbers of rows differ.
    """
    start = input_ids.shape[1]
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if not len(input_ids) == len(sequences) == len(new_tokens) == len(mask):
        raise ValueError(
            f"There are {len(input_ids)} prompts, {len(sequences)} texts, {len(new_tokens)} lengths and {len(mask)} "
            "rows of the mask: give one of each for every row."
        )
    processors = RowProcessors(LogitsProcessorList(copy.deepcopy(list(logits_processor))), len(sequences), set())
    rows, dtype = [], target.dtype
    with torch.no_grad():
        for row, (text, seen, count) in enumerate(zip(sequences, mask, new_tokens, strict=True)):
            cache, found = DynamicCache(config=target.config), []
            fed = text[:start][seen.bool()]
            for end in range(start, start + count):
                logits = target(fed[None], cache=cache, use_cache=True).logits[:, -1]
                scores = processors(sequences, [row], [end], logits.float())[0]
                fed, dtype, plain = text[end : end + 1], logits.dtype, int(scores.argmax())
                if int(text[end]) != plain:
                    best = torch.topk(scores, 2).values
                    deficit = float(best[0] - scores[text[end]])
                    tolerance = NEAR_TIE_ULPS * max(ulp(logits[0], dtype), ulp(scores, dtype))
                    margin = float(best[0] - best[1])
                    found.append(Divergence(end - start, int(text[end]), plain, margin, deficit, tolerance))
                processors.commit(row, end + 1)
            rows.append(RowDivergence(count, tuple(found)))
    return DivergenceReport(str(dtype).removeprefix("torch."), tuple(rows))


def ulp(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """The unit in the last place of `dtype` at the largest magnitude among finite logits."""
    finite = logits[logits.isfinite()].abs()
    largest = finite.max().float() if finite.numel() else torch.tensor(1.0)
    _, exponent = torch.frexp(largest)  # 2 ** (exponent - 1) <= largest < 2 ** exponent
    return float(2.0 ** (int(exponent) - 1)) * torch.finfo(dtype).eps


__all__ = ["Divergence", "DivergenceReport", "RowDivergence", "check_greedy", "ulp"]
