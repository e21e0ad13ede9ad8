"""Scores, logits and hidden states of a batch, one entry a token, as plain generation returns them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import ModelOutput

from ..windows import VerifyWindow


class TokenRecords:
    """
    What each committed token leaves behind. Behind the end of a text stand zeros.

    Args:
        rows (`int`): Rows of the call.
        scores, logits, hidden_states (`bool`): What to keep.
    """

    def __init__(self, rows: int, scores: bool, logits: bool, hidden_states: bool) -> None:
        self.scores, self.logits, self.hidden_states = scores, logits, hidden_states
        self._scores: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self._logits: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self._states: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(rows)]
        self._prompt: list[torch.Tensor] | None = None

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self.scores or self.logits or self.hidden_states

    def keep_prompt(
        self, outputs: ModelOutput, window: VerifyWindow, columns: list[torch.Tensor], length: int
    ) -> None:
        """
        Args:
            outputs (`ModelOutput`): Of a packed forward over prompts, or parts of them.
            window (`VerifyWindow`): Where its tokens belong.
            columns (`list[torch.LongTensor]`): Columns of each row's real tokens in the padded prompts.
            length (`int`): Of the padded prompts.
        """
        if not self.hidden_states:
            return
        if self._prompt is None:
            self._prompt = [t.new_zeros(len(columns), length, *t.shape[2:]) for t in outputs.hidden_states]
        flat = torch.cat(columns)
        starts = torch.tensor([0, *map(len, columns)]).cumsum(0)[:-1].to(flat.device)
        places = flat[starts[window.rows] + window.columns]
        for kept, states in zip(self._prompt, outputs.hidden_states, strict=True):
            kept[window.rows, places] = states[0]

    def scores_with(self, row: int, new: torch.Tensor) -> list[torch.Tensor] | None:
        """Scores of a row's tokens so far and the `(n, vocab)` new ones, if scores are kept."""
        return [*self._scores[row], *new] if self.scores else None

    def keep_tokens(
        self,
        rows: list[int],
        kept: list[list[int]],
        widths: list[int],
        scores: torch.Tensor,
        logits: torch.Tensor,
        outputs: ModelOutput | None,
    ) -> None:
        """
        Args:
            rows (`list[int]`): Row of each window.
            kept (`list[list[int]]`): Its committed tokens; the first came from the window's first position, and so on.
            widths (`list[int]`): Tokens of each window.
            scores, logits (`torch.FloatTensor` of shape `(total, vocab)`): Processed and raw, of the packed positions.
            outputs (`ModelOutput`, *optional*): Of the packed forward; none for the prompts' own.
        """
        if not self.wanted:
            return
        start = 0
        for row, tokens, width in zip(rows, kept, widths, strict=False):
            span = slice(start, start + len(tokens))
            start += width
            if self.scores:
                self._scores[row] += scores[span].clone().unbind()
            if self.logits:
                self._logits[row] += logits[span].clone().unbind()
            if self.hidden_states and outputs is not None:
                layers = [states[0, span].clone() for states in outputs.hidden_states]
                self._states[row] += zip(*(layer.unbind() for layer in layers), strict=True)

    def assembled(self, count: int) -> dict[str, Any]:
        """The fields of the output for `count` tokens."""
        fields: dict[str, Any] = {}
        for name, wanted, rows in (("scores", self.scores, self._scores), ("logits", self.logits, self._logits)):
            if wanted:
                fields[name] = tuple(_joined(rows, step) for step in range(count))
        if self.hidden_states and self._prompt is not None:
            layers = len(self._prompt)
            by_layer = [[[states[layer] for states in row] for row in self._states] for layer in range(layers)]
            steps = range(count - 1)  # the prompt's own entry is the first
            later = (tuple(_joined(rows, step)[:, None] for rows in by_layer) for step in steps)
            fields["hidden_states"] = (tuple(self._prompt), *later)
        return fields


def _joined(rows: list[list[torch.Tensor]], step: int) -> torch.Tensor:
    like = next(row[step] for row in rows if len(row) > step)
    return torch.stack([row[step] if len(row) > step else torch.zeros_like(like) for row in rows])


__all__ = ["TokenRecords"]
