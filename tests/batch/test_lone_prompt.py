"""One prompt without a word about loops, on a device whose rounds can be captured."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    BloomForCausalLM,
    DynamicCache,
    FalconForCausalLM,
    GPTNeoXForCausalLM,
    NemotronForCausalLM,
    StableLmForCausalLM,
    StaticCache,
    TextStreamer,
)

from tests.recurrent.sweep import RecurrentLab
from tests.slot.conftest import VOCAB
from transformers_dspark import DSparkGenerationConfig, captured, decoding, lone_prompt
from transformers_dspark.decoding import Batch
from transformers_dspark.graphs import Graph

from .conftest import ragged


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(captured, "_reason_against_device", lambda target, drafter: None)


@pytest.fixture
def captured_rounds(monkeypatch) -> list[int]:
    """One entry for each that was played."""
    played, play = [], Batch.captured_round
    monkeypatch.setattr(Batch, "captured_round", lambda batch: (played.append(1), play(batch))[1])
    return played


def both(lab, drafter, ids, kind="llama", **options):
    """What `generate` writes with a drafter, and without."""
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, **options}
    target = lab.target(kind)
    return target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4", "gemma4-small", "gpt-oss"])
def test_graphs_where_they_can_be(lab, captured_rounds, kind):
    """The text, and the cache: its kind, its length, the keys and values of each layer."""
    ids, _ = ragged(1, 17)
    ours, plain = both(lab, lab.drafter(), ids, kind)
    assert captured_rounds
    assert torch.equal(ours.sequences, plain.sequences)
    assert type(ours.cache) is type(plain.cache)
    assert ours.cache.get_seq_length() == plain.cache.get_seq_length()
    for mine, theirs in zip(ours.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("own", [False, True], ids=["returned", "the caller's"])
def test_chats_go_on_from_the_cache(lab, captured_rounds, kind, own):
    target, drafter, (ids, _) = lab.target(kind), lab.drafter(), ragged(1)
    cache = {"cache": DynamicCache(config=target.config)} if own else {}
    options = {"do_sample": False, "assistant_model": drafter}
    first = target.generate(ids, max_new_tokens=7, return_dict_in_generate=not own, **options, **cache)
    assert captured_rounds
    text, cache = (first, cache["cache"]) if own else (first.sequences, first.cache)
    second = torch.cat((text, ids), dim=1)
    ours = target.generate(second, cache=cache, max_new_tokens=9, **options)
    assert torch.equal(ours, target.generate(second, do_sample=False, max_new_tokens=9))


OTHERS = {
    "output_attentions": True,
    "output_scores": True,
    "cache_implementation": "static",
    "stopping_criteria": [lambda ids, scores: False],
    "use_cuda_graphs": False,
    "dspark_loop": "transformers",
}


@pytest.mark.parametrize("option", OTHERS)
def test_what_only_the_other_loop_has(lab, captured_rounds, option):
    drafter, (ids, _), target = lab.drafter(), ragged(1), lab.target()
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    plain = target.generate(ids, **options)
    if option == "stopping_criteria":
        options = {"generation_config": DSparkGenerationConfig(**options), option: OTHERS[option]}
    else:
        options = {"generation_config": DSparkGenerationConfig(**options, **{option: OTHERS[option]})}
    ours = target.generate(ids, assistant_model=drafter, **options)
    assert not captured_rounds
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("own", [False, True], ids=["returned", "the caller's"])
def test_padding_has_its_columns_in_the_cache(lab, captured_rounds, own):
    """The next turn's mask counts them."""
    target, drafter, (ids, _) = lab.target(), lab.drafter(), ragged(1, 9)
    ids = torch.cat((torch.zeros(1, 5, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(14) >= 5).long()[None]
    options = {"do_sample": False, "return_dict_in_generate": True}
    given = {"cache": DynamicCache(config=target.config)} if own else {}
    first = target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=7, **options, **given)
    assert torch.equal(
        first.sequences, target.generate(ids, attention_mask=mask, max_new_tokens=7, **options).sequences
    )
    text = torch.cat((first.sequences, ids[:, 5:]), dim=1)
    longer = torch.cat((mask, torch.ones(1, text.shape[1] - 14, dtype=torch.long)), dim=1)
    second = target.generate(text, attention_mask=longer, cache=first.cache, max_new_tokens=9, **options)
    plain = target.generate(text, attention_mask=longer, max_new_tokens=9, **options)
    assert torch.equal(second.sequences, plain.sequences)


def test_states_that_are_no_keys_and_values(captured_rounds):
    """Short convolutions do not count as a recurrent state, and stand in the cache of Transformers as well."""
    lab = RecurrentLab()
    target, drafter, (ids, _) = lab.target("lfm2"), lab.drafter(), ragged(1)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(ids, assistant_model=drafter, max_new_tokens=7, **options)
    text = torch.cat((first.sequences, ids), dim=1)
    second = target.generate(text, cache=first.cache, max_new_tokens=9, **options)
    assert torch.equal(second.sequences, target.generate(text, max_new_tokens=9, **options).sequences)
    assert not captured_rounds


def test_threads_beside_the_main_one(lab, captured_rounds):
    """They may share a target, which our attention would take from the others for the length of a call."""
    target, drafter, (ids, _) = lab.target(), lab.drafter(), ragged(1)
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(target.generate, ids, do_sample=False, max_new_tokens=20, **extra)
            for extra in (
                {"assistant_model": drafter},
                {},
                {"assistant_model": drafter},
                {},
                {"assistant_model": drafter},
            )
        ]
        assert all(torch.equal(call.result(), plain) for call in calls)
    assert not captured_rounds


