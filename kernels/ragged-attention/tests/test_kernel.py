"""
The kernels against the reference, and against themselves where bits must not move.

Rows end just before, at and behind the edges of blocks and splits; caches are NaN wherever nothing may be read. On a
machine without a GPU the kernels run in Triton's interpreter, which shares their arithmetic and not their speed.
"""

import pytest
import torch
from ragged_attention import ragged_attention_reference
from ragged_inputs import make


pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(inputs, **options):
    from ragged_attention import ragged_attention

    def there(value):
        return value.to(DEVICE) if torch.is_tensor(value) else value

    inputs, options = ({k: there(v) for k, v in given.items()} for given in (inputs, options))
    return ragged_attention(**inputs, **options).cpu()


def assert_matches(inputs, **options):
    expected = ragged_attention_reference(**inputs, **options)
    torch.testing.assert_close(run(inputs, **options), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("lengths", "widths"),
    [
        ([63], [8]),
        ([100, 7, 0], [1, 5, 3]),  # a row without a past
        ([63, 111, 94], [8, 0, 17]),  # a row without a window; more tokens than one block of queries
        ([31, 32, 33], [1, 1, 1]),  # one split and two
        ([0, 0], [0, 2]),
    ],
)
def test_ragged_rows(lengths, widths, causal):
    assert_matches(make(lengths, widths), causal=causal)


def test_many_splits():
    assert_matches(make([1030, 260, 64], [3, 1, 2], heads=2, kv_heads=1, capacity=1100))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (5, 1), (16, 1)])
def test_grouped_queries(heads, kv_heads):
    assert_matches(make([11, 70], [4, 9], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 48), (256, 256), (7, 130)])
def test_head_sizes(head_dim, value_dim):
    assert_matches(make([65, 3], [5, 2], heads=2, kv_heads=1, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("constants", [(16, 16, 8), (64, 32, 64), (32, 128, 1)])
def test_any_tiling(constants):
    from ragged_attention import Tiling

    inputs = make([100, 31, 8], [9, 2, 1])
    expected = ragged_attention_reference(**inputs)
    torch.testing.assert_close(run(inputs, tiling=Tiling(*constants)), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sliding_window", [1, 3, 8, 64, 200])
def test_sliding_window(sliding_window, causal):
    lengths = [100, 5]
    oldest = [length - sliding_window + 1 for length in lengths]
    assert_matches(make(lengths, [8, 4], oldest=oldest), sliding_window=sliding_window, causal=causal)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_softcap_and_sinks(softcap, sinks):
    sinks = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 40.0]) if sinks else None
    assert_matches(make([90, 2], [7, 5], value_dim=12), softcap=softcap, sinks=sinks)


def test_large_scores_do_not_overflow():
    inputs = make([90], [4])
    inputs["query"] *= 1e4
    assert_matches(inputs)
    assert_matches(inputs, softcap=20.0)


def test_padding_gets_zeros():
    inputs = make([9, 80], [3, 2], padding=3)
    inputs["query"][5:] = float("nan")
    out = run(inputs)
    assert not out[:5].isnan().any()
    assert (out[5:] == 0).all()


def test_nothing_to_do():
    assert run(make([9], [0])).shape == (0, 6, 20)
    assert (run(make([9], [0], padding=2)) == 0).all()


def test_strides_are_followed():
    inputs = make([70, 9], [3, 2])
    expected = run(inputs)
    inputs["query"] = inputs["query"].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("key_cache", "value_cache"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run(inputs), expected)


def picked(inputs, order):
    """The rows of a batch in another order, or some of them."""
    starts = inputs["offsets"].tolist()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order])
    widths = torch.tensor([starts[row + 1] - starts[row] for row in order])
    chosen = {name: inputs[name][order] for name in ("key_cache", "value_cache", "lengths")}
    return {
        **inputs,
        **chosen,
        "query": inputs["query"][tokens],
        "offsets": torch.cat((torch.zeros(1, dtype=torch.long), widths.cumsum(0))),
    }, tokens


@pytest.mark.parametrize("order", [[2, 0, 1], [1]], ids=["permuted", "alone"])
def test_a_row_keeps_its_bits_whatever_its_batch_mates_are(order):
    inputs = make([63, 105, 7], [8, 5, 3])
    some, tokens = picked(inputs, order)
    assert torch.equal(run(some), run(inputs)[tokens])


