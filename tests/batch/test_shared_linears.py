"""Linear layers of the same states: one launch for all in a compiled graph, and nothing else changes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from transformers_dspark.kernels.few_rows_linear import few_rows_linear_op
from transformers_dspark.shared_linears import SHARED_LAUNCHES, share_launches


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def names(graph):
    return [node.target.__name__ for node in graph.nodes if node.op == "call_function" and "few_rows" in str(node)]


@pytest.mark.parametrize("biased", [False, True])
def test_layers_of_the_same_states_become_one(biased):
    weights, biases = [normal(rows, 6) for rows in (8, 3, 5)], [normal(rows) for rows in (8, 3, 5)]

    def work(states, weights, biases):
        pairs = zip(weights, biases if biased else [None] * 3, strict=True)
        first, second, third = (few_rows_linear_op(states, *pair) for pair in pairs)
        return first.sum() * second + few_rows_linear_op(third.tanh(), normal(3, 5)), third

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
            few_rows_linear_op(states, weights[0], bias),
            few_rows_linear_op(states, weights[1]),
            few_rows_linear_op(states, weights[1].t()),
            few_rows_linear_op(states, weights[2] * 2),
            few_rows_linear_op(states + 1, weights[1]),
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
        return torch.cat([few_rows_linear_op(states, weight) for weight in weights], dim=1) + 1

    compiled = torch.compile(work, dynamic=True, options={"post_grad_custom_pre_pass": Noted()})
    for tokens in (3, 40):
        states = normal(tokens, 6)
        expected = torch.cat([F.linear(states, weight) for weight in weights], dim=1) + 1
        torch.testing.assert_close(compiled(states), expected)
    assert seen == [["few_rows_linears.default"]]
