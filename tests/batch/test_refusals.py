"""What the batched loop cannot serve is refused with one sentence, and nothing is left behind."""

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LogitsProcessor,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import transformers_dspark
from transformers_dspark import DSparkGenerationConfig, StepCostTable

from .conftest import COMMON, VOCAB, ragged


@pytest.fixture
def refused(lab):
    """Runs a call that must fail before the target does, and says how."""

    def run(error, words, target=None, ids=None, drafter=None, door="slot", **options):
        target, (prompts, mask) = target or lab.target(), ragged(3)
        if ids is None:
            ids, options = prompts, {"attention_mask": mask, **options}
        ran, drafter = [], drafter or lab.drafter()
        own = {"assistant_model": drafter}
        if door == "custom_generate":
            own = {"custom_generate": transformers_dspark.generate, "drafter": drafter}
        if "generation_config" not in options:
            options = {"max_new_tokens": 4, **options}
        hook = target.register_forward_hook(lambda *args: ran.append(1))
        before = target.config._attn_implementation
        with pytest.raises(error, match=words) as caught:
            target.generate(ids, **own, **options)
        hook.remove()
        assert not ran
        assert target.config._attn_implementation == before
        assert "\n" not in str(caught.value)

    return run


@pytest.mark.parametrize("door", ["slot", "custom_generate"])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_beams": 2}, NotImplementedError, "beam"),
        ({"output_attentions": True, "return_dict_in_generate": True}, NotImplementedError, "output_attentions=True"),
        ({"use_cache": False}, ValueError, "use_cache"),
        ({"penalty_alpha": 0.6, "top_k": 4}, (ValueError, NotImplementedError), "[Cc]ontrastive"),
        ({"dola_layers": "low"}, (ValueError, NotImplementedError), "[Dd]o[Ll]a"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_options(lab, refused, options, error, words, door):
    target = lab.target()
    attention = target.config._attn_implementation
    target.set_attn_implementation("eager" if "output_attentions" in options else attention)
    try:
        refused(error, words, door=door, **options)
    finally:
        target.set_attn_implementation(attention)


def test_quantised_cache(refused):
    refused(NotImplementedError, "quantized", cache_implementation="quantized")


def test_transformers_loop_for_several_rows(refused):
    config = DSparkGenerationConfig(dspark_loop="transformers", max_new_tokens=4)
    refused(ValueError, "takes one prompt, and this call has 3", generation_config=config)


def test_encoder_decoder(refused):
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    target = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **shape))
    refused(NotImplementedError, "encoder-decoder", target)


def test_padding_on_the_right(refused):
    ids, mask = ragged(3)
    refused(ValueError, "Row 1 .*padding_side = 'left'", ids=ids.flip(1), attention_mask=mask.flip(1))


def test_an_empty_row(refused):
    ids, mask = ragged(3)
    mask[2] = 0
    refused(ValueError, "Row 2 is empty", ids=ids, attention_mask=mask)


def test_an_empty_batch(refused):
    refused(ValueError, "batch is empty", ids=torch.zeros(0, 4, dtype=torch.long))


@pytest.mark.parametrize("padded", [0, 1])
@pytest.mark.parametrize("columns", [5, 12])
def test_a_mask_that_does_not_fit(refused, columns, padded):
    ids, mask = ragged(3)[0], torch.ones(3, columns, dtype=torch.long)
    mask[1, :padded] = 0  # one of ones alone is not handed on
    refused(ValueError, f"mask has {columns} columns, the ids 9", ids=ids, attention_mask=mask)


def test_embeddings_instead_of_ids(lab, refused):
    ids, mask = ragged(3)
    embeds = lab.target().get_input_embeddings()(ids).detach()
    with pytest.raises(NotImplementedError, match="reads text only, and was given inputs_embeds"):
        lab.target().generate(
            inputs_embeds=embeds, attention_mask=mask, assistant_model=lab.drafter(), max_new_tokens=4
        )


class Silent(BaseStreamer):
    def put(self, value):
        """`generate` shows it the prompts before any loop begins."""

    def end(self):
        raise AssertionError("nothing was begun")


def test_a_streamer_for_two_rows(refused):
    ids, mask = ragged(2)
    refused(ValueError, "shows one text, and this call has 2", ids=ids, attention_mask=mask, streamer=Silent())


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4], []])
def test_seeds(refused, seed):
    config = DSparkGenerationConfig(seed=seed, do_sample=True, max_new_tokens=4)
    refused(ValueError, f"seed has {len(seed)} numbers, and the call has 3 rows", generation_config=config)


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_a_schedule_without_a_table(refused, mode):
    refused(
        ValueError,
        f"verify_mode='{mode}' needs step_cost_table",
        generation_config=DSparkGenerationConfig(verify_mode=mode),
    )


def test_a_schedule_without_confidences(lab, refused):
    config = DSparkGenerationConfig(verify_mode="compact", step_cost_table=lab.table())
    drafter = lab.drafter(enable_confidence_head=False)
    refused(ValueError, "a drafter with a confidence head", drafter=drafter, generation_config=config)


