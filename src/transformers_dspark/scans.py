"""
Recurrences and convolutions over a short window, with the states behind each of its tokens.

The forms of recurrences that models bring give the state behind the last token only. But every state on the way is
that before the window, decayed, and products of a few vectors added: `S_n = e^(d_n) S_0 + sum over i < n of
e^(d_n - d_i) l_i r_i^T`. The vectors do not depend on what follows them, so they are kept until it is known how many
tokens stay, and that many are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN


class StatesBehind(NamedTuple):
    """
    The states behind each token of a window, in terms of the state before it.

    Args:
        decay (`torch.FloatTensor` of shape `(rows, heads, width, 1 or left)`): Logarithms, summed up over tokens.
        left (`torch.FloatTensor` of shape `(rows, heads, width, left)`): What each token adds is the product of its
            two vectors.
        right (`torch.FloatTensor` of shape `(rows, heads, width, right)`): The other ones.
    """

    decay: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def to(self, dtype: torch.dtype) -> StatesBehind:
        """Itself: some mixers convert what they take for the last state."""
        return self

    def take(self, state: torch.Tensor, counts: torch.Tensor) -> None:
        """
        Moves states on in place.

        Args:
            state (`torch.Tensor` of shape `(rows, heads, left, right)`): Before the window.
            counts (`torch.LongTensor` of shape `(rows,)`): Tokens of each row by which its state moves on.
        """
        counts = counts[:, None, None, None]
        before = F.pad(self.decay, (0, 0, 1, 0))  # of no token first
        total = before.gather(2, counts.expand(*before.shape[:2], 1, before.shape[3]))
        behind = torch.arange(self.left.shape[2], device=state.device)[:, None] >= counts
        left = self.left * (total - self.decay).exp().masked_fill(behind, 0.0)
        state.mul_(total.exp().mT)
        flat = state.flatten(0, 1)
        flat.baddbmm_(left.mT.flatten(0, 1).to(state.dtype), self.right.flatten(0, 1).to(state.dtype))


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, StatesBehind]:
    """
    The gated delta rule, with a decay for each head or, as Kimi Linear has it, for each channel of the keys.

    Args:
        query, key (`torch.Tensor` of shape `(rows, width, key_heads, key_dim)`): Of the tokens of a window.
        value (`torch.Tensor` of shape `(rows, width, heads, value_dim)`): The same.
        g (`torch.Tensor` of shape `(rows, width, heads)` or `(rows, width, heads, key_dim)`): Logarithms of decays.
        beta (`torch.Tensor` of shape `(rows, width, heads)`): Strength of each update.
        initial_state (`torch.Tensor` of shape `(rows, heads, key_dim, value_dim)`): Before the window.
        use_qk_l2norm_in_kernel (`bool`): Queries and keys are brought to length 1.

    Returns:
        `tuple[torch.Tensor, StatesBehind]`: Outputs `(rows, width, heads, value_dim)`, and the states.

    Source: the WY form of products of Householder matrices in gated DeltaNet (Yang et al., 2025), of a single chunk.
    """
    groups, dtype = value.shape[2] // key.shape[2], query.dtype
    query, key = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (query, key))
    query, key, value, beta, g = (x.transpose(1, 2).float() for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay = (g if g.dim() == 4 else g[..., None]).cumsum(dim=2)
    width, beta = key.shape[2], beta[..., None]
    read = torch.cat((query, key), dim=2) * torch.cat((decay, decay), dim=2).exp()
    queried, recalled = (read @ initial_state.float()).split(width, dim=2)
    between = _between(decay)
    # the diagonal and what lies above it are not read
    system = beta * _products(key, key, between)
    new = torch.linalg.solve_triangular(system, beta * (value - recalled), upper=False, unitriangular=True)
    mixed = queried + _products(query, key, between) @ new
    return mixed.transpose(1, 2).to(dtype), StatesBehind(decay, key, new)


def mamba2(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, StatesBehind]:
    """
    The recurrence of Mamba 2, as it is computed for one token after another: bounds of time steps are not heeded.

    Args:
        hidden_states (`torch.Tensor` of shape `(rows, width, heads, head_dim)`): Of the tokens of a window.
        dt (`torch.Tensor` of shape `(rows, width, heads)`): Time steps, before bias and softplus.
        A (`torch.Tensor` of shape `(heads,)`): Logarithm of the decay in a unit of time.
        B, C (`torch.Tensor` of shape `(rows, width, groups, state_dim)`): Where inputs go, and what is read.
        D, dt_bias (`torch.Tensor` of shape `(heads,)`): Share of the input in the output; added to time steps.
        initial_states (`torch.Tensor` of shape `(rows, heads, head_dim, state_dim)`): Before the window.

    Returns:
        `tuple[torch.Tensor, StatesBehind]`: Outputs `(rows, width, heads, head_dim)`, and the states.
    """
    steps = F.softplus(dt + dt_bias.to(dt.dtype)).float()
    decay = (A.float() * steps).transpose(1, 2)[..., None].cumsum(dim=2)
    groups = hidden_states.shape[2] // B.shape[2]
    right, query = (x.repeat_interleave(groups, dim=2).transpose(1, 2).float() for x in (B, C))
    left = (hidden_states * steps[..., None]).transpose(1, 2)
    read = (query * decay.exp()) @ initial_states.float().mT
    mixed = (read + _products(query, right, _between(decay)) @ left).transpose(1, 2) + D[:, None] * hidden_states
    return mixed.to(hidden_states.dtype).contiguous(), StatesBehind(decay, left, right)


def convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """
    A causal convolution of channels over a window and what comes before it. As sums of products it is compiled for any
    number of rows, where libraries choose an algorithm by that number.

    Args:
        hidden_states (`torch.Tensor` of shape `(rows, channels, kernel + width)`): The tokens of a window behind
            `kernel` earlier ones.
        weight (`torch.Tensor` of shape `(channels, kernel)`): Of each channel.
        bias (`torch.Tensor` of shape `(channels,)`, *optional*): The same.
        activation (`str`, *optional*): Name of what is applied to its outputs.

    Returns:
        `torch.Tensor` of shape `(rows, channels, width + 1)`: That of the last token before the window comes first.
    """
    columns = hidden_states.float().unfold(2, weight.shape[1], 1)
    mixed = (columns * weight.float()[:, None]).sum(dim=3)
    if bias is not None:
        mixed = mixed + bias.float()[:, None]
    mixed = mixed.to(hidden_states.dtype)
    return mixed if activation is None else ACT2FN[activation](mixed)


def _between(decay: torch.Tensor) -> torch.Tensor:
    """`(..., width, width, 1 or channels)` decays from each token to each later one; 0 for earlier ones."""
    width = decay.shape[-2]
    earlier = torch.ones(width, width, dtype=torch.bool, device=decay.device).triu(1)[..., None]
    gaps = decay[..., :, None, :] - decay[..., None, :, :]
    return gaps.masked_fill(earlier, float("-inf")).exp()


def _products(left: torch.Tensor, right: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """`(..., width, width)` products of vectors, decayed from the right one's token to the left one's."""
    if between.shape[-1] == 1:
        return (left @ right.mT) * between[..., 0]
    return (left[..., :, None, :] * right[..., None, :, :] * between).sum(dim=-1)


# by the names of what stands in the modules of models, and is called for several tokens at once
CONVOLUTIONS = {"causal_conv1d_fn": convolution}
SCANS = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2,
}


__all__ = ["CONVOLUTIONS", "SCANS", "StatesBehind", "convolution", "gated_delta_rule", "mamba2"]
