"""What only a CUDA device can show of captured rounds: kernels, captures, compiled targets."""

import copy

import pytest
import torch
from transformers import CompileConfig

from tests.recurrent.sweep import RecurrentLab, gap_between
from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.mixers import STATES

from .conftest import ragged


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ENGINES = {
    "auto": {},
    "eager": {"use_cuda_graphs": False},
    "graph": {"use_cuda_graphs": True},
    "compiled": {"use_cuda_graphs": True, "compile_config": CompileConfig()},
}


@pytest.fixture(scope="module")
def lab():
    return RecurrentLab()


@pytest.fixture
def pair(lab):
    def make(kind, dtype=torch.float32, **changes):
        target = copy.deepcopy(lab.target(kind)).to("cuda", dtype)
        return target, copy.deepcopy(lab.drafter(**changes)).to("cuda", dtype)

    return make


def play(target, drafter, ids, mask, engine, **options):
    options = {"do_sample": False, "max_new_tokens": 60, "return_dict_in_generate": True, **options}
    config = DSparkGenerationConfig(dspark_loop="batched", **ENGINES[engine], **options)
    return target.generate(ids.cuda(), attention_mask=mask.cuda(), assistant_model=drafter, generation_config=config)


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3", "gpt-oss", "qwen3-moe"])
def test_greedy_is_plain_generation(pair, kind, rows, engine):
    if engine == "graph" and kind in ("gpt-oss", "qwen3-moe"):
        engine = "auto"  # PyTorch's grouped products of float32 copy to the host: the loop goes on without graphs
    target, drafter = pair(kind, enable_confidence_head=True)
    for seed in (3, 8):
        ids, mask = ragged(rows, seed=seed)
        plain = target.generate(ids.cuda(), attention_mask=mask.cuda(), do_sample=False, max_new_tokens=60)
        assert torch.equal(play(target, drafter, ids, mask, engine).sequences, plain)


def test_compiled_target(pair):
    target, drafter = pair("llama")
    for rows in (3, 1, 6):
        ids, mask = ragged(rows)
        plain = target.generate(ids.cuda(), attention_mask=mask.cuda(), do_sample=False, max_new_tokens=30)
        ours = play(target, drafter, ids, mask, "compiled", max_new_tokens=30)
        assert torch.equal(ours.sequences, plain)


@pytest.mark.parametrize("compiling", [{}, {"compile_config": CompileConfig()}], ids=["graph", "compiled"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_one_prompt_by_default(pair, kind, compiling):
    """The text of plain generation, and in the cache that it leaves behind the same keys and values."""
    target, drafter = pair(kind)
    options = {"do_sample": False, "max_new_tokens": 60, "return_dict_in_generate": True}
    for length in (9, 30, 2):
        ids = ragged(1, length)[0].cuda()
        plain = target.generate(ids, **options)
        ours = target.generate(ids, assistant_model=drafter, **options, **compiling)
        assert torch.equal(ours.sequences, plain.sequences)
        assert drafter.captured.count > 0
        assert ours.cache.get_seq_length() == plain.cache.get_seq_length()
        for mine, theirs in zip(ours.cache.layers, plain.cache.layers, strict=True):
            torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}], ids=str)
def test_draws_what_the_other_loop_draws(pair, options):
    target, drafter = pair("llama")
    ids, mask = ragged(4)
    options = {"do_sample": True, "seed": 5, "max_new_tokens": 90, **options}
    plain = play(target, drafter, ids, mask, "eager", **options)
    ours = play(target, drafter, ids, mask, "graph", **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.dspark.accepted_lengths == plain.dspark.accepted_lengths


def test_order_of_rows_leaves_their_texts_alone(pair):
    """In bfloat16, where every other order of sums would show."""
    target, drafter = pair("llama", torch.bfloat16)
    ids, mask = ragged(5)
    order = torch.tensor([3, 0, 4, 2, 1])
    first = play(target, drafter, ids, mask, "graph").sequences
    second = play(target, drafter, ids[order], mask[order], "graph").sequences
    assert torch.equal(second, first[order.cuda()])


RECURRENT = ["qwen3.5", "lfm2", "mamba2", "nemotron-h", "falcon-h1", "olmo-hybrid"]


@pytest.mark.parametrize("engine", ["graph", "compiled"])
@pytest.mark.parametrize("kind", [*RECURRENT, "qwen3-next", "kimi-linear"])
def test_recurrent_states_in_graphs(pair, kind, engine):
    """Tokens, and in the end the states, are those of the other loop."""
    if kind in ("qwen3-next", "kimi-linear"):
        if engine == "compiled":
            pytest.skip("experts of float32 copy to the host")
        engine = "auto"
    target, drafter = pair(kind)
    for rows in (3, 1, 6):
        ids, mask = ragged(rows)
        plain = target.generate(ids.cuda(), attention_mask=mask.cuda(), do_sample=False, max_new_tokens=40)
        ours = play(target, drafter, ids, mask, engine, max_new_tokens=40)
        assert torch.equal(ours.sequences, plain)
        if engine != "auto":
            assert drafter.captured.failure is None
            assert drafter.captured.count > 0
        other = play(target, drafter, ids, mask, "eager", max_new_tokens=40)
        assert ours.cache.lengths == other.cache.lengths
        for row, length in enumerate(ours.cache.lengths):
            found, expected = (output.cache.recurrent.states(row, length) for output in (ours, other))
            for index in expected:
                for name in STATES:
                    pairs = (getattr(layers[index], name).values() for layers in (found, expected))
                    gaps = [gap_between(*pair) for pair in zip(*pairs, strict=True) if pair[1] is not None]
                    assert max(gaps, default=0) < 1e-3


def test_recurrent_states_draw_what_the_other_loop_draws(pair):
    target, drafter = pair("qwen3.5")
    ids, mask = ragged(4)
    options = {"do_sample": True, "seed": 5, "max_new_tokens": 60, "eos_token_id": [7, 30], "pad_token_id": 0}
    plain = play(target, drafter, ids, mask, "eager", **options)
    ours = play(target, drafter, ids, mask, "graph", **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.dspark.accepted_lengths == plain.dspark.accepted_lengths


@pytest.mark.slow
def test_ten_thousand_rounds(pair):
    """Of random sizes and lengths; an access outside of a buffer would end the process."""
    target, drafter = pair("gemma3", torch.bfloat16, enable_confidence_head=True)
    noise, rounds = torch.Generator().manual_seed(0), 0
    while rounds < 10_000:
        rows, length, new, seed = (int(torch.randint(1, most, (), generator=noise)) for most in (9, 60, 380, 99))
        ids, mask = ragged(rows, length + 1, seed)
        options = {"do_sample": bool(seed % 2), "max_new_tokens": new, "eos_token_id": [7, 9], "pad_token_id": 0}
        ours = play(target, drafter, ids, mask, "graph", **options)
        rounds += ours.dspark.rounds
    assert int(ours.sequences.max()) < target.config.vocab_size
