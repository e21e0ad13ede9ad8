"""Registration is reversible, repeatable and invisible to everyone else."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, GenerationMixin, LlamaConfig, LlamaForCausalLM

import transformers_dspark
from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark._compat import ASSISTED_LOOP, VALIDATE_MODE


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def no_deprecations():
    """Replaces the fixture for all tests: Transformers' own assistants trip over a deprecation of Transformers."""


@pytest.fixture(autouse=True)
def registered_again():
    yield
    transformers_dspark.register()


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return [LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=n)).eval() for n in (2, 1)]


def methods():
    return {name: vars(GenerationMixin)[name] for name in (VALIDATE_MODE, ASSISTED_LOOP)}


def test_unregister_restores_the_very_functions():
    wrapped = methods()
    transformers_dspark.unregister()
    original = methods()
    assert all(function.__module__ == "transformers.generation.utils" for function in original.values())
    assert all(not hasattr(function, "__wrapped__") for function in original.values())
    assert all(wrapped[name].__wrapped__ is original[name] for name in original)
    transformers_dspark.unregister()
    assert methods() == original
    transformers_dspark.register()
    once = methods()
    transformers_dspark.register()
    assert methods() == once
    assert all(once[name].__wrapped__ is original[name] for name in original)


def test_auto_classes(tmp_path):
    drafter = DSparkDrafter(
        DSparkConfig(**{k: v for k, v in SHAPE.items() if k != "eos_token_id"}, num_hidden_layers=1)
    )
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DSparkConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), DSparkDrafter)
    # Transformers replaces its own module object while it loads, and the pipeline asks the latest
    assert sys.modules["transformers"].DSparkDrafter is DSparkDrafter
    transformers_dspark.unregister()
    with pytest.raises(ValueError, match="custom code"):  # the folder's own is all that is left
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert not hasattr(sys.modules["transformers"], "DSparkDrafter")


OTHERS = {
    "assistant": {"assistant_model": 1},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "plain": {},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_other_assistants_are_untouched(models, options, do_sample):
    options = {**options, "do_sample": do_sample, "max_new_tokens": 16, "return_dict_in_generate": True}
    if "assistant_model" in options:
        options["assistant_model"] = models[1]
    prompt, outputs = torch.tensor([[5, 17, 3, 42, 9, 5, 17]]), []
    for switch in (transformers_dspark.register, transformers_dspark.unregister):
        switch()
        torch.manual_seed(0)
        outputs.append(models[0].generate(prompt, **options))
    assert type(outputs[0]) is type(outputs[1])
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


def test_their_errors_are_untouched(models):
    messages = []
    for switch in (transformers_dspark.register, transformers_dspark.unregister):
        switch()
        with pytest.raises(ValueError) as caught:
            models[0].generate(torch.ones(2, 3, dtype=torch.long), assistant_model=models[1], max_new_tokens=4)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def fresh(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


SHOW = "print(hasattr(u.GenerationMixin._assisted_decoding, '__wrapped__'))"


def test_transformers_loaded_first():
    code = (
        "import transformers.generation.utils as u; from transformers import AutoModel; import transformers_dspark; "
    )
    assert fresh(code + SHOW) == ["True"]


def test_undone_before_transformers_loads():
    code = "import transformers_dspark as d; d.unregister(); import transformers.generation.utils as u; "
    assert fresh(code + SHOW + "; d.register(); " + SHOW) == ["False", "True"]


@pytest.mark.parametrize("names", ["AutoModelForCausalLM, pipeline", "pipeline, AutoModel", "AutoConfig"])
def test_architecture_in_any_order(names):
    code = f"import transformers_dspark, sys; from transformers import {names}; from transformers import pipeline; "
    assert fresh(code + "print(hasattr(sys.modules['transformers'], 'DSparkDrafter'))") == ["True"]


def test_pipeline(models, tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as token_models
    from transformers import PreTrainedTokenizerFast, pipeline

    inner = Tokenizer(token_models.WordLevel({f"t{i:02d}": i for i in range(64)}, unk_token="t00"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t00", pad_token="t00")
    shape = {k: v for k, v in SHAPE.items() if k != "eos_token_id"}
    # the pipeline takes an assistant without a tokenizer of its own only if these agree with the target's
    shape |= {name: getattr(models[0].config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    drafter = DSparkDrafter(DSparkConfig(**shape, num_hidden_layers=1, target_layer_ids=[0])).eval()
    drafter.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = []
    for assistant in (None, drafter, str(tmp_path)):
        pipe = pipeline(
            "text-generation", model=models[0], tokenizer=tokenizer, assistant_model=assistant, device="cpu"
        )
        texts.append(pipe("t05 t17 t03", max_new_tokens=12, do_sample=False)[0]["generated_text"])
    assert texts[0] == texts[1] == texts[2]
