"""Muon for a drafter's matrices beside AdamW for the rest, as one optimiser."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial that draws singular values towards 1
ITERATIONS = 5
STACKED = 2**24  # elements that go through a product together: beyond, one matrix alone keeps a device busy


class StackedMuon(torch.optim.Optimizer):
    """
    Muon as `torch.optim.Muon` has it, with matrices of one shape made orthogonal together. A drafter's are many and
    small: one by one they cost a thousand launches a step, which on a GPU is most of the step.

    Args:
        params (`Iterable[nn.Parameter]`): Matrices.
        lr (`float`): Rate of AdamW, to whose size updates are scaled.
        weight_decay (`float`): As for AdamW.
        momentum (`float`): Share of the old in the running mean of gradients.

    Source: Muon (Jordan et al., 2024) with updates of AdamW's size (Liu et al., 2025), so one rate serves both.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # closures are for those that ask for several losses a step
        """Moves every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, matrices in by_shape.items():
                count = max(1, STACKED // shape.numel())
                for start in range(0, len(matrices), count):
                    together = matrices[start : start + count]
                    self._move(together, group["lr"], group["weight_decay"], group["momentum"])

    def _move(self, matrices: list[nn.Parameter], lr: float, decay: float, momentum: float) -> None:
        """One step of matrices of one shape."""
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
        means = []
        for matrix, gradient in zip(matrices, gradients, strict=True):
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            means.append(state["momentum_buffer"].lerp_(gradient, 1 - momentum))
        updates = orthogonal(gradients.lerp_(torch.stack(means), momentum))
        rate = lr * 0.2 * math.sqrt(max(updates.shape[1:]))
        for matrix, update in zip(matrices, updates, strict=True):
            if decay:
                matrix.mul_(1 - lr * decay)
            matrix.add_(update, alpha=-rate)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """
    Matrices with nearly the same singular vectors and singular values near 1.

    Args:
        matrices (`torch.Tensor` of shape `(n, rows, columns)`): Any.

    Returns:
        `torch.Tensor` of shape `(n, rows, columns)`: In bfloat16; on a CPU, which may lack products in it, in float32.
    """
    first, third, fifth = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if tall else matrices).to(torch.float32 if matrices.is_cpu else torch.bfloat16)
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.mT if tall else found


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Args:
        named_parameters (`Iterable[tuple[str, nn.Parameter]]`): Those to train.
        lr, betas, weight_decay: As for `torch.optim.AdamW`; Muon shares rate and decay.
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
            self.parts.append(StackedMuon(matrices, lr, weight_decay))
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


__all__ = ["MuonWithAdamW", "StackedMuon", "orthogonal"]
