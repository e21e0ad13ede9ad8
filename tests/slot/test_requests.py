"""What cannot be served is refused with one clear sentence, before the target runs."""

import copy

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import transformers_dspark
from transformers_dspark import DSparkGenerationConfig


@pytest.fixture
def never_run(lab, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the target ran")

    def target(kind="llama", **changes):
        model = lab.target(kind, **changes)
        monkeypatch.setattr(type(model.model), "forward", refuse)
        return model

    return target


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_beams": 2}, NotImplementedError, "beam"),
        ({"num_beams": 2, "do_sample": True}, NotImplementedError, "beam"),
        ({"cache_implementation": "quantized"}, NotImplementedError, "quantized"),
        ({"use_cache": False}, ValueError, "use_cache"),
        ({"assistant_ensemble_weight": 0.5}, ValueError, "assistant_ensemble_weight"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens"),
        ({"num_assistant_tokens": -1}, ValueError, "num_assistant_tokens=-1"),
        ({"num_assistant_tokens": 2.5}, ValueError, "num_assistant_tokens=2.5 must be a whole number"),
        ({"num_assistant_tokens": "3"}, ValueError, "num_assistant_tokens='3' must be a whole number"),
        ({"assistant_confidence_threshold": 1.5}, ValueError, "assistant_confidence_threshold=1.5"),
        ({"assistant_confidence_threshold": float("nan")}, ValueError, "assistant_confidence_threshold=nan"),
        ({"assistant_confidence_threshold": "x"}, ValueError, "assistant_confidence_threshold='x'"),
        ({"dola_layers": "low"}, (ValueError, NotImplementedError), "[Dd]o[Ll]a"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("door", ["slot", "custom_generate"])
def test_options(lab, never_run, prompt, options, error, words, door):
    if door == "custom_generate":
        if {"prompt_lookup_num_tokens", "cache_implementation"} & options.keys():
            pytest.skip("without an assistant, generate acts on this option before it calls the callable")
        drafter = {"custom_generate": transformers_dspark.generate, "drafter": lab.drafter()}
    else:
        drafter = {"assistant_model": lab.drafter()}
    with pytest.raises(error, match=words):
        never_run().generate(prompt, max_new_tokens=4, **options, **drafter)


@pytest.mark.parametrize(
    "options",
    [
        {"max_verify_tokens": 2.5},
        {"max_verify_tokens": True},
        {"max_verify_tokens": -1},
        {"assistant_confidence_threshold": float("nan")},
    ],
    ids=str,
)
def test_option_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DSparkGenerationConfig(**options)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (None, "name it `drafter=`"),
        ("a/path", "must be a DSparkDrafter"),
        (torch.nn.Linear(2, 2), "must be a DSparkDrafter"),
    ],
    ids=["None", "str", "Linear"],
)
def test_custom_generate_without_a_drafter(never_run, prompt, drafter, words):
    with pytest.raises(ValueError, match=words):
        never_run().generate(prompt, custom_generate=transformers_dspark.generate, drafter=drafter, max_new_tokens=4)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by PEFT
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens(lab, never_run, prompt, kind):
    peft = pytest.importorskip("peft")
    target = copy.deepcopy(never_run())
    tuned = peft.get_peft_model(target, getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    with pytest.raises(NotImplementedError, match="learned prompt"):
        tuned.generate(input_ids=prompt, assistant_model=lab.drafter(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": [0, 3]}, "taps layer 3"),
        ({"vocab_size": 65}, "65 tokens"),
        ({"hidden_size": 16}, "hidden size 16"),
    ],
)
def test_drafter_of_another_target(lab, never_run, prompt, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        never_run().generate(prompt, assistant_model=lab.drafter(**changes), max_new_tokens=4)
    assert "tokenizer" not in str(caught.value)


def test_confidence_threshold_without_confidence(lab, never_run, prompt):
    drafter = lab.drafter(enable_confidence_head=False)
    with pytest.raises(ValueError, match="confidence head"):
        never_run().generate(prompt, assistant_model=drafter, assistant_confidence_threshold=0.5, max_new_tokens=4)


@pytest.mark.parametrize("loop", ["auto", "batched"])
def test_an_empty_prompt(lab, never_run, prompt, loop):
    config = DSparkGenerationConfig(dspark_loop=loop, max_new_tokens=4)
    with pytest.raises(ValueError, match="is empty: give at least one"):
        never_run().generate(prompt[:, :0], assistant_model=lab.drafter(), generation_config=config)


class Words:
    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


@pytest.mark.parametrize("tokenizer", [None, Words("a", "b")])
def test_another_tokenizer(lab, never_run, prompt, tokenizer):
    options = {"assistant_model": lab.drafter(), "assistant_tokenizer": Words("b", "a"), "max_new_tokens": 4}
    with pytest.raises(ValueError, match=r"assistant_tokenizer is not used.*Leave it out"):
        never_run().generate(prompt, tokenizer=tokenizer, **options)


def test_the_targets_own_tokenizer_once_more(lab, prompt):
    """As a pipeline passes it."""
    plain = lab.target().generate(prompt, max_new_tokens=4, do_sample=False)
    for own, other in ((Words("a", "b"), Words("a", "b")), (None, None)):
        options = {"tokenizer": own, "assistant_tokenizer": other, "assistant_model": lab.drafter()}
        assert torch.equal(lab.target().generate(prompt, max_new_tokens=4, do_sample=False, **options), plain)


def test_targets_that_cannot_roll_back(lab, never_run, prompt, monkeypatch):
    target = never_run()
    monkeypatch.setattr(type(target), "_is_stateful", True)
    with pytest.raises(NotImplementedError, match="rolled back"):
        target.generate(prompt, assistant_model=lab.drafter(), max_new_tokens=4)


def test_static_sliding_window(lab, never_run, prompt):
    with pytest.raises(NotImplementedError, match="cache_implementation='dynamic'"):
        never_run("gemma2").generate(
            prompt, assistant_model=lab.drafter(), cache_implementation="static", max_new_tokens=4
        )


def test_encoder_decoder(lab, prompt):
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    target = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **shape))
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        target.generate(prompt, assistant_model=lab.drafter(), max_new_tokens=4)


def test_contrastive_search_is_refused(lab, prompt):
    with pytest.raises((ValueError, NotImplementedError), match=r"[Cc]ontrastive"):
        lab.target().generate(prompt, assistant_model=lab.drafter(), penalty_alpha=0.6, top_k=4, max_new_tokens=4)
