"""The small heads over block states: the sequential (Markov) head and the confidence head."""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class DSparkMarkovHead(nn.Module):
    """
    Sequential head: a low-rank bias on a position's logits from the token before it.

    Source: DSpark paper, sequential stage (Markov, gated and recurrent variants).
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def embed(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """`(..., rank)` embedding of the previous tokens (target ids)."""
        return self.markov_w1(previous_ids)

    def features(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input of the output map, and the next state, from `(..., rank)` embeddings and `(..., hidden)` states."""
        if self.kind == "vanilla":
            return previous, None
        hidden = hidden.to(previous.dtype)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, previous), dim=-1))) * previous, None
        state = torch.zeros_like(previous) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, previous, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def forward(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """
        Features of whole blocks under teacher forcing, before the output map.

        Args:
            previous_ids (`torch.LongTensor` of shape `(..., gamma)`): Token before each position; first, the anchor.
            hidden (`torch.FloatTensor` of shape `(..., gamma, hidden)`): Block states.

        Returns:
            `torch.FloatTensor` of shape `(..., gamma, rank)`.
        """
        previous = self.embed(previous_ids)
        if self.kind != "rnn":
            return self.features(previous, hidden, None)[0]
        outputs, state = [], None
        for k in range(previous.shape[-2]):
            output, state = self.features(previous[..., k, :], hidden[..., k, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)


class DSparkConfidenceHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits `(...)` of `(..., hidden)` block states, `(..., rank)` embeddings of previous tokens."""
        if self.with_markov and previous is not None:
            hidden = torch.cat((hidden.to(previous.dtype), previous), dim=-1)
        return self.proj(hidden.to(self.proj.weight.dtype)).squeeze(-1).float()


__all__ = ["DSparkConfidenceHead", "DSparkMarkovHead"]
