"""Every optional output of `generate` is what plain decoding returns: one entry a token, with its values."""

import functools
import sys

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache, SynthIDTextWatermarkingConfig

from transformers_dspark import DSparkGenerateOutput, DSparkGenerationConfig


EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_same_outputs(plain, ours):
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_all_outputs(lab, both, prompt, kind, cache):
    # a static sliding window can be rolled back only if the text fits into it; see test_requests for the others
    window = {"sliding_window": 40} if kind == "gemma2" and cache == "static" else {}
    target = lab.target(kind, attn_implementation="eager", **window)
    plain, ours = both(target, prompt, 4, cache_implementation=cache, repetition_penalty=1.2, **EVERYTHING)
    assert isinstance(ours, DSparkGenerateOutput)
    assert_same_outputs(plain, ours)


@pytest.mark.parametrize("new_tokens", [1, 2, 20])
def test_attentions_that_are_not_returned(lab, both, prompt, new_tokens):
    """SDPA has none: the entries are as empty as those of plain decoding."""
    target = lab.target()
    plain, ours = both(target, prompt, 4, max_new_tokens=new_tokens, **EVERYTHING)
    assert not any(isinstance(t, torch.Tensor) for entry in plain.attentions for t in entry)
    assert ours.attentions == plain.attentions
    assert_same_outputs(plain, ours)


def test_all_outputs_behind_padding(lab, both, prompt):
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), prompt), dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    assert_same_outputs(*both(lab.target(attn_implementation="eager"), padded, 4, attention_mask=mask, **EVERYTHING))


@pytest.mark.parametrize("new_tokens", range(1, 10))
def test_static_cache_has_room(lab, both, prompt, new_tokens):
    plain, ours = both(lab.target(), prompt, 4, max_new_tokens=new_tokens, cache_implementation="static")
    assert torch.equal(plain, ours)


def test_static_and_dynamic_cache_agree(lab, prompt):
    target, drafter, found = lab.target(), lab.drafter(), []
    for cache in ("dynamic", "static"):
        out = target.generate(
            prompt,
            assistant_model=drafter,
            cache_implementation=cache,
            max_new_tokens=16,
            do_sample=False,
            return_dict_in_generate=True,
        )
        found.append((out.sequences.tolist(), out.dspark.accepted_lengths))
    assert found[0] == found[1]


def test_user_caches(lab, both, prompt):
    target = lab.target()
    for make in (
        lambda: DynamicCache(config=target.config),
        lambda: StaticCache(config=target.config, max_cache_len=40),
    ):
        plain, ours = both(target, prompt, 4, cache=make)
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("first_with_drafter", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_continue_from_a_returned_cache(lab, prompt, kind, first_with_drafter, padding):
    """Two turns with one cache: the text of a fresh run, and a drafter that knows the first turn too."""
    target, drafter = lab.target(kind), lab.drafter()
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    prompt = torch.cat((torch.zeros(1, padding, dtype=torch.long), prompt), dim=1)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    extra = {"assistant_model": drafter} if first_with_drafter else {}
    cache = DynamicCache(config=target.config)
    first = target.generate(prompt, attention_mask=mask, cache=cache, **extra, **options)
    assert first.cache.get_seq_length() == first.sequences.shape[1] - 1
    second = torch.cat((first.sequences, torch.tensor([[33, 8, 51]])), dim=1)
    mask = torch.cat((mask, mask.new_ones(1, second.shape[1] - mask.shape[1])), dim=1)
    options["max_new_tokens"] = 12
    warm = target.generate(second, attention_mask=mask, assistant_model=drafter, cache=first.cache, **options)
    cold = target.generate(second, attention_mask=mask, assistant_model=drafter, **options)
    plain = target.generate(second, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(warm.sequences, plain)
    assert torch.equal(cold.sequences, plain)
    assert warm.dspark.accepted_lengths == cold.dspark.accepted_lengths
    assert warm.cache.get_seq_length() == warm.sequences.shape[1] - 1


@pytest.mark.parametrize("padding", [0, 3])
def test_continue_with_new_tokens_only(lab, prompt, padding):
    """The ids of the cached part are not repeated, so its taps are unknown; the text is right all the same."""
    target, drafter = lab.target(), lab.drafter()
    prompt = torch.cat((torch.zeros(1, padding, dtype=torch.long), prompt), dim=1)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    options = {"max_new_tokens": 12, "do_sample": False}
    texts = []
    for extra in ({}, {"assistant_model": drafter}):
        cache = DynamicCache(config=target.config)
        target(prompt, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
        new = torch.tensor([[33, 8, 51]])
        whole = torch.cat((mask, mask.new_ones(1, 3)), dim=1)
        texts.append(target.generate(new, attention_mask=whole, cache=cache, **options, **extra))
    assert torch.equal(*texts)
    joined = torch.cat((prompt, torch.tensor([[33, 8, 51]])), dim=1)
    fresh = target.generate(joined, attention_mask=whole, **options)
    assert torch.equal(texts[1][:, 3:], fresh[:, joined.shape[1] :])


def test_prompt_embeddings(lab, both, prompt):
    target = lab.target()
    embeds = target.get_input_embeddings()(prompt)
    plain = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False)
    ours = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False, assistant_model=lab.drafter())
    assert torch.equal(plain, ours)
    named = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, named[:, 7:])


