"""
Batched greedy decoding equals plain generate under every option of `generate` that changes or ends a text.

Two ways of plain generation are its own, and the batched loop does otherwise on purpose:

- Behind the end of a row that ended by a criterion, plain generation goes on with tokens of that row until all rows
  have ended, unless the call has an end-of-sequence token, when it writes padding. Here there is always padding.
- Scores, logits and hidden states of a row that has ended are computed on padding in plain generation; here they are
  zeros.
"""

import itertools
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from transformers_dspark import DSparkGenerationConfig

from .conftest import ragged, texts_of


EOS = [7, 9, 11, 13, 20, 30]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_rows_end_at_different_times(lab, both, kind):
    free, _ = both(lab.target(kind), 5)
    ends = [int(free[row, 9 + at]) for row, at in enumerate((12, 3, 17, 8))]
    plain, ours = both(lab.target(kind), 5, max_new_tokens=30, eos_token_id=ends)
    assert len({int((row == 0).sum()) for row in plain[:, 9:]}) > 2  # or this test shows nothing
    assert torch.equal(plain, ours)


def test_padding_is_the_calls_own(lab, both):
    plain, ours = both(lab.target(), 5, eos_token_id=EOS, pad_token_id=63)
    assert (plain[:, -1] == 63).any()
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("new_tokens", range(1, 10))
def test_every_length(lab, both, new_tokens):
    plain, ours = both(lab.target(), 3, 4, max_new_tokens=new_tokens)
    assert ours.shape[1] == 9 + new_tokens
    assert torch.equal(plain, ours)


class Remembers(LogitsProcessor):
    """Forbids what it chose two calls ago. Each row has to have a memory of its own."""

    def __init__(self):
        self.chosen = {}

    def __call__(self, input_ids, scores):
        for row, ids in enumerate(input_ids.tolist()):
            key = tuple(ids[:9])  # the prompt: rows differ there
            past = self.chosen.setdefault(key, [])
            assert len(ids) - 9 == len(past)  # one call for each committed token, in order
            if len(past) > 1:
                scores[row, past[-2]] = float("-inf")
            past.append(int(scores[row].argmax()))
        return scores


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": EOS},
    "min_length": {"min_length": 15, "eos_token_id": EOS},
    "bad_words": {"bad_words_ids": [[7], [12, 13], [50]]},
    "suppress": {"suppress_tokens": [3, 4, 5, 40]},
    "begin_suppress": {"begin_suppress_tokens": [6, 14, 47, 53, *range(20, 40)]},
    "forced_eos": {"forced_eos_token_id": 30},
    "sequence_bias": {"sequence_bias": {(9,): 4.0, (11, 12): -3.0}},
    "length_penalty": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": EOS},
    "prefix_function": {
        "prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(64) if t % 4 == (row + len(ids)) % 4]
    },
    "guidance": {"guidance_scale": 1.5},
    "guidance_without_cache": {"guidance_scale": 1.5, "max_new_tokens": 8},
    "encoder_repetition": {"encoder_repetition_penalty": 1.8},
    "encoder_ngrams": {"encoder_no_repeat_ngram_size": 1},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, greenlist_ratio=0.3)},
    "synthid": {
        "do_sample": True,
        "top_k": 1,
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 7, 5], sampling_table_size=64),
    },
    "stateful": {"logits_processor": lambda: LogitsProcessorList([Remembers()])},
    "many": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "eos_token_id": EOS},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_logits_processors(lab, both, name):
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    plain, ours = both(lab.target(), 4, **outputs, **PROCESSED[name])
    assert torch.equal(plain.sequences, ours.sequences)
    if name != "synthid":  # one candidate leaves it no choice, but its memory is at work
        assert not torch.equal(plain.sequences, both(lab.target(), 4)[0])  # the option changes something
    assert_close_until_the_end(plain, ours, "scores")


def assert_close_until_the_end(plain, ours, name, prompt=9):
    """Of every row, up to its end; behind it ours are zeros."""
    steps = plain.sequences.shape[1] - prompt
    assert len(getattr(plain, name)) == len(getattr(ours, name)) == steps
    for step, (one, other) in enumerate(zip(getattr(plain, name), getattr(ours, name), strict=True)):
        alive = torch.tensor([step == 0 or int(row[prompt + step - 1]) not in (*EOS, 0) for row in plain.sequences])
        torch.testing.assert_close(one[alive], other[alive], rtol=1e-4, atol=1e-4)


