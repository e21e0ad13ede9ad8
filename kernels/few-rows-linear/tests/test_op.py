"""The operator: what it computes, and that a compiled model asks nothing about the number of tokens."""

import pytest
import torch
import torch.nn.functional as F
from few_rows_linear import few_rows_linear_op, few_rows_linears_op
from torch import library


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("shape", [(3, 20), (2, 50, 20), (0, 20), (20,)])
def test_any_number_of_tokens(shape):
    states, weight, bias = normal(*shape), normal(7, 20), normal(7)
    assert torch.ops.transformers_dspark.few_rows_linear.default is few_rows_linear_op._opoverload
    torch.testing.assert_close(few_rows_linear_op(states, weight, bias), F.linear(states, weight, bias))
    torch.testing.assert_close(torch.ops.transformers_dspark.few_rows_linear(states, weight), F.linear(states, weight))


@pytest.mark.parametrize("shape", [(3, 20), (2, 50, 20), (0, 20), (20,)])
def test_several_weights(shape):
    states, weights, biases = (
        normal(*shape),
        [normal(7, 20), normal(1, 20), normal(33, 20)],
        [normal(7), normal(1), normal(33)],
    )
    for given in ([], biases):
        parts = few_rows_linears_op(states, weights, given)
        for index, (part, weight) in enumerate(zip(parts, weights)):
            expected = F.linear(states, weight, given[index] if given else None)
            torch.testing.assert_close(part, expected)


def test_the_operators_are_well_registered():
    library.opcheck(few_rows_linear_op, (normal(2, 3, 20), normal(7, 20), normal(7)))
    library.opcheck(few_rows_linears_op, (normal(2, 3, 20), [normal(7, 20), normal(5, 20)], [normal(7), normal(5)]))


def test_a_compiled_model_has_no_guard_on_the_number_of_tokens():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    weight = normal(7, 20)
    compiled = torch.compile(lambda states: few_rows_linear_op(states, weight) + 1, backend=backend, dynamic=True)
    for tokens in (5, 64, 65, 130):
        states = normal(tokens, 20)
        torch.testing.assert_close(compiled(states), F.linear(states, weight) + 1)
    assert len(graphs) == 1
