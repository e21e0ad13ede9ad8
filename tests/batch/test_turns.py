"""Several turns: the cache that a batched call returns, with the drafter's context in it, serves the next call."""

import pytest
import torch

from transformers_dspark import DSparkGenerationConfig

from .conftest import VOCAB, ragged, texts_of


GREEDY = {"do_sample": False, "max_new_tokens": 12}
OUT = {**GREEDY, "return_dict_in_generate": True}


def padded(texts):
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return ids, mask


def count_tokens(target, run):
    """What `run` returns, and the tokens of each forward of the target in it."""
    seen = []
    hook = target.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(args[0].numel()))
    try:
        return run(), seen
    finally:
        hook.remove()


def second_turn(first, mask, lengths, seed=11):
    generator = torch.Generator().manual_seed(seed)
    more = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [text + new for text, new in zip(texts_of(first, mask), more, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_rows_grow_differently(lab, kind):
    """The second prompts have other lengths, so other padding; only what is new is read."""
    target, (ids, mask) = lab.target(kind), ragged(3)
    first = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), **OUT)
    texts = second_turn(first.sequences, mask, (1, 7, 4))
    ids, mask = padded(texts)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    options = {"attention_mask": mask, **OUT}

    def again():
        return target.generate(ids, cache=first.cache, assistant_model=lab.drafter(), **options)

    ours, seen = count_tokens(target, again)
    assert torch.equal(plain, ours.sequences)
    assert seen[0] == 3 + 1 + 7 + 4  # the last token of each first text has no keys and values yet
    fresh = target.generate(ids, assistant_model=lab.drafter(), **options)
    assert ours.dspark.accepted_lengths == fresh.dspark.accepted_lengths  # the drafter's context is there, too
    third = second_turn(ours.sequences, mask, (2, 2, 2))
    ids, mask = padded(third)
    again = target.generate(ids, attention_mask=mask, cache=ours.cache, assistant_model=lab.drafter(), **GREEDY)
    assert torch.equal(target.generate(ids, attention_mask=mask, **GREEDY), again)


def test_a_single_row_goes_on_in_the_loop_that_made_its_cache(lab):
    target, ids = lab.target(), ragged(1)[0]
    batched = DSparkGenerationConfig(dspark_loop="batched", **OUT)
    first = target.generate(ids, assistant_model=lab.drafter(), generation_config=batched)
    ids = torch.tensor(second_turn(first.sequences, torch.ones_like(ids), (4,)))
    options = {"cache": first.cache, "assistant_model": lab.drafter(), **GREEDY}
    ours, seen = count_tokens(target, lambda: target.generate(ids, **options))
    assert torch.equal(ours, target.generate(ids, **GREEDY))
    assert seen[0] == 1 + 4


def test_texts_that_end_and_differ(lab):
    """Rows that ended early, one whose second text differs in the middle, one from the start, one that is shorter."""
    target, (ids, mask) = lab.target(), ragged(4)
    free = target.generate(ids, attention_mask=mask, **GREEDY)
    eos = [int(free[0, 12]), int(free[2, 14])]
    first = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), eos_token_id=eos, **OUT)
    real = [
        text[: len(text) - int((row[9:] == 0).sum())]
        for text, row in zip(texts_of(first.sequences, mask), first.sequences, strict=True)
    ]
    assert len({len(text) for text in real}) > 2
    texts = [[*real[0], 5, 6, 7], [*real[1][:6], 60, 61, *real[1][8:]], [33, *real[2][1:], 8], real[3][:5]]
    ids, mask = padded(texts)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    ours = target.generate(ids, attention_mask=mask, cache=first.cache, assistant_model=lab.drafter(), **GREEDY)
    assert torch.equal(plain, ours)


def test_a_cache_that_is_given_stays_whole(lab):
    """Also when the call returns no cache, and its rows ended in another order than they began."""
    target, (ids, mask) = lab.target(), ragged(4)
    cache = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), **OUT).cache
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    eos = [int(free[0, 12]), int(free[1, 20])]
    options = {"attention_mask": mask, "do_sample": False, "assistant_model": lab.drafter()}
    target.generate(ids, cache=cache, eos_token_id=eos, max_new_tokens=20, **options)
    ours, seen = count_tokens(target, lambda: target.generate(ids, cache=cache, max_new_tokens=20, **options))
    assert torch.equal(free, ours)
    assert seen[0] == 4  # the whole prompts are there


