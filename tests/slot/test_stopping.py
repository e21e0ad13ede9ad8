"""A text ends where plain decoding ends it, also in the middle of an accepted draft."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from transformers_dspark import DSparkGenerationConfig


OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}


def assert_same(plain, ours):
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits", "hidden_states"):
        assert len(getattr(plain, name)) == len(getattr(ours, name)) == plain.sequences.shape[1] - 7


def first_seen_at(sequence, index):
    """A token that occurs at this position of the continuation for the first time."""
    tokens = sequence[0, 7:].tolist()
    return next(t for i, t in enumerate(tokens) if i >= index and t not in tokens[:i])


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("do_sample", [False, True])
def test_end_token_inside_an_accepted_draft(lab, prompt, at, do_sample):
    target = lab.target()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    # top_k=1 makes the sampling path deterministic
    options = {"eos_token_id": first_seen_at(free, at), "max_new_tokens": 20, "do_sample": do_sample, "top_k": 1}
    options = options if do_sample else {**options, "top_k": None}
    plain = target.generate(prompt, **options, **OUTPUTS)
    assert plain.sequences.shape[1] < free.shape[1]
    for wrong in ([None], None):
        ours = target.generate(prompt, assistant_model=lab.scripted(free, wrong), **options, **OUTPUTS)
        assert_same(plain, ours)
        assert sum(map(sum, ours.dspark.accepted_lengths), 1) == plain.sequences.shape[1] - 7


class EndsWith(StoppingCriteria):
    """A user's criterion with a memory: it must be asked once per committed token, in order."""

    def __init__(self, token):
        self.token, self.asked = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids[0].tolist())
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 9])
def test_custom_criterion(lab, prompt, at, do_sample):
    target = lab.target()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 20, "do_sample": do_sample, "top_k": 1 if do_sample else None}
    criteria = [EndsWith(first_seen_at(free, at)) for _ in range(2)]
    plain = target.generate(prompt, stopping_criteria=StoppingCriteriaList(criteria[:1]), **options, **OUTPUTS)
    ours = target.generate(
        prompt,
        stopping_criteria=StoppingCriteriaList(criteria[1:]),
        assistant_model=lab.scripted(free, [None]),
        **options,
        **OUTPUTS,
    )
    assert_same(plain, ours)
    assert criteria[0].asked == criteria[1].asked


class EndsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("room", range(13, 19))
@pytest.mark.parametrize("kind", ["cache", "positions"])
def test_criterion_that_ends_where_the_room_ends(lab, prompt, room, kind):
    """Drafts do not run over the end of a static cache, or of a table of positions, where plain decoding does not."""
    if kind == "cache":
        target, extra = lab.target(), lambda: {"cache": StaticCache(config=target.config, max_cache_len=room)}
    else:
        torch.manual_seed(0)
        shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": room, "initializer_range": 0.3}
        target, extra = (
            GPT2LMHeadModel(GPT2Config(vocab_size=64, eos_token_id=None, pad_token_id=0, **shape)).eval(),
            dict,
        )
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    options["stopping_criteria"] = StoppingCriteriaList([EndsAt(room + 1)])
    plain = target.generate(prompt, **options, **extra())
    assert plain.sequences.shape[1] == room + 1
    for wrong in ([None], None):
        drafter = lab.scripted(plain.sequences, wrong)
        ours = target.generate(prompt, assistant_model=drafter, **options, **extra())
        assert torch.equal(ours.sequences, plain.sequences)
    assert sum(ours.dspark.accepted_lengths[0]) == room - 7


