"""Muon for a drafter's matrices beside AdamW for the rest, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Args:
        named_parameters (`Iterable[tuple[str, nn.Parameter]]`): Those to train.
        lr, betas, weight_decay: As for `torch.optim.AdamW`; Muon shares rate and decay.

    Source: Muon (Jordan et al., 2024) with updates of AdamW's size (Liu et al., 2025), so one rate serves both.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            in_backbone = {"layers", "fc"} & set(name.split("."))
            (matrices if parameter.ndim == 2 and in_backbone else rest).append(parameter)
        super().__init__([{"params": [*matrices, *rest]}], {"lr": lr})
        fused = rest[0].device.type == "cuda" if rest else False
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused))
        self._show_groups()

    def _show_groups(self) -> None:
        """A schedule writes rates into these groups, which are those of the parts."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As for any optimiser."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is that of another optimiser.
        """
        states = state_dict.get("parts", ())
        if len(states) != len(self.parts):
            raise ValueError(
                "This is no state of MuonWithAdamW over these parameters: resume with the same optimiser."
            )
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        self._show_groups()


__all__ = ["MuonWithAdamW"]