# ---- processors with a memory
# ----------------------------------------------------------------------------------------


class Alternating(LogitsProcessor):
    """Forbids even and odd tokens in turn, by counting its own calls; it also keeps a list that the caller holds."""

    def __init__(self, journal):
        self.calls, self.journal = 0, journal

    def __call__(self, input_ids, scores):
        self.calls += 1
        self.journal.append(input_ids.shape[1])
        scores[:, self.calls % 2 :: 2] = float("-inf")
        return scores


@pytest.mark.parametrize("wrong", [[None], [0], [1], [0, 1, 2, 3, None]])
def test_stateful_processor(lab, prompt, wrong):
    target, runs = lab.target(), []
    options = {"max_new_tokens": 20, "do_sample": False}
    script = None
    for drafted in (False, True):
        journal = []
        processor = Alternating(journal)
        extra = {"assistant_model": lab.scripted(script, wrong)} if drafted else {}
        script = target.generate(prompt, logits_processor=LogitsProcessorList([processor]), **options, **extra)
        runs.append((script.tolist(), processor.calls, journal))
    assert runs[0] == runs[1]


def test_processor_that_cannot_be_copied(lab, prompt):
    class Sealed(LogitsProcessor):
        def __init__(self):
            self.calls = 0

        def __deepcopy__(self, memo):
            raise TypeError("sealed")

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores.roll(self.calls, dims=-1)

    target, options = lab.target(), {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(prompt, logits_processor=LogitsProcessorList([Sealed()]), **options)
    ours = target.generate(
        prompt, logits_processor=LogitsProcessorList([Sealed()]), assistant_model=lab.drafter(), **options
    )
    assert torch.equal(plain.sequences, ours.sequences)
    assert set(ours.dspark.verify_lengths[0]) == {0}


class Counter:
    """A grammar that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, row, ids):
        self.calls += 1
        return [self.calls % 64, self.calls * 7 % 64]


def closure(row=None, ids=None):
    state = {"calls": 0}

    def allowed(row, ids):
        state["calls"] += 1
        return [state["calls"] % 64, state["calls"] * 7 % 64]

    return allowed


def rebound():
    calls = 0

    def allowed(row, ids):
        nonlocal calls
        calls += 1
        return [calls % 64, calls * 7 % 64]

    return allowed


def default():
    def allowed(row, ids, state=[0]):  # noqa: B006 - the memory under test
        state[0] += 1
        return [state[0] % 64, state[0] * 7 % 64]

    return allowed


def attribute():
    def allowed(row, ids):
        allowed.calls += 1
        return [allowed.calls % 64, allowed.calls * 7 % 64]

    allowed.calls = 0
    return allowed


def method():
    return Counter().__call__


def bound():
    return functools.partial(lambda counter, row, ids: counter(row, ids), Counter())


def processor_of(allowed):
    def process(input_ids, scores):
        mask = torch.full_like(scores, float("-inf"))
        mask[:, allowed(0, input_ids[0])] = 0
        return scores + mask

    return process


def two_that_share(allowed):
    """The first counts, the second forbids."""
    last = []

    def count(input_ids, scores):
        last[:] = allowed(0, input_ids[0])
        return scores

    return [count, processor_of(lambda row, ids: last)]


MEMORIES = [Counter, closure, rebound, default, attribute, method, bound]


@pytest.mark.parametrize("make", MEMORIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("place", ["prefix", "processor", "two"])
def test_memory_in_any_callable(lab, prompt, make, place):
    def options():
        if place == "prefix":
            return {"prefix_allowed_tokens_fn": make()}
        processors = two_that_share(make()) if place == "two" else [processor_of(make())]
        return {"logits_processor": LogitsProcessorList(processors)}

    target, common = lab.target(), {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(prompt, **common, **options())
    for wrong in ([None], None):
        drafter = lab.scripted(plain.sequences, wrong)
        ours = target.generate(prompt, assistant_model=drafter, **common, **options())
        assert torch.equal(ours.sequences, plain.sequences)
        if sys.version_info < (3, 14):  # later ones copy no functions, so nothing is drafted there
            assert ours.dspark.mean_accepted_length > 1.5


def trie_of(texts):
    trie = {}
    for text in texts:
        node = trie
        for token in text:
            node = node.setdefault(token, {})
    return trie


def walk(trie, ids):
    for token in ids[7:].tolist():
        trie = trie[token]
    return list(trie) or [63]


def test_tries_keep_drafting(lab, prompt):
    target, common = lab.target(), {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    free = target.generate(prompt, max_new_tokens=16, do_sample=False)[0, 7:].tolist()
    trie = trie_of([free, free[:5] + free[7:], free[1:]])
    options = {"prefix_allowed_tokens_fn": lambda row, ids: walk(trie, ids)}
    plain = target.generate(prompt, **common, **options)
    ours = target.generate(prompt, assistant_model=lab.scripted(plain.sequences, [None]), **common, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    if sys.version_info < (3, 14):
        assert ours.dspark.mean_accepted_length > 3


def test_memory_too_large_to_copy(lab, prompt):
    class Large(Counter):
        def __init__(self):
            super().__init__()
            self.parts = [[] for _ in range(20_000)]

    target, common = lab.target(), {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(prompt, prefix_allowed_tokens_fn=Large(), **common)
    ours = target.generate(prompt, prefix_allowed_tokens_fn=Large(), assistant_model=lab.drafter(), **common)
    assert torch.equal(ours.sequences, plain.sequences)
    assert set(ours.dspark.verify_lengths[0]) == {0}


@pytest.mark.parametrize("place", ["prefix", "processor", "object"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_grammar_is_not_asked_behind_the_end(lab, prompt, place, do_sample):
    """A user's grammar raises for texts outside its language: those that went on behind an end, or beside it."""
    target = lab.target()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    end = free[0, 13].item()
    texts = {tuple(free[0, : 7 + i].tolist()): free[0, 7 + i].item() for i in range(20)}

    def allowed(row, ids):
        assert end not in ids[7:].tolist()
        return [texts[tuple(ids.tolist())]]

    class Grammar(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return processor_of(allowed)(input_ids, scores)

    options = {"max_new_tokens": 20, "do_sample": do_sample, "eos_token_id": end}
    if place == "prefix":
        options["prefix_allowed_tokens_fn"] = allowed
    else:
        processor = processor_of(allowed) if place == "processor" else Grammar()
        options["logits_processor"] = LogitsProcessorList([processor])
    plain = target.generate(prompt, **options)
    for drafter in (lab.scripted(free, [None]), lab.scripted(free), lab.drafter(draft_vocab_size=20)):
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)


def test_watermark(lab, both, prompt):
    watermark = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 7, 5], sampling_table_size=64)
    plain, ours = both(lab.target(), prompt, 4, watermarking_config=watermark, top_k=1, do_sample=True)
    assert torch.equal(plain, ours)