def test_a_row_keeps_its_bits_whatever_room_the_launch_provides():
    inputs = make([63, 105, 7], [8, 5, 3])
    expected = run(inputs)
    assert torch.equal(run(inputs, max_width=8, max_length=105), expected)
    roomy = {**inputs, **{n: torch.nn.functional.pad(inputs[n], (0, 0, 0, 900)) for n in ("key_cache", "value_cache")}}
    assert torch.equal(run(roomy, max_width=12), expected)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's products take bfloat16 for integers"),
        ),
    ],
)
def test_low_precision_errs_at_most_twice_as_much_as_pytorch(dtype):
    exact = make([300, 64], [8, 5], heads=4, kv_heads=2, head_dim=64, value_dim=64, capacity=320)
    low = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in exact.items()}
    back = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in low.items()}
    truth = ragged_attention_reference(**back)
    ours = (run(low).float() - truth).abs().max()
    theirs = torch.zeros(())
    for row, (begin, end) in enumerate([(0, 8), (8, 13)]):
        length = int(low["lengths"][row])
        keys, values = (
            low[n][row, :, : length + end - begin].repeat_interleave(2, 0) for n in ("key_cache", "value_cache")
        )
        mask = torch.ones(end - begin, length + end - begin, dtype=torch.bool).tril(diagonal=length)
        scores = low["query"][begin:end].transpose(0, 1) @ keys.transpose(1, 2)
        weights = (scores * low["scaling"]).masked_fill(~mask, float("-inf")).softmax(-1)
        plain = (weights @ values).transpose(0, 1)
        theirs = torch.maximum(theirs, (plain.float() - truth[begin:end]).abs().max())
    assert ours <= 2 * theirs


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_launches_of_other_sizes_compile_nothing():
    from ragged_attention import kernel, write, write_entries

    def compiled():
        functions = (kernel._partial, kernel._combine, write._write)
        return [len(made) for function in functions for made, *_ in function.device_caches.values()]

    before = None
    for lengths, widths in (([70, 9, 80], [8, 8, 16]), ([100], [1]), ([0, 0], [3, 90]), ([30] * 16, [1] * 16)):
        inputs = make(lengths, widths, heads=6, head_dim=16, value_dim=16, capacity=128)
        spans = torch.tensor([[*lengths, 0], inputs["offsets"].tolist()], dtype=torch.int32, device=DEVICE)
        run(inputs | {"lengths": spans[0, :-1], "offsets": spans[1]}, max_width=max(widths))
        places = torch.tensor([(r, n + k) for r, n in enumerate(lengths) for k in range(widths[r])]).T.contiguous()
        new = torch.randn(2, places.shape[1], 2, 16, device=DEVICE)
        write_entries(*new, inputs["key_cache"].to(DEVICE), inputs["value_cache"].to(DEVICE), *places.to(DEVICE))
        assert before in (None, compiled())
        before = compiled()


def test_written_entries():
    from ragged_attention import write_entries

    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 9, dim, generator=generator).transpose(0, 1) for dim in (20, 33))
    caches = [torch.full((4, 3, 11, dim), 7.0) for dim in (20, 33)]
    slots, entries = torch.tensor([0, 0, 0, 2, 2, 3, 1, 1, 1]), torch.tensor([4, 5, 6, 0, 1, 10, 8, 9, 10])
    expected = [cache.clone() for cache in caches]
    for cache, new in zip(expected, (keys, values), strict=True):
        cache[slots, :, entries] = new
    there = [tensor.to(DEVICE) for tensor in (keys, values, *caches, slots, entries)]
    write_entries(*there)
    for written, cache in zip(there[2:4], expected, strict=True):
        assert torch.equal(written.cpu(), cache)


def test_more_slots_than_windows():
    inputs = make([63, 11], [3, 2])
    expected = ragged_attention_reference(**inputs)
    for name in ("key_cache", "value_cache"):
        inputs[name] = torch.cat((inputs[name], torch.full_like(inputs[name][:1], float("nan"))))
    assert torch.equal(ragged_attention_reference(**inputs), expected)
    torch.testing.assert_close(run(inputs), expected, rtol=2e-5, atol=2e-6)