@pytest.mark.parametrize("saved", [False, True])
def test_a_table_of_another_target(lab, refused, tmp_path, saved):
    table = StepCostTable(lab.table().steps, target={"model_type": "mistral"})
    if saved:
        table.save(tmp_path / "costs.json")
        table = str(tmp_path / "costs.json")
    refused(ValueError, "is for another target", generation_config=DSparkGenerationConfig(step_cost_table=table))


def test_a_table_that_is_not_there(refused, tmp_path):
    config = DSparkGenerationConfig(step_cost_table=str(tmp_path / "none.json"))
    refused(ValueError, "step_cost_table='.*none[.]json' cannot be read .*dspark profile", generation_config=config)


def test_processors_that_cannot_be_copied(lab):
    """For several rows, a processor that keeps state must be copied; for one it need not."""

    class Sealed(LogitsProcessor):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

        def __deepcopy__(self, memo):
            raise TypeError("sealed")

    ids, mask = ragged(2)
    options = {"max_new_tokens": 4, "do_sample": False, "assistant_model": lab.drafter()}
    with pytest.raises(ValueError, match=r"Sealed keeps state and cannot be copied for each row \(sealed\)"):
        lab.target().generate(ids, attention_mask=mask, logits_processor=LogitsProcessorList([Sealed()]), **options)


LLAMA4 = {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}
OTHERS = {
    "chunks": (
        lambda: Llama4ForCausalLM(Llama4TextConfig(**COMMON, **LLAMA4, num_local_experts=2, intermediate_size_mlp=48)),
        r"\['chunked_attention'\]",
    ),
    "own attention": (
        lambda: BloomForCausalLM(
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, eos_token_id=None, pad_token_id=0)
        ),
        "does not let its attention implementation be replaced",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_targets(refused, kind):
    make, words = OTHERS[kind]
    refused(NotImplementedError, words, make().eval())


def test_a_target_that_keeps_its_keywords(lab):
    shape = {name: value for name, value in COMMON.items() if name not in ("head_dim", "num_key_value_heads")}
    target, (ids, mask) = GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).eval(), ragged(2)
    before = target.config._attn_implementation
    with pytest.raises(NotImplementedError, match="does not hand its keywords on"):
        target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), max_new_tokens=4)
    assert target.config._attn_implementation == before
    assert target.generate(ids, attention_mask=mask, max_new_tokens=4).shape == (2, 13)


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_that_are_no_numbers(lab, do_sample):
    target, (ids, mask) = copy.deepcopy(lab.target()), ragged(3)
    ids[1, 4], ids[ids == 5] = 5, 6  # only row 1 holds the token
    ids[1, 4] = 5
    with torch.no_grad():
        target.model.embed_tokens.weight[5] = float("nan")
    with pytest.raises(ValueError, match=r"logits of row 1.*they are NaN"):
        target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), max_new_tokens=4, do_sample=do_sample)
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_is_allowed(lab, do_sample):
    ids, mask = ragged(3)
    with pytest.raises(ValueError, match="leave no token to choose"):
        lab.target().generate(
            ids,
            attention_mask=mask,
            assistant_model=lab.drafter(),
            max_new_tokens=4,
            do_sample=do_sample,
            suppress_tokens=list(range(VOCAB)),
        )


def test_a_drafter_without_numbers_drafts_nothing(lab):
    """Its logits are no numbers: nothing of it is verified, and the texts are the target's. Also when sampling."""
    target, (ids, mask) = lab.target(), ragged(3)
    drafter = lab.drafter()
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight[5] = float("nan")
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        options |= {"max_new_tokens": 12, "attention_mask": mask}
        ours = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
        assert torch.equal(ours.sequences, target.generate(ids, **options))
        assert {n for lengths in ours.dspark.verify_lengths for n in lengths} == {0}


@pytest.mark.parametrize("do_sample", [False, True])
def test_some_drafts_only(lab, do_sample):
    """Behind the second slot of a block nothing can be drafted: what comes before still is, and the bonus is drawn."""
    target, (ids, mask) = lab.target(), ragged(3)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    drafter = lab.knowing([row.tolist()[int((m == 0).sum()) :] for row, m in zip(plain, mask, strict=True)])
    unembed = drafter.unembed

    def poisoned(hidden):
        base = unembed(hidden).clone()
        base[:, 2:] = float("nan")
        return base

    drafter.unembed = poisoned
    options = {"do_sample": do_sample, "top_k": 1 if do_sample else None, "max_new_tokens": 12}
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(ours.sequences, plain)
    assert max(n for lengths in ours.dspark.accepted_lengths for n in lengths) == 3


def test_the_public_door_names_its_drafter(lab):
    with pytest.raises(ValueError, match="name it `drafter=`"):
        lab.target().generate(torch.tensor([[5, 6]]), custom_generate=transformers_dspark.generate, max_new_tokens=4)


def test_seeds_are_counted_in_greedy_calls_too(lab):
    config = DSparkGenerationConfig(seed=[1], max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="seed has 1 numbers"):
        lab.target().generate(torch.tensor([[5, 6], [7, 8]]), assistant_model=lab.drafter(), generation_config=config)
