"""
Targets with recurrent state: the very tokens of plain generate, and its states.

100 prompts, every block from 1 to 8: `pytest tests/recurrent -m slow`.
"""

import pytest
import torch
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

import transformers_dspark
from tests.batch.conftest import BatchLab, ragged, texts_of
from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.profiling import time_steps
from transformers_dspark.recurrent import SETTLE, mixers

from .families import BASE, RECURRENT


GREEDY = {"do_sample": False, "max_new_tokens": 24}


class RecurrentLab(BatchLab):
    def target(self, kind="llama", **changes):
        if kind in RECURRENT and kind not in self.targets:
            torch.manual_seed(0)
            self.targets[kind] = RECURRENT[kind]().eval()
        return self.targets[kind] if kind in RECURRENT else super().target(kind, **changes)


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


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", RECURRENT)
def test_greedy(lab, kind, rows):
    index = list(RECURRENT).index(kind)
    plain, ours = plain_and_ours(lab, kind, rows, 1 + (index + 3 * rows) % 8)
    assert torch.equal(plain, ours)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 9))
@pytest.mark.parametrize("kind", RECURRENT)
def test_hundred_prompts(lab, kind, block):
    for seed in range(20):
        for rows in (1, 5):
            plain, ours = plain_and_ours(lab, kind, rows, block, seed=seed)
            assert torch.equal(plain, ours)


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2", "mamba2", "falcon-h1"])
def test_states_equal_plain_decoding(lab, kind):
    """However far a row has gone, its states are those of plain decoding, one token at a time."""
    target, (ids, mask) = lab.target(kind), ragged(3)
    for count in (5, 24):
        plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count)
        drafter = lab.knowing(texts_of(plain, mask), block_size=4)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": count}
        ours = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
        for row, length in enumerate(ours.cache.lengths):
            text = torch.tensor([texts_of(plain, mask)[row][:length]])
            cache = DynamicCache(config=target.config)
            with torch.no_grad():
                for token in text[0]:
                    target(token.view(1, 1), cache=cache, use_cache=True)
            found = ours.cache.recurrent.states(row, length)
            assert set(found) == set(mixers(target))
            for index, layer in found.items():
                for name in ("conv_states", "recurrent_states"):
                    expected = getattr(cache.layers[index], name)[0]
                    if expected is not None:
                        torch.testing.assert_close(getattr(layer, name)[0], expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("verify_mode", ["static", "compact", "cap-accept"])
@pytest.mark.parametrize("scheduler", ["causal", "lagged"])
def test_modes(lab, verify_mode, scheduler):
    target, (ids, mask) = lab.target("qwen3.5"), ragged(4)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    config = DSparkGenerationConfig(
        verify_mode=verify_mode, scheduler=scheduler, step_cost_table=lab.table(), **GREEDY
    )
    drafter = lab.knowing(texts_of(plain, mask), block_size=4)
    assert torch.equal(
        plain, target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    )


@pytest.mark.parametrize("kept", [40, 12])
def test_a_later_turn(lab, kept):
    """Goes on from a returned cache, also where the text was changed before the settled tokens."""
    target, (ids, mask) = lab.target("qwen3.5"), ragged(2)
    drafter = lab.drafter(block_size=4)
    first = target.generate(ids, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)
    more = torch.cat((first.sequences[:, :kept], torch.tensor([[9, 8, 7]] * 2)), dim=1)
    mask = torch.cat((mask, torch.ones(2, more.shape[1] - mask.shape[1], dtype=torch.long)), dim=1)
    plain = target.generate(more, attention_mask=mask, **GREEDY)
    assert torch.equal(
        plain, target.generate(more, attention_mask=mask, assistant_model=drafter, cache=first.cache, **GREEDY)
    )


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


def test_a_family_that_stays_out_is_named(lab):
    kinds = {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"], "head_dim": 8}
    target = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**BASE, **kinds)).eval()
    with pytest.raises(NotImplementedError, match="recurrent_gemma"):
        target.generate(ragged(1)[0], assistant_model=lab.drafter(), max_new_tokens=4)


def test_steps_are_timed(lab):
    counts = [step[:3] for step in time_steps(lab.target("qwen3.5"), [2], [3], [9], 1)]
    assert counts == [(2, 6, 9)]


def test_tokens_read_again_are_counted_and_bounded(lab):
    target, (ids, mask) = lab.target("qwen3.5"), ragged(1)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=60)
    drafter = lab.knowing(texts_of(plain, mask), block_size=4)
    options = {"do_sample": False, "max_new_tokens": 60, "return_dict_in_generate": True}
    stats = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options).dspark
    assert len(stats.reread_tokens) == stats.rounds
    assert 0 < max(stats.reread_tokens) <= 2 * SETTLE + 5