def test_processor_that_leaves_the_drafter_nothing(lab, prompt):
    """
    Only tokens outside a reduced draft vocabulary are allowed: nothing can be drafted, everything can be decoded.
    """
    target, drafter = lab.target(), lab.drafter(draft_vocab_size=8, markov_rank=0)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options["suppress_tokens"] = list(range(8))
    ours = target.generate(prompt, assistant_model=drafter, **options)
    assert torch.equal(ours.sequences, target.generate(prompt, **options).sequences)
    assert set(ours.dspark.verify_lengths[0]) == {0}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_drafter_without_numbers(lab, prompt, do_sample, poison):
    """Logits that are no numbers draft nothing; the text is the target's."""
    target, drafter = lab.target(), lab.drafter(markov_head_type="vanilla")
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight[5] = poison
    options = {"max_new_tokens": 12, "do_sample": do_sample, "top_k": 1 if do_sample else None}
    ours = target.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(ours.sequences, target.generate(prompt, **options))
    if poison != poison:
        assert set(ours.dspark.verify_lengths[0]) == {0}


# ---- randomness
# ------------------------------------------------------------------------------------------------------


def test_seed(lab, prompt):
    target, drafter = lab.target(), lab.drafter()

    def text(seed, noise=0):
        torch.manual_seed(noise)
        config = DSparkGenerationConfig(max_new_tokens=20, do_sample=True, seed=seed)
        return target.generate(prompt, assistant_model=drafter, generation_config=config).tolist()

    assert text(3) == text(3, noise=1)
    assert text(3) != text(4)
    assert text(None) == text(None)
    assert text(None) != text(None, noise=1)


def test_options_as_keywords(lab, prompt):
    from transformers.utils import logging

    target, drafter, level = lab.target(), lab.drafter(), logging.get_verbosity()
    logging.set_verbosity_error()  # Transformers discourages a configuration together with keywords
    try:
        config = DSparkGenerationConfig(max_new_tokens=20, do_sample=True)
        texts = [
            target.generate(prompt, assistant_model=drafter, generation_config=config, seed=seed).tolist()
            for seed in (3, 3, 4)
        ]
    finally:
        logging.set_verbosity(level)
    assert texts[0] == texts[1] != texts[2]