def test_negative_prompts(lab, both):
    negative, mask = ragged(4, 5, seed=8)
    options = {"guidance_scale": 1.7, "negative_prompt_ids": negative, "negative_prompt_attention_mask": mask}
    plain, ours = both(lab.target(), 4, **options)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("name", ["repetition_penalty", "prefix_function", "encoder_repetition", "encoder_ngrams"])
def test_several_texts_of_a_prompt(lab, name):
    """`top_k=1` leaves sampling no choice."""
    target, (ids, mask) = lab.target(), ragged(2)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 12, "attention_mask": mask}
    options |= PROCESSED[name]
    plain, ours = target.generate(ids, **options), target.generate(ids, assistant_model=lab.drafter(), **options)
    assert ours.shape == (6, 21)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_outputs(lab, both, kind):
    names = ("scores", "logits", "hidden_states")
    options = {f"output_{name}": True for name in names} | {"return_dict_in_generate": True, "eos_token_id": EOS}
    plain, ours = both(lab.target(kind), 4, repetition_penalty=1.2, **options)
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        assert_close_until_the_end(plain, ours, name)
    mask = ragged(4)[1].bool()
    assert len(plain.hidden_states) == len(ours.hidden_states)
    for step, (one, other) in enumerate(zip(plain.hidden_states, ours.hidden_states, strict=True)):
        assert len(one) == len(other) == 4  # embeddings and three layers
        alive = torch.tensor([not {0, *EOS} & set(row[9 : 9 + step].tolist()) for row in plain.sequences])
        for layer, ours_of_layer in zip(one, other, strict=True):
            assert layer.shape == ours_of_layer.shape
            seen = mask if step == 0 else alive
            torch.testing.assert_close(layer[seen], ours_of_layer[seen], rtol=1e-4, atol=1e-4)


class EndsAt(StoppingCriteria):
    """Ends a row at one of its tokens. With a memory, and a look at the scores."""

    def __init__(self, tokens, with_scores):
        self.tokens, self.with_scores, self.asked = tokens, with_scores, []

    def __call__(self, input_ids, scores, **kwargs):
        for row in input_ids.tolist():
            self.asked.append(tuple(row))
        if self.with_scores:
            assert len(scores) == input_ids.shape[1] - 9
            assert scores[-1].argmax(dim=-1).tolist() == input_ids[:, -1].tolist()
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))


def own_part(plain, criterion):
    """Plain sequences with padding behind the token that ended a row, cut to the longest."""
    ends = []
    for row in plain[:, 9:].tolist():
        found = [i for i, token in enumerate(row) if token in criterion.tokens]
        ends.append(found[0] + 1 if found else len(row))
    behind = torch.arange(plain.shape[1]) >= 9 + torch.tensor(ends)[:, None]
    return plain.masked_fill(behind, 0)[:, : 9 + max(ends)]


@pytest.mark.parametrize("eos", [None, 30])
@pytest.mark.parametrize("with_scores", [False, True])
def test_custom_criterion(lab, both, eos, with_scores):
    made = []

    def criteria():
        # no row may end in plain generation because another did: it is asked about all
        made.append(EndsAt([11, 33, 40, 52], with_scores and len(made) == 1))
        return StoppingCriteriaList(made[-1:])

    outputs = {"return_dict_in_generate": True, "output_scores": True} if with_scores else {}
    plain, ours = both(lab.target(), 4, stopping_criteria=criteria, eos_token_id=eos, max_new_tokens=25, **outputs)
    plain, ours = (x if torch.is_tensor(x) else x.sequences for x in (plain, ours))
    assert torch.equal(own_part(plain, made[0]) if eos is None else plain, ours)
    assert len(set(made[1].asked)) == len(made[1].asked)  # once for each committed token
    assert set(made[1].asked) <= set(made[0].asked)
    assert len(made[1].asked) == sum(len(text) for text in texts_of(ours, ragged(4)[1])) - int(
        ragged(4)[1].sum()
    ) - int((ours[:, 9:] == 0).sum())


