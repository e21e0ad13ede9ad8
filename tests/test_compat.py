"""
The private names of Transformers that we rely on are as we know them. A failure here names what a new release changed.
"""

import inspect

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    DeepseekV4Config,
    Gemma3Config,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation import utils
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

from transformers_dspark import DSparkConfig, DSparkDrafter, _compat
from transformers_dspark.backbone_dspark import DSparkRotaryEmbedding


METHODS = {
    _compat.VALIDATE_MODE: ["self", "generation_mode", "generation_config", "generation_mode_kwargs"],
    _compat.ASSISTED_LOOP: [
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "inputs_tensor",
        "assistant_model",
        "assistant_tokenizer",
        "tokenizer",
        "model_kwargs",
    ],
}
FUNCTIONS = {
    _compat.ACCEPT: [
        "candidate_input_ids",
        "candidate_logits",
        "candidate_length",
        "new_logits",
        "assistant_ensemble_weight",
    ],
    _compat.SPLIT_OUTPUTS: ["outputs", "new_outputs", "cur_len", "added_len", "is_decoder_attention"],
}


def parameters(function):
    return list(inspect.signature(function).parameters)


def original_loop():
    return inspect.unwrap(getattr(GenerationMixin, _compat.ASSISTED_LOOP))


@pytest.mark.parametrize("name", METHODS)
def test_wrapped_methods(name):
    assert parameters(inspect.unwrap(getattr(GenerationMixin, name))) == METHODS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rebound_functions(name):
    assert parameters(getattr(utils, name)) == FUNCTIONS[name]
    assert name in original_loop().__code__.co_names
    assert original_loop().__closure__ is None


def test_the_loop_as_we_know_it():
    """Lines of the loop whose meaning the slot depends on."""
    source = inspect.getsource(original_loop())
    for line in (
        f"candidate_generator = self.{_compat.CANDIDATE_GENERATOR}(",
        "self.prepare_inputs_for_generation(",
        "if do_sample and candidate_logits is not None:",
        "model_inputs |= candidate_generator.model_kwargs_overrides",
        "n_matches = valid_tokens.shape[1] - 1",
        "outputs.cache.crop(-number_of_tokens_to_crop)",
        "unfinished_sequences = unfinished_sequences & ~stopping_criteria(input_ids, scores)",
    ):
        assert line in source
    assert source.count(f"{_compat.ACCEPT}(") == 1


def test_protocol_of_candidate_generators():
    assert CandidateGenerator.requires_model_outputs is False
    assert parameters(CandidateGenerator.update_candidate_strategy)[1:] == ["input_ids", "scores", "num_matches"]


def test_defaults_that_count_as_unset():
    defaults = _compat.generation_defaults()
    assert defaults["num_assistant_tokens"] == 20
    assert defaults["assistant_confidence_threshold"] == 0.4
    assert "_get_default_generation_params()" in inspect.getsource(GenerationMixin)


def test_recurrent_state():
    assert PreTrainedModel._is_stateful is False
    assert "if self._is_stateful:" in inspect.getsource(
        inspect.unwrap(getattr(GenerationMixin, _compat.VALIDATE_MODE))
    )


