"""Muon over stacks of matrices against PyTorch's, which takes them one by one."""

import pytest
import torch
from torch import nn

from transformers_dspark.training import optimizer
from transformers_dspark.training.optimizer import StackedMuon, orthogonal


SHAPES = [(6, 6), (4, 10), (6, 6), (10, 4), (4, 10), (1, 5)]


@pytest.mark.parametrize("stacked", [1, 2**24], ids=["one by one", "together"])
def test_steps_are_those_of_pytorch(stacked, monkeypatch):
    monkeypatch.setattr(optimizer, "STACKED", stacked)
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(2))
    for left, right in zip(ours, theirs, strict=True):
        left.data.normal_()
        right.data.copy_(left)
    begin = [parameter.detach().clone() for parameter in ours]
    muon = StackedMuon(ours, lr=0.1, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            left.grad = right.grad = None if place == 2 and step == 1 else torch.randn(left.shape)
        muon.step()
        reference.step()
    for left, right, before in zip(ours, theirs, begin, strict=True):
        moved, expected = (float((side.detach() - before).norm()) for side in (left, right))
        assert expected > 0.05
        assert moved == pytest.approx(expected, rel=0.01)
        assert float((left - right).detach().norm()) < 0.02 * expected  # theirs are in bfloat16
    # a state of the one continues the other
    reference.load_state_dict({**reference.state_dict(), "state": muon.state_dict()["state"]})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 64, 192), (2, 192, 64)])
def test_bfloat16_on_cuda(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    expected, found = orthogonal(matrices), orthogonal(matrices.cuda())
    assert found.dtype == torch.bfloat16
    assert found.shape == shape
    assert float((found.cpu().float() - expected).norm()) < 0.03 * float(expected.norm())


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    for matrices in (torch.randn(3, 16, 40), torch.randn(2, 40, 16) * 1e3, torch.zeros(1, 4, 4)):
        found = orthogonal(matrices)
        assert found.shape == matrices.shape
        values = torch.linalg.svdvals(found.float())
        if matrices.any():
            assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
        else:
            assert not found.any()
