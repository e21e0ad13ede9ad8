"""
The kernels against the reference, and against themselves where bits must not move.

Rows, columns and tokens end just before, at and behind the edges of tiles and splits. On a machine without a GPU the
kernels run in Triton's interpreter, which shares their order of sums and not their speed.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from few_rows_linear import few_rows_linear_reference


pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def run(states, weight, bias=None, **constants):
    """`constants` are those of a `Tiling`, whatever the number of tokens."""
    from few_rows_linear import Tiling, few_rows_linear

    tiling = Tiling(**{"splits": 1, "block_k": 32, "block_n": 32, "num_warps": 4, "shared": 64} | constants)
    return few_rows_linear(states, weight, bias, tilings=(tiling, tiling))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("tokens", "features", "size"), [(1, 32, 96), (16, 31, 95), (17, 33, 97), (64, 1, 111)])
def test_edges(tokens, features, size, splits):
    states, weight, bias = normal(tokens, size), normal(features, size), normal(features)
    for given in (None, bias):
        expected = few_rows_linear_reference(states, weight, given)
        torch.testing.assert_close(run(states, weight, given, splits=splits), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("constants", [(2, 64, 16), (5, 16, 64), (9, 32, 128)])
def test_any_tiling(constants):
    """The last has more splits than blocks: some add nothing."""
    states, weight = normal(5, 200), normal(70, 200)
    made = run(states, weight, **dict(zip(("splits", "block_k", "block_n"), constants)))
    torch.testing.assert_close(made, few_rows_linear_reference(states, weight), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("features", "size"), [(70, 1024), (9, 20), (64, 1), (200, 8)])
def test_the_constants_of_the_rule(features, size):
    from few_rows_linear import few_rows_linear

    states, weight = normal(2, 3, size), normal(features, size)
    made = few_rows_linear(states, weight)
    torch.testing.assert_close(made, few_rows_linear_reference(states, weight), rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("features", [(33, 1, 64), (32, 32), (5,) * 16])
def test_weights_that_share_a_launch(features, splits):
    from few_rows_linear import Tiling, few_rows_linears

    tiling = Tiling(splits, 32, 32, 4, 64)
    states, weights = normal(2, 3, 95), [normal(rows, 95) + i for i, rows in enumerate(features)]
    biases = [normal(rows) - i for i, rows in enumerate(features)]
    for given in (None, biases):
        made = few_rows_linears(states, weights, given, (tiling, tiling))
        for part, weight, bias in zip(made, weights, given or [None] * len(weights)):
            assert torch.equal(part, run(states, weight, bias, splits=splits))


@pytest.mark.parametrize("strides", [True, False])
def test_weights_that_cannot_share_a_launch(strides):
    from few_rows_linear import few_rows_linears

    wrong = [normal(8, 8), normal(8, 8).t()] if strides else [normal(8, 8)] * 17
    with pytest.raises(ValueError, match=f"{len(wrong)} weights"):
        few_rows_linears(normal(3, 8), wrong)
    with pytest.raises(ValueError, match="one of each"):
        few_rows_linears(normal(3, 8), [normal(8, 8)] * 2, [normal(8)])


def test_strides_are_followed():
    states, weight, bias = normal(6, 80), normal(40, 80), normal(40)
    expected = run(states, weight, bias, splits=2)
    assert torch.equal(run(states.t().contiguous().t(), weight.t().contiguous().t(), bias, splits=2), expected)
    wide = torch.full((12, 100), float("nan"), device=DEVICE)
    wide[::2, 10:90] = states
    assert torch.equal(run(wide[::2, 10:90], weight, bias.repeat(2).view(2, -1).t()[:, 0], splits=2), expected)


def test_one_token_without_a_batch():
    states, weight = normal(50), normal(20, 50)
    assert torch.equal(run(states, weight), run(states[None], weight)[0])


@pytest.mark.parametrize("tokens", [0, 65])
def test_tokens_out_of_range(tokens):
    with pytest.raises(ValueError, match=f"{tokens} tokens"):
        run(normal(tokens, 8), normal(4, 8))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_token_keeps_its_bits_among_companions_of_its_padding(splits):
    states, weight = normal(16, 120), normal(40, 120)
    full = run(states, weight, splits=splits)
    for chosen in ([3], [15, 0]):
        assert torch.equal(run(states[chosen], weight, splits=splits), full[chosen])


def test_a_token_keeps_its_bits_whatever_its_padding():
    """
    The products of a block add up without rounding, and the blocks' sums lie far apart: what is left to differ is the
    order in which blocks and splits are added. Within a block the order is the device's, see the test below.
    """
    block, blocks = 32, 6
    generator = torch.Generator().manual_seed(0)

    def whole_numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).float().to(DEVICE)

    states = whole_numbers(-8, 9, 64, blocks * block)
    scales = whole_numbers(129, 256, blocks) * 2.0 ** whole_numbers(-12, 12, blocks)
    weight = whole_numbers(-8, 9, 32, blocks * block) * scales.repeat_interleave(block)
    full = run(states, weight, splits=2)
    turned = torch.arange(blocks * block, device=DEVICE).view(blocks, block).flip(0).flatten()
    assert not torch.equal(run(states[:, turned], weight[:, turned], splits=2), full)  # an order one can see
    for tokens in (1, 17, 33):
        assert torch.equal(run(states[:tokens], weight, splits=2), full[:tokens])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("features", "size"), [(4096, 4096), (1024, 4096), (300, 1000)])
def test_a_token_keeps_its_bits_on_a_device(features, size, dtype):
    from few_rows_linear import few_rows_linear

    states, weight = normal(64, size, dtype=dtype), normal(features, size, dtype=dtype)
    full = few_rows_linear(states, weight)
    for tokens in range(1, 64):
        assert torch.equal(few_rows_linear(states[:tokens], weight), full[:tokens]), tokens
        assert torch.equal(few_rows_linear(states[-tokens:], weight), full[-tokens:]), tokens


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=on_gpu)])
def test_low_precision_errs_at_most_twice_as_much_as_pytorch(dtype, tokens):
    states, weight, bias = normal(tokens, 300, dtype=dtype), normal(70, 300, dtype=dtype), normal(70, dtype=dtype)
    truth = F.linear(states.double(), weight.double(), bias.double())
    theirs = (F.linear(states, weight, bias).double() - truth).abs().max()
    for splits in (1, 4):
        made = run(states, weight, bias, splits=splits, block_k=64, block_n=64)
        assert made.dtype == dtype
        assert (made.double() - truth).abs().max() <= 2 * theirs


@on_gpu
def test_a_captured_graph_replays_it():
    from few_rows_linear import few_rows_linear

    states, weight = normal(8, 4096, dtype=torch.bfloat16), normal(1024, 4096, dtype=torch.bfloat16)
    few_rows_linear(states, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = few_rows_linear(states, weight)
        twice = few_rows_linear(once.repeat(1, 4), weight)
    states.copy_(states.flip(0))
    graph.replay()
    expected = few_rows_linear(states, weight)
    assert torch.equal(once, expected)
    assert torch.equal(twice, few_rows_linear(expected.repeat(1, 4), weight))


def test_tuned_constants_keep_bits_and_fit():
    """Both tilings of a pair add in one order with one instruction, and their stages fit a program's shared memory."""
    from few_rows_linear import default_tilings
    from few_rows_linear.kernel import TUNED

    rule = {key: default_tilings(*key) for key in product((64, 1024, 151936), (20, 4096, 20480), (2, 4))}
    for (_, size, item_size), (narrow, wide) in [*rule.items(), *TUNED.items()]:
        assert (narrow.splits, narrow.block_k) == (wide.splits, wide.block_k)
        assert (narrow.block_n % 64 == 0) == (wide.block_n % 64 == 0)
        assert all(tiling.num_warps == 4 or tiling.block_n >= 128 for tiling in (narrow, wide))
        assert narrow.splits <= max(1, size // narrow.block_k)
        for tiling, block_t in ((narrow, 16), (wide, 32), (wide, 64)):
            rows = tiling.block_n + block_t
            assert tiling.stages(block_t, size, item_size) * rows * tiling.block_k * item_size <= 227 * 1024