def test_attention_implementations():
    config = Gemma3Config(text_config={"num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1})
    config._attn_implementation = {"": "eager", "text_config": "sdpa"}
    found = _compat.attention_implementations(config)
    assert (found[""], found["text_config"]) == ("eager", "sdpa")


def test_own_attention():
    with torch.device("meta"):
        found = _compat.own_attention(DeepseekV4Attention(DeepseekV4Config(num_hidden_layers=1), 0))
    assert found.__module__ == DeepseekV4Attention.__module__
    assert "sinks" in inspect.getsource(found)


@pytest.mark.parametrize("mapping", [CONFIG_MAPPING, MODEL_MAPPING])
def test_auto_classes_can_be_forgotten(mapping):
    mapping.register("some key", DSparkConfig)
    assert "some key" in mapping._extra_content
    _compat.forget(mapping, "some key")
    assert "some key" not in mapping._extra_content
    _compat.forget(mapping, "some key")


def test_declarations_of_the_flat_files():
    for name in ("_auto_class", "_supports_sdpa", "_no_split_modules", "_tied_weights_keys"):
        assert hasattr(PreTrainedModel, name)
        assert getattr(DSparkDrafter, name)


def test_frequencies_are_filled_in_by_the_class_name():
    """Loading makes modules on the meta device, whose buffers only this branch of Transformers fills."""
    source = inspect.getsource(PreTrainedModel._init_weights)
    assert '"RotaryEmbedding" in module.__class__.__name__ and hasattr(module, "original_inv_freq")' in source
    config = DSparkConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1, head_dim=8)
    rotary = DSparkRotaryEmbedding(config)
    expected = rotary.inv_freq.clone()
    with torch.no_grad():
        rotary.inv_freq.zero_()
        rotary.original_inv_freq.zero_()
    PreTrainedModel._init_weights(DSparkDrafter(config), rotary)
    assert torch.equal(rotary.inv_freq, expected)
    assert torch.equal(rotary.original_inv_freq, expected)
    assert {"linear", "dynamic", "yarn", "llama3"} <= ROPE_INIT_FUNCTIONS.keys()


def test_mask_length_is_recorded():
    assert f"generation_config.{_compat.MASK_LENGTH} = " in inspect.getsource(GenerationMixin.generate)


def test_rebind_leaves_everything_as_it_was():
    before = dict(vars(utils))

    def marker(*args):
        return "ours"

    loop = original_loop()
    bound = _compat.rebind(getattr(GenerationMixin, _compat.ASSISTED_LOOP), **{_compat.ACCEPT: marker})
    assert bound.__globals__[_compat.ACCEPT] is marker
    assert bound.__code__ is loop.__code__
    assert loop.__globals__ is vars(utils)
    assert dict(vars(utils)) == before
    with pytest.raises(RuntimeError, match="no_such_name"):
        _compat.rebind(loop, no_such_name=marker)


def test_hooks_are_seen():
    module = torch.nn.Linear(1, 1)
    assert not _compat.has_hooks(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert _compat.has_hooks(module)
        handle.remove()
    with torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1, num_hidden_layers=1))
        model(torch.ones(1, 1, dtype=torch.long), output_hidden_states=True)
    assert not any(map(_compat.has_hooks, model.modules()))


def test_one_build_for_all_shapes():
    from torch._dynamo import config
    from torch.fx.experimental import _config

    with _compat.one_build_for_all_shapes():
        assert (_config.use_duck_shape, config.specialize_float) == (False, True)
    assert (_config.use_duck_shape, config.specialize_float) == (True, False)


def test_numbers_are_constants_at_once():
    """Two sizes that are equal once, and a number: one build for other sizes, and one trace."""
    torch.compiler.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    scaled = torch.compile(lambda a, b, number: (a * number).sum() + b, backend="aot_eager", dynamic=True)
    for first, second in ((3, 3), (3, 5), (4, 2)):
        with _compat.one_build_for_all_shapes():
            scaled(torch.ones(first), torch.ones(second), 0.5)
    (build,) = torch._dynamo.utils.get_compilation_metrics()
    assert not build.restart_reasons


def test_marked_sizes_stay_open():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    double = torch.compile(lambda t: t * 2, backend="eager")
    for size in (3, 5, 4):
        tensor = torch.ones(1, size)
        _compat.mark_size(tensor, 1)
        assert torch.equal(double(tensor), torch.full((1, size), 2.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_options_of_a_mode_are_its_own():
    from torch._inductor import config

    assert _compat.mode_options(None) == {}
    assert _compat.mode_options("max-autotune-no-cudagraphs").items() >= {"max_autotune": True}.items()
    assert hasattr(config, "post_grad_custom_pre_pass")


def test_a_rewriting_is_known_by_its_file(tmp_path):
    source, graph = tmp_path / "rules.py", torch.fx.Graph()
    source.write_text("1")
    rewriting = _compat.graph_pass(lambda graph: graph.placeholder("x"), source)
    rewriting(graph)
    assert [node.op for node in graph.nodes] == ["placeholder"]
    assert rewriting.uuid() == _compat.graph_pass(print, source).uuid()