def test_criterion_that_reads_scores(lab, prompt):
    class Unsure(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert len(scores) == input_ids.shape[1] - 7
            return torch.tensor([len(scores) >= 6 and bool(scores[-1].max() > scores[0].max() - 100)])

    target, options = lab.target(), {"max_new_tokens": 20, "do_sample": False}
    free = target.generate(prompt, **options)
    plain = target.generate(prompt, stopping_criteria=StoppingCriteriaList([Unsure()]), **options, **OUTPUTS)
    ours = target.generate(
        prompt,
        stopping_criteria=StoppingCriteriaList([Unsure()]),
        assistant_model=lab.scripted(free, [None]),
        **options,
        **OUTPUTS,
    )
    assert plain.sequences.shape[1] == 13
    assert_same(plain, ours)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {f"t{i:02d}": i for i in range(63)} | {
        "abcdef": 63
    }  # the last is what StopStringCriteria probes with
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="t00"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t00")


@pytest.mark.parametrize("at", [1, 2, 4, 7])
@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings(lab, prompt, tokenizer, at, do_sample):
    target = lab.target()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    stop = tokenizer.convert_ids_to_tokens(first_seen_at(free, at))
    options = {"max_new_tokens": 20, "do_sample": do_sample, "top_k": 1 if do_sample else None}
    options |= {"stop_strings": [stop], "tokenizer": tokenizer}
    plain = target.generate(prompt, **options, **OUTPUTS)
    assert plain.sequences.shape[1] < 27
    for wrong in ([None], None):
        ours = target.generate(prompt, assistant_model=lab.scripted(free, wrong), **options, **OUTPUTS)
        assert_same(plain, ours)


class Chunks(BaseStreamer):
    def __init__(self):
        self.chunks, self.ended = [], 0

    def put(self, value):
        self.chunks.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("stop_at", [None, 2, 6])
def test_streamer(lab, prompt, stop_at):
    target, chunks = lab.target(), Chunks()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    eos = None if stop_at is None else first_seen_at(free, stop_at)
    ours = target.generate(
        prompt,
        assistant_model=lab.scripted(free),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=eos,
        streamer=chunks,
    )
    assert chunks.chunks[0] == prompt[0].tolist()
    assert list(itertools.chain(*chunks.chunks)) == ours[0].tolist()
    assert chunks.ended == 1


def test_cache_holds_all_but_the_last_token(lab, prompt):
    target = lab.target()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    for slot in range(4):  # a rejection at every slot
        out = target.generate(
            prompt,
            assistant_model=lab.scripted(free, [slot]),
            max_new_tokens=20,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
        assert out.dspark.accepted_lengths[0][0] == slot + 1


def test_draft_length_options(lab, prompt):
    target = lab.target()
    free = target.generate(prompt, max_new_tokens=21, do_sample=False)

    def lengths(**options):
        if "generation_config" not in options:
            options |= {"do_sample": False, "return_dict_in_generate": True}
        out = target.generate(prompt, assistant_model=lab.scripted(free, [None]), **options)
        assert torch.equal(out.sequences, free)
        return set(out.dspark.verify_lengths[0][:-1])

    assert lengths(max_new_tokens=21) == {4}
    assert lengths(max_new_tokens=21, num_assistant_tokens=2) == {2}
    assert lengths(max_new_tokens=21, num_assistant_tokens=9) == {4}
    for most in (0, 1, 3, 8):
        config = DSparkGenerationConfig(
            max_new_tokens=21, do_sample=False, return_dict_in_generate=True, max_verify_tokens=most
        )
        assert lengths(generation_config=config) == {min(most, 4)}


@pytest.mark.parametrize("threshold", [0.05, 0.45, 0.5, 0.55, 1.0])
def test_confidence_threshold(lab, prompt, threshold):
    target, drafter, seen = lab.target(), lab.drafter(), []
    propose = drafter.propose

    def watched(*args, **kwargs):
        full = propose(*args, width=kwargs["width"])
        seen.append(full.confidence[0])
        return propose(*args, **kwargs)

    drafter.propose = watched
    torch.nn.init.normal_(drafter.confidence_head.proj.weight)
    out = target.generate(
        prompt,
        assistant_model=drafter,
        assistant_confidence_threshold=threshold,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, target.generate(prompt, max_new_tokens=20, do_sample=False))
    kept = [int((confidence >= threshold).int().cumprod(0).sum()) for confidence in seen]
    assert out.dspark.verify_lengths[0][: len(kept)] == kept
