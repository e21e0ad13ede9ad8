"""Small targets and their answers, made once a session."""

import pytest
from transformers import LlamaForCausalLM

from tests.training.tiny import greedy_answers, tiny_target, walking_target
from transformers_dspark.training.data import Sequences


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="session")
def answers(tiny) -> Sequences:
    return greedy_answers(tiny)


@pytest.fixture(scope="session")
def walker() -> LlamaForCausalLM:
    return walking_target()
