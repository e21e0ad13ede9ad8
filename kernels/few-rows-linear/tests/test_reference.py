"""The reference against `F.linear` in float64, and the errors it shares with the kernel."""

import pytest
import torch
import torch.nn.functional as F
from few_rows_linear import few_rows_linear_reference


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_the_linear_layer(shape, with_bias):
    states, weight = normal(*shape), normal(5, 7)
    bias = normal(5) if with_bias else None
    truth = F.linear(states.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(few_rows_linear_reference(states, weight, bias), truth.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype):
    states, weight, bias = normal(3, 40, dtype=dtype), normal(6, 40, dtype=dtype), normal(6, dtype=dtype)
    truth = F.linear(states.double(), weight.double(), bias.double())
    error = (few_rows_linear_reference(states, weight, bias).double() - truth).abs()
    # half a unit in the last place, and what float32 adds to it
    assert (error <= torch.finfo(dtype).eps * (0.5 + 1e-3) * truth.abs() + 1e-5).all()


@pytest.mark.parametrize(
    ("states", "weight", "bias", "message"),
    [
        (normal(2, 7), normal(5, 6), None, "do not fit"),
        (normal(2, 7), normal(7), None, "do not fit"),
        (normal(2, 7), normal(5, 7), normal(7), r"must be \(5,\)"),
        (normal(2, 7), normal(5, 7, dtype=torch.float16), None, "share one float dtype"),
        (normal(2, 7).long(), normal(5, 7).long(), None, "share one float dtype"),
    ],
)
def test_what_does_not_belong_together(states, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        few_rows_linear_reference(states, weight, bias)
