"""
Targets with recurrent state: the very tokens of plain generate, and its states.

100 prompts of every family, and all modes and schedulers on one of each kind: `pytest tests/recurrent -m slow`.
"""

import pytest
import torch

import transformers_dspark
from tests.batch.conftest import ragged, texts_of
from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.cache import check_layers
from transformers_dspark.mixers import read_one_by_one
from transformers_dspark.profiling import time_steps
from transformers_dspark.recurrent import SETTLE

from .families import ONE_BY_ONE, RECURRENT, REFUSED
from .sweep import RecurrentLab, sweep, sweep_in_double


GREEDY = {"do_sample": False, "max_new_tokens": 24}
KINDS = ["qwen3.5", "zamba2"]  # mixers that read whole windows, and such as read token by token
MODES = [(mode, scheduler) for mode in ("static", "compact", "cap-accept") for scheduler in ("causal", "lagged")]


@pytest.fixture(scope="module")
def lab():
    return RecurrentLab()


def plain_and_ours(lab, kind, rows, block, seed=3, **options):
    target, (ids, mask) = lab.target(kind), ragged(rows, seed=seed)
    options = {**GREEDY, "attention_mask": mask, **options}
    plain = target.generate(ids, **options)
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    drafter = lab.knowing(texts_of(sequences, mask), block_size=block)
    return plain, target.generate(ids, assistant_model=drafter, **options)


QUICK = ("qwen3.5", "qwen3-next", "lfm2", "kimi-linear", "mamba2", "falcon-h1", "nemotron-h", "mamba", "zamba2")


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in RECURRENT]
)
def test_greedy(lab, kind):
    plain, ours = plain_and_ours(lab, kind, 3, 2 + list(RECURRENT).index(kind) % 7)
    assert torch.equal(plain, ours)
    assert read_one_by_one(lab.target(kind)) == (kind in ONE_BY_ONE)


def test_bytes_of_states_count(lab):
    _, ours = plain_and_ours(lab, "qwen3.5", 3, 4, return_dict_in_generate=True)
    cache, state = ours.cache, 4 * 8 * 8 * 4  # of a row and layer: heads, keys, values, float32
    assert cache.recurrent.nbytes > 2 * 3 * state
    assert cache.nbytes > cache.recurrent.nbytes + cache.context.nbytes > cache.recurrent.nbytes


EXACT = ("qwen3.5-multimodal", "lfm2", "zamba2")


@pytest.mark.parametrize(
    "kind", [kind if kind in EXACT else pytest.param(kind, marks=pytest.mark.slow) for kind in RECURRENT]
)
def test_states_equal_plain_decoding(kind):
    """
    However far a row has gone, its states are those of plain decoding, one token at a time. In float64: in float32 a
    layer's rounding grows in those behind it, to 1e-4 of a state.
    """
    figures = sweep_in_double(kind, {3: 3})
    assert figures["other_tokens"] == 0
    assert figures["states"] > 50
    assert figures["largest_gap"] < 1e-10
    if kind in EXACT:  # elsewhere a text may repeat one token, and its states with it
        assert figures["smallest_gap_of_a_token"] > 1e-2


TIGHT = ("lfm2", "mamba2", "falcon-h1", "granite-hybrid")  # in float32 as well


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_hundred_prompts(lab, kind):
    figures = sweep(lab, kind, {1: 100, 5: 100}, compared=5)
    assert figures["other_tokens"] == 0
    assert figures["largest_gap"] < (1e-5 if kind in TIGHT else 1e-3)
    assert figures["rejected_slots"] == {str(block): list(range(block)) for block in range(1, 9)}


def test_rows_are_independent_when_sampling(lab):
    target, (ids, mask) = lab.target("qwen3.5"), ragged(4)
    drafter = lab.drafter(block_size=4)
    config = {"do_sample": True, "max_new_tokens": 20, "temperature": 0.7, "dspark_loop": "batched"}
    seeds = [3, 5, 7, 11]
    together = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        generation_config=DSparkGenerationConfig(seed=seeds, **config),
    )
    for row, seed in enumerate(seeds):
        alone = target.generate(
            ids[row : row + 1],
            attention_mask=mask[row : row + 1],
            assistant_model=drafter,
            generation_config=DSparkGenerationConfig(seed=[seed], **config),
        )
        assert torch.equal(together[row : row + 1], alone)


