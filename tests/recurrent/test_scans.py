"""Recurrences over windows: outputs and the states behind each token are those of one token after another."""

import pytest
import torch

from transformers_dspark.scans import convolution, gated_delta_rule, mamba2


ROWS, HEADS, LEFT, RIGHT = 3, 4, 8, 6


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def delta_step(state, q, k, v, g, beta):
    """One token; `state` is `(rows, heads, LEFT, RIGHT)`."""
    state = state * g.exp()[..., None]
    error = (v - (state * k[..., None]).sum(dim=2)) * beta[..., None]
    state = state + k[..., None] * error[:, :, None]
    return state, (state * q[..., None]).sum(dim=2) * LEFT**-0.5


def behind_each(before, states, width):
    """The states that are taken for every number of tokens, `(width + 1, rows, heads, LEFT, RIGHT)`."""
    taken = []
    for count in range(width + 1):
        state = before.clone()
        states.take(state, torch.full((ROWS,), count))
        taken.append(state)
    return torch.stack(taken)


@pytest.mark.parametrize("width", [2, 9, 17])
@pytest.mark.parametrize("channels", [1, LEFT])
@pytest.mark.parametrize("strength", [0.1, 30.0])
def test_gated_delta_rule(width, channels, strength):
    groups = 2 if channels == 1 else 1
    q, k = (noise(ROWS, width, HEADS // groups, LEFT, seed=seed) for seed in (1, 2))
    v, beta = noise(ROWS, width, HEADS, RIGHT), noise(ROWS, width, HEADS, seed=3).sigmoid()
    g = -strength * noise(ROWS, width, HEADS, channels, seed=4).abs()
    before = noise(ROWS, HEADS, LEFT, RIGHT)
    found, states = gated_delta_rule(
        q, k, v, g[..., 0] if channels == 1 else g, beta, before, use_qk_l2norm_in_kernel=True
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(groups, dim=2) for x in (q, k))
    state, outputs, after = before, [], [before]
    for i in range(width):
        state, output = delta_step(state, q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i])
        outputs.append(output)
        after.append(state)
    torch.testing.assert_close(found, torch.stack(outputs, dim=1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind_each(before, states, width), torch.stack(after), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [2, 9, 17])
def test_mamba2(width):
    x, dt = noise(ROWS, width, HEADS, LEFT), noise(ROWS, width, HEADS)
    B, C = (noise(ROWS, width, 2, RIGHT, seed=seed) for seed in (1, 2))
    A, D, bias = -noise(HEADS).exp(), noise(HEADS, seed=1), noise(HEADS, seed=2)
    before = noise(ROWS, HEADS, LEFT, RIGHT)
    found, states = mamba2(x, dt, A, B, C, D=D, dt_bias=bias, initial_states=before, chunk_size=64, z=None)
    steps = torch.nn.functional.softplus(dt + bias)
    B, C = B.repeat_interleave(2, dim=2), C.repeat_interleave(2, dim=2)
    state, outputs, after = before, [], [before]
    for i in range(width):
        added = (steps[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None]
        state = state * (A * steps[:, i]).exp()[..., None, None] + added
        outputs.append((state * C[:, i, :, None]).sum(dim=-1) + D[:, None] * x[:, i])
        after.append(state)
    torch.testing.assert_close(found, torch.stack(outputs, dim=1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind_each(before, states, width), torch.stack(after), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_convolution(biased):
    inputs, weight, bias = noise(ROWS, 8, 4 + 5), noise(8, 4), noise(8) if biased else None
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=8))
    found = convolution(inputs, weight=weight, bias=bias, activation="silu")
    torch.testing.assert_close(found, expected)
    assert found.shape[2] == 1 + 5


def test_rows_move_on_by_numbers_of_their_own():
    """Rows behind the window's stay, and so does one that moves on by no token; bit by bit."""
    v, g = noise(2, 5, HEADS, RIGHT), -noise(2, 5, HEADS).abs()
    q, k, beta = noise(2, 5, HEADS, LEFT), noise(2, 5, HEADS, LEFT, seed=1), noise(2, 5, HEADS).sigmoid()
    held = noise(3, HEADS, LEFT, RIGHT)
    before = held.clone()
    _, states = gated_delta_rule(q, k, v, g, beta, held[:2])
    assert torch.equal(held, before)
    states.take(held[:2], torch.tensor([0, 5]))
    assert torch.equal(held[[0, 2]], before[[0, 2]])
    assert not torch.equal(held[1], before[1])
