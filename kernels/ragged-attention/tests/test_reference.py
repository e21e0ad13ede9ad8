"""
The reference against the plainest loop: one row, one head, one query at a time, in float64.

Odd sizes catch what round ones hide; caches are NaN wherever nothing may be read, so one entry too many shows.
"""

import math

import pytest
import torch
from ragged_attention import ragged_attention_reference
from ragged_inputs import make


def naive(inputs, causal=True, sliding_window=None, softcap=None, sinks=None):
    query, keys, values = inputs["query"], inputs["key_cache"], inputs["value_cache"]
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = torch.zeros(query.shape[0], heads, values.shape[-1], dtype=torch.float64)
    offsets = inputs["offsets"].tolist()
    for row, length in enumerate(inputs["lengths"].tolist()):
        begin, end = offsets[row], offsets[row + 1]
        for i in range(end - begin):
            for head in range(heads):
                kv_head = head * kv_heads // heads
                terms = []  # (score, value) of each visible key
                for position in range(length + end - begin):
                    if causal and position > length + i:
                        continue
                    if sliding_window is not None and position <= length + i - sliding_window:
                        continue
                    k, v = keys[row, kv_head, position], values[row, kv_head, position]
                    score = inputs["scaling"] * torch.dot(query[begin + i, head].double(), k.double()).item()
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    terms.append((math.exp(score), v.double()))
                total = sum(weight for weight, _ in terms)
                if sinks is not None:
                    total += math.exp(sinks[head].item())
                out[begin + i, head] = sum(weight * v for weight, v in terms) / total
    return out


def assert_matches(inputs, **options):
    actual = ragged_attention_reference(**inputs, **options)
    torch.testing.assert_close(actual.double(), naive(inputs, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("lengths", "widths"),
    [
        ([63], [8]),
        ([100, 7, 0], [1, 5, 3]),  # a row without a past
        ([63, 100, 103], [8, 0, 8]),  # a row without a window; a full cache beside a window
    ],
)
def test_ragged_rows(lengths, widths, causal) -> None:
    assert_matches(make(lengths, widths), causal=causal)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (5, 1)])
def test_grouped_queries(heads, kv_heads) -> None:
    assert_matches(make([11, 3], [4, 2], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sliding_window", [1, 3, 8, 63, 200])
def test_sliding_window(sliding_window, causal) -> None:
    lengths = [63, 5]
    oldest = [length - sliding_window + 1 for length in lengths]
    inputs = make(lengths, [8, 4], oldest=oldest)  # what the window left behind is NaN
    assert_matches(inputs, sliding_window=sliding_window, causal=causal)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_softcap_and_sinks(softcap, sinks) -> None:
    inputs = make([31, 2], [7, 5], value_dim=12)
    assert_matches(inputs, softcap=softcap, sinks=torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 4.0]) if sinks else None)


def test_padding_gets_zeros() -> None:
    inputs = make([9, 4], [3, 2], padding=3)
    inputs["query"][5:] = float("nan")
    out = ragged_attention_reference(**inputs)
    assert not out[:5].isnan().any()
    assert (out[5:] == 0).all()


def test_rows_are_independent() -> None:
    inputs = make([63, 100, 7], [8, 5, 3])
    alone = make([63, 100, 7], [8, 5, 3])
    for name in ("key_cache", "value_cache", "lengths"):
        alone[name] = alone[name][1:2]
    alone["query"] = alone["query"][8:13]
    alone["offsets"] = torch.tensor([0, 5])
    assert torch.equal(ragged_attention_reference(**inputs)[8:13], ragged_attention_reference(**alone))


def test_low_precision_accumulates_in_float32() -> None:
    inputs = {
        name: tensor.bfloat16() if torch.is_tensor(tensor) and tensor.is_floating_point() else tensor
        for name, tensor in make([100], [8]).items()
    }
    out = ragged_attention_reference(**inputs)
    assert out.dtype == torch.bfloat16
    # Only the last rounding is left: half a unit of bfloat16's 8 bits.
    torch.testing.assert_close(out.double(), naive(inputs), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lengths", torch.tensor([109, 0]), "lengths is .* must fit the capacity 111"),
        ("lengths", torch.tensor([-1, 0]), "numbers from 0"),
        ("lengths", torch.tensor([1]), "must hold 2 numbers"),
        ("offsets", torch.tensor([0, 4, 3]), "rising from 0"),
        ("offsets", torch.tensor([1, 2, 5]), "rising from 0"),
        ("offsets", torch.tensor([0, 2, 6]), "at most 5"),
        ("value_cache", torch.zeros(2, 4, 111, 20), "value_cache has shape"),
        ("query", torch.zeros(5, 5, 20), "5 query heads cannot share 2"),
        ("sinks", torch.zeros(5), "sinks has shape"),
        ("softcap", 0.0, "softcap is 0.0"),
        ("sliding_window", 0, "sliding_window is 0"),
    ],
)
def test_what_does_not_belong_together(name, value, message) -> None:
    inputs = {**make([9, 4], [3, 2]), name: value}
    with pytest.raises(ValueError, match=message):
        ragged_attention_reference(**inputs)