@pytest.mark.parametrize("answer", [torch.zeros(0), torch.zeros(4), None], ids=["empty", "too many", "none"])
def test_criteria_answer_for_one_row(lab, answer):
    ids, mask = ragged(3)
    with pytest.raises(ValueError, match="true or false for each row"):
        lab.target().generate(
            ids, attention_mask=mask, assistant_model=lab.drafter(), stopping_criteria=[lambda ids, scores: answer]
        )


def test_stop_strings(lab, both):
    vocabulary = {"".join(pair): i for i, pair in enumerate(itertools.product("ghijklmn", "stuvwxyz"))}
    del vocabulary["nz"]
    inner = Tokenizer(models.WordLevel(vocabulary | {"abcdef": 63}, unk_token="gs"))  # it probes with the last one
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="gs")
    options = {"tokenizer": fast, "stop_strings": ["it", "mu", "kx"], "eos_token_id": 62, "pad_token_id": 0}
    plain, ours = both(lab.target(), 5, max_new_tokens=30, **options)
    assert len({int((row == 0).sum()) for row in plain[:, 9:]}) > 1
    assert torch.equal(plain, ours)


def test_max_time(lab):
    """The text ends with the round in which the time is up; plain generation checks after each token."""
    target, (ids, mask) = lab.target(), ragged(3)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=400)
    began = time.perf_counter()
    ours = target.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=400, max_time=0.05, assistant_model=lab.drafter()
    )
    assert time.perf_counter() - began < 5
    assert 9 < ours.shape[1] < free.shape[1]
    for row, whole in zip(ours, free, strict=True):
        length = int((row != 0).nonzero().max()) + 1
        assert torch.equal(row[:length], whole[:length])


class Shows(BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, value):
        assert value.dim() == 1 or value.shape[0] == 1
        self.seen += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer(lab):
    target, ids = lab.target(), ragged(1)[0]
    for eos in (None, EOS):
        shows = Shows()
        config = DSparkGenerationConfig(dspark_loop="batched", do_sample=False, max_new_tokens=20, eos_token_id=eos)
        ours = target.generate(ids, generation_config=config, assistant_model=lab.drafter(), streamer=shows)
        assert shows.seen == ours[0].tolist()
        assert shows.ended


class Asks(StoppingCriteria):
    """Runs the target itself, as a user's verifier might."""

    def __init__(self, target):
        self.target = target

    def __call__(self, input_ids, scores, **kwargs):
        logits = self.target(input_ids).logits
        return logits[:, -1].argmax(dim=-1) == 30


def test_code_of_others_may_run_the_target(lab, both):
    target = lab.target()
    before = target.config._attn_implementation
    plain, ours = both(target, 3, stopping_criteria=lambda: StoppingCriteriaList([Asks(target)]), eos_token_id=63)
    assert torch.equal(plain, ours)
    assert target.config._attn_implementation == before


@pytest.mark.parametrize("where", ["option", "object"])
def test_static_caches(lab, both, where):
    """The loop keeps a static cache of its own; what is asked for is no obstacle."""
    target, (ids, mask) = lab.target(), ragged(3)
    options = {"do_sample": False, "max_new_tokens": 20, "attention_mask": mask}
    plain = target.generate(ids, **options)
    static = {"cache_implementation": "static"}
    if where == "object":
        static = {"cache": StaticCache(config=target.config, max_cache_len=40)}
    assert torch.equal(plain, target.generate(ids, assistant_model=lab.drafter(), **options, **static))


@pytest.mark.parametrize("who", ["whole calls", "single forwards"])
def test_two_threads(lab, who):
    """Calls on two threads share the target; neither puts the attention back under the other's feet."""
    target, outs, (ids, mask) = lab.target(), {}, ragged(3)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 40}
    plain = target.generate(ids, **options)
    extra = {"prefix_allowed_tokens_fn": lambda row, text: list(range(64))} if who == "single forwards" else {}

    def call(name):
        outs[name] = target.generate(ids, assistant_model=lab.drafter(), **options, **extra)

    threads = [threading.Thread(target=call, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 3
    assert all(torch.equal(plain, out) for out in outs.values())
    assert target.config._attn_implementation == "sdpa"
