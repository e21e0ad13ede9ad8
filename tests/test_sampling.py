"""Draws and acceptance, on cases small enough to work out by hand."""

import pytest
import torch

from transformers_dspark.sampling import Noise, accept, accept_greedy, draw, pad_vocabulary


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, 5)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_takes_weights_that_do_not_sum_to_one():
    assert draw(torch.tensor([0.0, 3.0, 1.0]), torch.tensor(0.76, dtype=torch.float64)).item() == 2


def test_draw_never_takes_a_token_without_mass():
    probs = torch.zeros(1000, 7)
    probs[:, 3] = torch.rand(1000) * 1e-30 + 1e-37
    assert (draw(probs, Noise(0)(1000, device=probs.device)) == 3).all()


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 0.5]])
def test_draw_says_when_nothing_can_be_drawn(weights):
    assert draw(torch.tensor(weights), torch.tensor(0.5)).item() == 2


def test_tail_of_a_large_vocabulary():
    """In float32 the last of these tokens would have a cumulative weight that does not grow any more."""
    probs = torch.full((200_001,), 1e-9)
    probs[0] = 1.0
    assert draw(probs, torch.tensor(1 - 1e-9, dtype=torch.float64)).item() >= 199_990


def one(*values):
    return torch.tensor([values])


def test_accept_by_hand():
    target = torch.tensor([[[0.7, 0.3, 0.0], [0.2, 0.2, 0.6], [0.0, 0.0, 1.0]]])
    draft = torch.tensor([[[0.5, 0.5, 0.0], [0.8, 0.1, 0.1]]])

    def verdict(tokens, uniforms, bonus=0.5):
        out = accept(target, draft, one(*tokens), one(*uniforms).double(), torch.tensor([bonus]).double())
        return out.accepted.item(), out.bonus.item()

    assert verdict([0, 1], [0.99, 0.99]) == (2, 2)  # both ratios above one; the bonus from the last row
    assert verdict([1, 1], [0.59, 0.99])[0] == 2  # 0.3 / 0.5 = 0.6
    assert verdict([1, 1], [0.61, 0.0]) == (0, 0)  # residual (0.2, 0, 0)
    assert verdict([0, 0], [0.0, 0.26], 0.1) == (1, 1)  # 0.2 / 0.8; residual (0, 0.1, 0.5)
    assert verdict([0, 0], [0.0, 0.26], 0.2) == (1, 2)


def test_a_token_the_target_forbids_never_passes():
    verdict = accept(one([0.0, 1.0], [0.5, 0.5]), one([1.0, 0.0]), one(0), one(0.0).double(), torch.zeros(1).double())
    assert verdict.accepted.item() == 0
    assert verdict.bonus.item() == 1


def test_residual_without_mass_falls_back_to_the_target():
    probs = torch.tensor([[[0.4, 0.6]]])
    # equal distributions accept every noise below one, so an impossible one shows the guard
    verdict = accept(probs.repeat(1, 2, 1), probs, one(0), one(1.0).double(), torch.tensor([0.5]).double())
    assert verdict.accepted.item() == 0
    assert verdict.bonus.item() == 1


def test_narrower_draft_vocabulary():
    verdict = accept(
        one([0.1, 0.1, 0.8], [0.0, 0.0, 1.0]), one([0.5, 0.5]), one(0), one(0.5).double(), torch.zeros(1).double()
    )
    assert (verdict.accepted.item(), verdict.bonus.item()) == (0, 2)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_admitted_lengths_act_as_the_end_of_the_block(length):
    generator = torch.Generator().manual_seed(length)
    target, draft = (torch.rand(64, n, 5, generator=generator).softmax(-1) for n in (4, 3))
    tokens = torch.randint(5, (64, 3), generator=generator)
    noise, last = torch.rand(64, 3, generator=generator).double(), torch.rand(64, generator=generator).double()
    capped = accept(target, draft, tokens, noise, last, torch.full((64,), length))
    short = accept(target[:, : length + 1], draft[:, :length], tokens[:, :length], noise[:, :length], last)
    assert torch.equal(capped.accepted, short.accepted)
    assert torch.equal(capped.bonus, short.bonus)
    best = target.argmax(-1)
    assert torch.equal(
        accept_greedy(best, tokens, torch.full((64,), length)).accepted,
        accept_greedy(best[:, : length + 1], tokens[:, :length]).accepted,
    )


def test_greedy_is_the_one_hot_case():
    generator = torch.Generator().manual_seed(0)
    best, tokens = torch.randint(3, (256, 5), generator=generator), torch.randint(3, (256, 4), generator=generator)
    hot = torch.nn.functional.one_hot
    noise = Noise(0)
    rejection = accept(
        hot(best, 3).float(),
        hot(tokens, 3).float(),
        tokens,
        noise(256, 4, device=best.device),
        noise(256, device=best.device),
    )
    greedy = accept_greedy(best, tokens)
    assert torch.equal(greedy.accepted, rejection.accepted)
    assert torch.equal(greedy.bonus, rejection.bonus)


def test_width_zero():
    verdict = accept(
        one([0.0, 1.0]), torch.empty(1, 0, 0), torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0), torch.zeros(1)
    )
    assert (verdict.accepted.item(), verdict.bonus.item()) == (0, 1)


def test_pad_vocabulary():
    assert pad_vocabulary(torch.zeros(2, 3), 5).isneginf().sum() == 4
    assert pad_vocabulary(torch.zeros(2, 5), 5).shape == (2, 5)


def test_seeded_noise_ignores_the_global_generator():
    torch.manual_seed(0)
    first = Noise(7)(4, device=torch.device("cpu"))
    torch.manual_seed(1)
    assert torch.equal(first, Noise(7)(4, device=torch.device("cpu")))
    assert first.dtype == torch.float64
