"""
The private names of Transformers that we rely on are as we know them. A failure here names what a new release changed.
"""

import inspect

import pytest
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import utils
from transformers.generation.candidate_generator import CandidateGenerator

from transformers_dspark import _compat


@pytest.mark.parametrize("name", _compat.WRAPPED_METHODS)
def test_wrapped_methods(name):
    method = inspect.unwrap(getattr(GenerationMixin, name))
    assert _compat.parameters(method) == _compat.WRAPPED_METHODS[name]


@pytest.mark.parametrize("name", _compat.REBOUND_FUNCTIONS)
def test_rebound_functions(name):
    assert _compat.parameters(getattr(utils, name)) == _compat.REBOUND_FUNCTIONS[name]
    loop = inspect.unwrap(GenerationMixin._assisted_decoding)
    assert name in loop.__code__.co_names
    assert loop.__closure__ is None


def test_the_loop_as_we_know_it():
    """Lines of the loop whose meaning the slot depends on."""
    source = inspect.getsource(inspect.unwrap(GenerationMixin._assisted_decoding))
    for line in (
        "candidate_generator = self._get_candidate_generator(",
        "if do_sample and candidate_logits is not None:",
        "model_inputs |= candidate_generator.model_kwargs_overrides",
        "n_matches = valid_tokens.shape[1] - 1",
        "outputs.cache.crop(-number_of_tokens_to_crop)",
        "unfinished_sequences = unfinished_sequences & ~stopping_criteria(input_ids, scores)",
    ):
        assert line in source
    assert source.count("_speculative_sampling(") == 1
    for name in _compat.ANSWERED_METHODS:
        assert f"self.{name}(" in source


def test_protocol_of_candidate_generators():
    assert CandidateGenerator.requires_model_outputs is False
    assert list(_compat.parameters(CandidateGenerator.update_candidate_strategy))[1:] == [
        "input_ids",
        "scores",
        "num_matches",
    ]


def test_defaults_that_count_as_unset():
    defaults = GenerationConfig._get_default_generation_params()
    assert defaults["num_assistant_tokens"] == 20
    assert defaults["assistant_confidence_threshold"] == 0.4


def test_mask_length_is_recorded():
    assert f"generation_config.{_compat.MASK_LENGTH} = " in inspect.getsource(GenerationMixin.generate)


def test_rebind_leaves_everything_as_it_was():
    before = dict(vars(utils))

    def marker(*args):
        return "ours"

    loop = inspect.unwrap(GenerationMixin._assisted_decoding)
    bound = _compat.rebind(GenerationMixin._assisted_decoding, _speculative_sampling=marker)
    assert bound.__globals__["_speculative_sampling"] is marker
    assert bound.__code__ is loop.__code__
    assert loop.__globals__ is vars(utils)
    assert dict(vars(utils)) == before
    with pytest.raises(RuntimeError, match="no_such_name"):
        _compat.rebind(loop, no_such_name=marker)
