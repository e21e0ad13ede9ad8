"""
The operators of linear layers: what they compute, that a compiled model asks nothing about the number of tokens, and
that layers of the same states share a launch there.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import library
from torch.fx.experimental.proxy_tensor import make_fx

from transformers_dspark.linear_ops import SHARED_LAUNCHES, few_rows_linear, few_rows_linears, share_launches


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("shape", [(3, 20), (2, 50, 20), (0, 20), (20,)])
def test_any_number_of_tokens(shape):
    states, weight, bias = normal(*shape), normal(7, 20), normal(7)
    torch.testing.assert_close(few_rows_linear(states, weight, bias), F.linear(states, weight, bias))
    torch.testing.assert_close(torch.ops.transformers_dspark.few_rows_linear(states, weight), F.linear(states, weight))


@pytest.mark.parametrize("shape", [(3, 20), (64, 20), (65, 20), (2, 50, 20), (0, 20), (20,)])
def test_several_weights(shape):
    states, weights, biases = (
        normal(*shape),
        [normal(7, 20), normal(1, 20), normal(33, 20)],
        [normal(7), normal(1), normal(33)],
    )
    for given in ([], biases):
        parts = few_rows_linears(states, weights, given)
        for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            expected = F.linear(states, weight, given[index] if given else None)
            torch.testing.assert_close(part, expected)


def test_the_operators_are_well_registered():
    library.opcheck(few_rows_linear, (normal(2, 3, 20), normal(7, 20), normal(7)))
    library.opcheck(few_rows_linears, (normal(2, 3, 20), [normal(7, 20), normal(5, 20)], [normal(7), normal(5)]))


def test_a_compiled_model_has_no_guard_on_the_number_of_tokens():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    weight = normal(7, 20)
    compiled = torch.compile(lambda states: few_rows_linear(states, weight) + 1, backend=backend, dynamic=True)
    for tokens in (5, 64, 65, 130):
        states = normal(tokens, 20)
        torch.testing.assert_close(compiled(states), F.linear(states, weight) + 1)
    assert len(graphs) == 1


def names(graph):
    return [node.target.__name__ for node in graph.nodes if node.op == "call_function" and "few_rows" in str(node)]


@pytest.mark.parametrize("biased", [False, True])
def test_layers_of_the_same_states_become_one(biased):
    weights, biases = [normal(rows, 6) for rows in (8, 3, 5)], [normal(rows) for rows in (8, 3, 5)]

    def work(states, weights, biases):
        pairs = zip(weights, biases if biased else [None] * 3, strict=True)
        first, second, third = (few_rows_linear(states, *pair) for pair in pairs)
        return first.sum() * second + few_rows_linear(third.tanh(), normal(3, 5)), third

    states = normal(2, 6)
    made = make_fx(work, tracing_mode="fake")(states, weights, biases)
    assert names(made.graph) == ["few_rows_linear.default"] * 4
    share_launches(made.graph)
    made.recompile()
    assert names(made.graph) == ["few_rows_linears.default", "few_rows_linear.default"]
    torch.testing.assert_close(made(states, weights, biases), work(states, weights, biases))


def test_layers_that_have_little_in_common_stay_alone():
    """Of other states; with a bias beside none; of other strides; with a weight that is computed."""
    states, weights, bias = normal(2, 6), [normal(6, 6) for _ in range(3)], normal(6)

    def work(states, weights, bias):
        return (
            few_rows_linear(states, weights[0], bias),
            few_rows_linear(states, weights[1]),
            few_rows_linear(states, weights[1].t()),
            few_rows_linear(states, weights[2] * 2),
            few_rows_linear(states + 1, weights[1]),
        )

    made = make_fx(work, tracing_mode="fake")(states, weights, bias)
    share_launches(made.graph)
    assert names(made.graph) == ["few_rows_linear.default"] * 5


def test_in_a_compiled_model_of_any_number_of_tokens():
    """As it is installed in PyTorch's compiler."""
    weights, seen = [normal(40, 6), normal(7, 6)], []

    class Noted(type(SHARED_LAUNCHES)):
        def __call__(self, graph):
            super().__call__(graph)
            seen.append(names(graph))

        def uuid(self):
            return None

    def work(states):
        return torch.cat([few_rows_linear(states, weight) for weight in weights], dim=1) + 1

    compiled = torch.compile(work, dynamic=True, options={"post_grad_custom_pre_pass": Noted()})
    for tokens in (3, 40):
        states = normal(tokens, 6)
        expected = torch.cat([F.linear(states, weight) for weight in weights], dim=1) + 1
        torch.testing.assert_close(compiled(states), expected)
    assert seen == [["few_rows_linears.default"]]