def test_a_call_that_fails_spoils_its_cache(lab):
    target, (ids, mask) = lab.target(), ragged(2)
    cache = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), **OUT).cache
    options = {"attention_mask": mask, "cache": cache, "assistant_model": lab.drafter(), **GREEDY}
    wrong = DSparkGenerationConfig(seed=[1, 2, 3], do_sample=True, max_new_tokens=12)
    refused = {name: value for name, value in options.items() if name not in GREEDY}
    with pytest.raises(ValueError, match="seed has 3 numbers"):
        target.generate(ids, generation_config=wrong, **refused)
    _, seen = count_tokens(target, lambda: target.generate(ids, **options))
    assert seen[0] == 2  # nothing had happened to the cache

    def fails(row, so_far):
        if len(so_far) > 12:
            raise ZeroDivisionError
        return list(range(VOCAB))

    with pytest.raises(ZeroDivisionError):
        target.generate(ids, prefix_allowed_tokens_fn=fails, **options)
    with pytest.raises(ValueError, match="did not come to its end"):
        target.generate(ids, **options)
    assert target.config._attn_implementation == "sdpa"


def test_caches_of_plain_generation(lab):
    """They know nothing of the drafter's context: the text is read anew, and the result is the same."""
    target, (ids, mask) = lab.target(), ragged(3)
    first = target.generate(ids, attention_mask=mask, **OUT)
    texts = second_turn(first.sequences, mask, (3, 3, 3))
    ids, mask = padded(texts)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    ours = target.generate(ids, attention_mask=mask, cache=first.cache, assistant_model=lab.drafter(), **GREEDY)
    assert torch.equal(plain, ours)


def test_other_positions(lab):
    """The same tokens at other positions have other keys: what the cache holds is not used."""
    target, (ids, mask) = lab.target(), ragged(2)
    first = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), **OUT)
    places = (mask.cumsum(dim=1) - 1).clamp(min=0) * 3 + 1
    options = {"attention_mask": mask, "position_ids": places, "assistant_model": lab.drafter(), **GREEDY}
    fresh = target.generate(ids, **options)
    again, seen = count_tokens(target, lambda: target.generate(ids, cache=first.cache, **options))
    assert seen[0] == int(mask.sum())
    assert torch.equal(fresh, again)


@pytest.mark.parametrize("masked", [False, True])
def test_new_tokens_alone(lab, masked):
    target, (ids, mask) = lab.target(), ragged(2)
    ids, mask = (ids, mask) if masked else (ids[:, 2:], mask[:, 2:])
    cache = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), **OUT).cache
    longer = torch.cat((mask, torch.ones(2, 15, dtype=torch.long)), dim=1)
    new = torch.full((2, 4), 5)
    with pytest.raises(ValueError, match="ids that repeat what a cache holds"):
        target.generate(new, attention_mask=longer, cache=cache, assistant_model=lab.drafter(), **GREEDY)


def test_another_number_of_rows(lab):
    target, (ids, mask) = lab.target(), ragged(3)
    cache = target.generate(ids, attention_mask=mask, assistant_model=lab.drafter(), **OUT).cache
    with pytest.raises(ValueError, match="holds 3 texts, and this call has 2"):
        target.generate(ids[:2], attention_mask=mask[:2], cache=cache, assistant_model=lab.drafter(), **GREEDY)


def test_a_cache_of_another_target_is_not_used(lab):
    target, other = lab.target("llama"), lab.target("llama", intermediate_size=56)
    ids, mask = ragged(2)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    first = target.generate(ids, assistant_model=lab.drafter(), return_dict_in_generate=True, **options)
    ours = other.generate(ids, assistant_model=lab.drafter(), cache=first.cache, **options)
    assert torch.equal(ours, other.generate(ids, **options))
    assert not torch.equal(ours, first.sequences)