def test_a_cache_of_another_kind(lab, captured_rounds):
    target, drafter, (ids, _) = lab.target(), lab.drafter(), ragged(1)
    cache = StaticCache(config=target.config, max_cache_len=64)
    plain = target.generate(ids, do_sample=False, max_new_tokens=9)
    assert torch.equal(
        target.generate(ids, cache=cache, assistant_model=drafter, do_sample=False, max_new_tokens=9), plain
    )
    assert not captured_rounds


def test_little_memory(lab, captured_rounds, monkeypatch):
    """But what an equal call has left there counts as free."""
    drafter, (ids, _) = lab.drafter(), ragged(1)
    with monkeypatch.context() as short:
        short.setattr(captured, "free_memory", lambda device: 2**14)
        ours, plain = both(lab, drafter, ids)
        assert torch.equal(ours.sequences, plain.sequences)
        assert not captured_rounds
    both(lab, drafter, ids)
    monkeypatch.setattr(captured, "free_memory", lambda device: 0.0)
    before = len(captured_rounds)
    both(lab, drafter, ids, max_new_tokens=200)
    assert len(captured_rounds) > before > 0


@pytest.mark.parametrize(
    "make", [BloomForCausalLM, FalconForCausalLM, GPTNeoXForCausalLM, NemotronForCausalLM, StableLmForCausalLM]
)
def test_targets_that_a_packed_forward_does_not_suit(lab, captured_rounds, make, monkeypatch):
    """It is tried once; the text is then that of the other loop, streamed as ever."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    config = make.config_class(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    target, drafter, (ids, _) = make(config).eval(), lab.drafter(), ragged(1)
    plain, begun = target.generate(ids, do_sample=False, max_new_tokens=9), []
    prefill = Batch.prefill
    monkeypatch.setattr(Batch, "prefill", lambda batch: (begun.append(1), prefill(batch))[1])
    for _ in range(2):
        ours = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=9)
        assert torch.equal(ours, plain)
    assert not captured_rounds
    assert len(begun) <= 1


class Failing(Graph):
    def __init__(self, *args):
        raise RuntimeError("no such thing")


def test_a_capture_that_fails(lab, monkeypatch):
    monkeypatch.setattr(captured, "Graph", Failing)
    drafter, (ids, _) = lab.drafter(), ragged(1)
    for _ in range(2):
        ours, plain = both(lab, drafter, ids)
        assert torch.equal(ours.sequences, plain.sequences)
        assert type(ours.cache) is type(plain.cache)


def test_memory_that_runs_out_while_the_prompt_is_read(lab, monkeypatch):
    """The next call may find enough."""
    drafter, (ids, _) = lab.drafter(), ragged(1)
    with monkeypatch.context() as short:
        short.setattr(Batch, "_extend", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        ours, plain = both(lab, drafter, ids)
        assert torch.equal(ours.sequences, plain.sequences)
        assert drafter.captured is None
    both(lab, drafter, ids)
    assert drafter.captured.count


def test_memory_of_a_failed_attempt_is_free_for_the_other_loop(lab, monkeypatch):
    caches, alive = [], []
    prefill, other = Batch.prefill, lone_prompt.assisted_decoding

    def fail(batch):
        prefill(batch)
        caches.append(weakref.ref(batch.cache))
        raise torch.OutOfMemoryError("no memory")

    def watched(*args, **kwargs):
        alive.extend(cache() for cache in caches)
        return other(*args, **kwargs)

    monkeypatch.setattr(Batch, "prefill", fail)
    monkeypatch.setattr(lone_prompt, "assisted_decoding", watched)
    drafter, (ids, _) = lab.drafter(), ragged(1)
    both(lab, drafter, ids)
    assert alive == [None]


def test_an_error_of_one_call_is_no_reason_against_the_next(lab, captured_rounds):
    drafter, (ids, _) = lab.drafter(), ragged(1)
    config = DSparkGenerationConfig(do_sample=False, max_new_tokens=5, suppress_tokens=list(range(VOCAB)))
    lab.target().generate(ids, assistant_model=drafter, generation_config=config)  # no token is left
    both(lab, drafter, ids)
    assert captured_rounds


def test_a_fallback_leaves_no_trace_in_the_generator(lab, monkeypatch):
    drafter, (ids, _), target = lab.drafter(), ragged(1), lab.target()
    options = {"do_sample": True, "max_new_tokens": 12}
    loops = (
        DSparkGenerationConfig(**options, use_cuda_graphs=False),
        DSparkGenerationConfig(**options, dspark_loop="transformers"),
    )
    texts = []
    for config in loops:
        torch.manual_seed(4)
        texts.append(target.generate(ids, assistant_model=drafter, generation_config=config))
    assert torch.equal(*texts)


def test_an_error_behind_the_first_token_is_the_callers(lab, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such round")

    monkeypatch.setattr(decoding.Batch, "captured_round", fail)
    drafter, (ids, _) = lab.drafter(), ragged(1)
    with pytest.raises(RuntimeError, match="no such round"):
        both(lab, drafter, ids)
    assert drafter.captured._lock.acquire(blocking=False)  # it was given back


def test_streamer(lab, captured_rounds, capsys):
    class Words:
        def decode(self, ids, **kwargs):
            return "".join(f"{int(i)} " for i in ids)

    drafter, (ids, _) = lab.drafter(), ragged(1)
    plain = lab.target().generate(ids, do_sample=False, max_new_tokens=20)
    lab.target().generate(
        ids, assistant_model=drafter, do_sample=False, max_new_tokens=20, streamer=TextStreamer(Words())
    )
    assert captured_rounds
    assert capsys.readouterr().out.split() == [str(i) for i in plain[0].tolist()]


def test_sampling_is_repeatable(lab, captured_rounds):
    """One seed, one text, in this loop as well."""
    drafter, (ids, _) = lab.drafter(), ragged(1)
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(lab.target().generate(ids, assistant_model=drafter, do_sample=True, max_new_tokens=12))
    assert captured_rounds
    assert torch.equal(*texts)