def modes_agree(lab, kind, verify_mode, scheduler):
    target, (ids, mask) = lab.target(kind), ragged(4)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    config = DSparkGenerationConfig(
        verify_mode=verify_mode, scheduler=scheduler, step_cost_table=lab.table(), **GREEDY
    )
    drafter = lab.knowing(texts_of(plain, mask), block_size=4)
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(("kind", "verify_mode", "scheduler"), [("qwen3.5", *MODES[2]), ("zamba2", *MODES[5])])
def test_modes(lab, kind, verify_mode, scheduler):
    modes_agree(lab, kind, verify_mode, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize(("verify_mode", "scheduler"), MODES)
@pytest.mark.parametrize("kind", [*KINDS, "lfm2", "nemotron-h"])
def test_all_modes(lab, kind, verify_mode, scheduler):
    modes_agree(lab, kind, verify_mode, scheduler)


def mean_square(target, sequences, start, temperature):
    """
    Squares of how many standard deviations counts of tokens are off what the target's law expects of them, on average:
    about 1 for samples of that law. A count is that of one token where the law gives it a low, middling or high
    probability; rare ones are left out.
    """
    with torch.no_grad():
        logits = target(sequences).logits[:, start - 1 : -1].double() / temperature
    law = logits.softmax(dim=-1).flatten(0, 1)
    seen = torch.nn.functional.one_hot(sequences[:, start:].flatten(), law.shape[1])
    squares = []
    for low, high in ((0, 0.02), (0.02, 0.2), (0.2, 1)):
        cell = (law > low) & (law <= high)
        variance = (law * (1 - law) * cell).sum(dim=0)
        squares.append((((seen - law) * cell).sum(dim=0).square() / variance)[variance > 8])
    assert len(torch.cat(squares)) > 80
    return float(torch.cat(squares).mean())


def follows_the_law(lab, kind, verify_mode, scheduler, calls):
    target, start = lab.target(kind), 9
    ids = ragged(1)[0].expand(64, -1)
    drafter, texts, accepted = lab.drafter(block_size=4), [], set()
    for seed in range(calls):
        config = DSparkGenerationConfig(
            do_sample=True,
            top_k=0,
            temperature=1.6,
            max_new_tokens=24,
            verify_mode=verify_mode,
            scheduler=scheduler,
            step_cost_table=None if verify_mode == "static" else lab.table(per_token=0.02),
            seed=1000 * seed,
            return_dict_in_generate=True,
        )
        output = target.generate(ids, assistant_model=drafter, generation_config=config)
        texts.append(output.sequences)
        accepted |= {length for row in output.dspark.accepted_lengths for length in row}
    texts = torch.cat(texts)
    assert len(accepted) > 1  # drafts pass, and are rejected
    assert mean_square(target, texts, start, 1.6) < 1.45  # by chance in one of some thousand samples
    assert mean_square(target, texts, start, 1.2) > 1.45  # it would be seen


def test_sampling_follows_the_law(lab):
    follows_the_law(lab, "qwen3.5", "compact", "lagged", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("verify_mode", "scheduler"), MODES)
@pytest.mark.parametrize("kind", [*KINDS, "lfm2", "falcon-h1"])
def test_sampling_follows_the_law_in_all_modes(lab, kind, verify_mode, scheduler):
    follows_the_law(lab, kind, verify_mode, scheduler, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_door(lab, kind):
    target, (ids, mask) = lab.target(kind), ragged(2)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    drafter = lab.knowing(texts_of(plain, mask), block_size=4)
    ours = target.generate(
        ids, attention_mask=mask, custom_generate=transformers_dspark.generate, drafter=drafter, **GREEDY
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(("kind", "kept"), [("qwen3.5", 40), ("qwen3.5", 12), ("mamba", 40)])
def test_a_later_turn(lab, kind, kept):
    """Goes on from a returned cache, also where the text was changed before the settled tokens."""
    target, (ids, mask) = lab.target(kind), ragged(2)
    drafter = lab.drafter(block_size=4)
    first = target.generate(ids, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)
    more = torch.cat((first.sequences[:, :kept], torch.tensor([[9, 8, 7]] * 2)), dim=1)
    mask = torch.cat((mask, torch.ones(2, more.shape[1] - mask.shape[1], dtype=torch.long)), dim=1)
    plain = target.generate(more, attention_mask=mask, **GREEDY)
    assert torch.equal(
        plain, target.generate(more, attention_mask=mask, assistant_model=drafter, cache=first.cache, **GREEDY)
    )


def test_plain_generation_refuses_the_cache(lab):
    target, (ids, _) = lab.target("qwen3.5"), ragged(1)
    cache = target.generate(ids, assistant_model=lab.drafter(), return_dict_in_generate=True, **GREEDY).cache
    with pytest.raises(NotImplementedError, match="none was passed, as in plain generation"):
        target.generate(ids, cache=cache, **GREEDY)


def test_padding_inside_a_text_is_skipped(lab):
    target, (ids, _) = lab.target("qwen3.5"), ragged(1)
    plain = target.generate(ids, **GREEDY)
    apart = torch.cat((ids[:, :4], torch.full((1, 2), 5), ids[:, 4:]), dim=1)
    mask = torch.ones_like(apart)
    mask[:, 4:6] = 0
    drafter = lab.knowing(plain.tolist(), block_size=4)
    ours = target.generate(apart, attention_mask=mask, assistant_model=drafter, **GREEDY)
    assert torch.equal(ours[:, apart.shape[1] :], plain[:, ids.shape[1] :])


def test_a_later_turn_where_prompts_are_computed_otherwise(lab):
    """Zamba2 heeds bounds of time steps in a prompt only, and the first turn's tokens are now part of one."""
    target, (ids, _) = lab.target("zamba2"), ragged(1)
    short = GREEDY | {"max_new_tokens": 12}
    first = target.generate(ids, assistant_model=lab.drafter(), return_dict_in_generate=True, **short)
    more = torch.cat((first.sequences, torch.tensor([[9, 8, 7]])), dim=1)
    plain = target.generate(more, **short)
    assert torch.equal(plain, target.generate(more, assistant_model=lab.drafter(), cache=first.cache, **short))


def test_hidden_states_and_processors(lab):
    plain, ours = plain_and_ours(
        lab,
        "qwen3.5",
        1,
        4,
        repetition_penalty=1.3,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    assert torch.equal(plain.sequences, ours.sequences)
    assert len(plain.hidden_states) == len(ours.hidden_states)
    for expected, found in zip(plain.hidden_states[1:], ours.hidden_states[1:], strict=True):
        torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=1e-4)


def test_the_other_loop_and_other_assistants_are_refused(lab):
    target, (ids, _) = lab.target("qwen3.5"), ragged(1)
    config = DSparkGenerationConfig(dspark_loop="transformers", max_new_tokens=4)
    with pytest.raises(NotImplementedError, match="recurrent state"):
        target.generate(ids, assistant_model=lab.drafter(), generation_config=config)
    with pytest.raises(ValueError, match="stateful models"):
        target.generate(ids, assistant_model=lab.target("llama"), max_new_tokens=4)
    transformers_dspark.integration.unregister()
    try:
        with pytest.raises(ValueError, match="stateful models"):
            target.generate(ids, assistant_model=lab.drafter(), max_new_tokens=4)
    finally:
        transformers_dspark.integration.register()


@pytest.mark.parametrize("kind", REFUSED)
def test_families_that_stay_out_are_named(kind):
    build, reason = REFUSED[kind]
    target = build()
    with pytest.raises(NotImplementedError, match=f"{target.config.model_type} target .*{reason}"):
        check_layers(target)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_timed(lab, kind):
    counts = [step[:3] for step in time_steps(lab.target(kind), [2], [3], [9], 1)]
    assert counts == [(2, 6, 9)]


def test_tokens_read_again_are_counted_and_bounded(lab):
    target, (ids, mask) = lab.target("qwen3.5"), ragged(1)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=60)
    drafter = lab.knowing(texts_of(plain, mask), block_size=4)
    options = {"do_sample": False, "max_new_tokens": 60, "return_dict_in_generate": True}
    stats = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options).dspark
    assert len(stats.reread_tokens) == stats.rounds
    assert 0 < max(stats.reread_tokens) <= 2 * SETTLE + 5


def test_nothing_is_read_again_where_mixers_read_token_by_token(lab):
    _, ours = plain_and_ours(lab, "mamba", 2, 4, return_dict_in_generate=True)
    assert set(ours.dspark.reread_tokens) == {0}
