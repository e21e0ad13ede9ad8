"""Rounds of fixed shape commit what the batched loop commits, whatever the budget; they read nothing back."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.decoding import Batch
from transformers_dspark.quicker import COMPILED, Quicker
from transformers_dspark.static_round import RoundState, StaticRound
from transformers_dspark.target import few_rows_linears

from .conftest import ragged, texts_of


class InStaticRounds:
    """The batched loop's prompts, then rounds of fixed shape with these budgets, over and over; maybe quicker ones."""

    def __init__(self, *budgets, watch=None, quicker=None):
        self.budgets, self.watch, self.quicker, self.results = budgets, watch, quicker, []

    def __call__(
        self, target, input_ids, logits_processor, stopping_criteria, generation_config, drafter, **model_kwargs
    ):
        batch = Batch(target, input_ids, logits_processor, stopping_criteria, generation_config, drafter, model_kwargs)
        linears = nullcontext() if self.quicker else few_rows_linears(target, drafter)  # lent anew in each call
        with torch.no_grad(), batch.taps, linears, batch.attention():
            batch.prefill()
            rows = len(batch.ends)
            order = [batch.places.index(row) for row in range(rows)]  # rows that have ended already changed places
            batch.cache.rearrange([*order, 0], batch.cache.context.capacity)
            state = RoundState(rows, batch.max_length, batch.options.width, batch.device)
            state.text[:, :-1] = batch.text
            state.ends[:] = torch.tensor(batch.ends)
            state.entries[:] = torch.tensor(batch.cache.lengths[:rows])
            state.shifts[:] = torch.tensor(batch.inputs.shifts)
            if batch._processors.starts is not None:
                state.starts[:] = batch._processors.starts
            state.live[:] = ~torch.isin(batch.text[:, batch.start], torch.tensor(sorted(batch._eos_ids)))
            play = StaticRound(
                drafter,
                batch.taps,
                batch.cache,
                state,
                batch._processors,
                batch._eos_ids,
                vocabulary=batch._vocabulary,
                sampling=batch._noise is not None,
                **({"quick": self.quicker.part} if self.quicker else {}),
            )
            while state.live.any():
                if batch._noise is not None:
                    rows_left = state.live.nonzero().flatten()
                    drawn = batch._noise(rows_left.tolist(), 2 * batch._gamma + 1, batch.device)
                    state.uniforms[rows_left] = drawn
                total = rows + self.budgets[len(self.results) % len(self.budgets)]
                with self.watch or torch.no_grad(), self.quicker() if self.quicker else nullcontext():
                    result = play(total, drafting=total > rows)
                assert not result.failed.any()
                self.results.append(result)
                self.played(batch, state, result)
        length = int(state.ends.max())
        behind = torch.arange(length) >= state.ends[:, None]
        return state.text[:, :length].masked_fill(behind, batch.inputs.pad_id)

    def played(self, batch, state, result):
        """After each round; nothing here."""

    def accepted_lengths(self, row):
        return [int(result.kept[row]) for result in self.results if result.kept[row]]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss", "gpt2"])
@pytest.mark.parametrize("budgets", [(0, 3, 1, 9), (40,)], ids=str)
def test_greedy_is_plain_generation(lab, kind, budgets):
    target, (ids, mask) = lab.target(kind), ragged(3)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 21}
    plain = target.generate(ids, **options)
    eos = [int(plain[0, 15]), int(plain[2, 24])]
    for extra in ({}, {"eos_token_id": eos, "pad_token_id": 0}):
        plain = target.generate(ids, **options, **extra)
        drafter = lab.knowing(texts_of(plain, mask), block_size=4)
        loop = InStaticRounds(*budgets)
        assert torch.equal(target.generate(ids, custom_generate=loop, drafter=drafter, **options, **extra), plain)
        for result, budget in zip(loop.results, budgets, strict=False):
            ended = int((result.kept == 0).sum())  # their anchors' places go to the drafts of others
            assert int(result.sent.sum()) <= budget + ended
        assert extra or max(loop.accepted_lengths(0)) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2},
        {"do_sample": True, "eos_token_id": [7, 30, 21], "pad_token_id": 0},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_tokens_and_accepted_lengths_are_those_of_the_loop(lab, head, options):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(markov_head_type=head, markov_rank=8), ragged(4)
    config = DSparkGenerationConfig(
        dspark_loop="batched", seed=[3, 1, 4, 15], max_new_tokens=20, return_dict_in_generate=True, **options
    )
    call = {"attention_mask": mask, "generation_config": config, "drafter": drafter}
    ours = target.generate(ids, assistant_model=drafter, attention_mask=mask, generation_config=config)
    loop = InStaticRounds(4 * drafter.config.num_draft_tokens)
    assert torch.equal(target.generate(ids, custom_generate=loop, **call), ours.sequences)
    assert [loop.accepted_lengths(row) for row in range(4)] == ours.dspark.accepted_lengths


class NothingReadBack(TorchDispatchMode):
    """Fails where a value of a tensor would travel to the host, or a shape would depend on one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        assert not name.startswith(("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")), name
        if name.startswith(("aten::index.", "aten::index_put")):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 9, "temperature": 0.7}], ids=str
)
def test_nothing_is_read_back(lab, options):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(enable_confidence_head=True), ragged(3)
    loop = InStaticRounds(7, watch=NothingReadBack())
    target.generate(ids, attention_mask=mask, custom_generate=loop, drafter=drafter, max_new_tokens=9, **options)
    assert loop.results


def in_one_loop(lab, drafter, quicker, rows, budgets, **options):
    """Tokens, and accepted lengths of each row."""
    (ids, mask), loop = ragged(rows), InStaticRounds(*budgets, quicker=quicker)
    config = DSparkGenerationConfig(dspark_loop="batched", seed=list(range(rows)), max_new_tokens=20, **options)
    call = {"attention_mask": mask, "generation_config": config, "drafter": drafter}
    tokens = lab.target().generate(ids, custom_generate=loop, **call)
    return tokens.tolist(), [loop.accepted_lengths(row) for row in range(rows)]


GREEDY, DRAWN = {"do_sample": False}, {"do_sample": True, "top_k": 0}
WHOLE, CUT = (400,), (4, 7, 0)
ROUNDS = {  # sizes and options in turn, and what is built for them beside the parts of the drafter
    # the walk, the plan, the end of a round; a plan of fewer tokens than there are drafts; one row
    "greedy": ([(3, WHOLE, GREEDY), (5, CUT, GREEDY), (5, WHOLE, GREEDY)], 4),
    "sampling": ([(3, WHOLE, DRAWN), (5, CUT, DRAWN), (3, CUT, DRAWN)], 4),
    "processors": ([(3, WHOLE, DRAWN | {"top_k": 9}), (5, WHOLE, DRAWN | {"temperature": 0.7})], 2),
    "one row": ([(1, WHOLE, GREEDY), (1, CUT, GREEDY)], 4),
}


@pytest.mark.parametrize("rounds", ["greedy", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*ROUNDS][1:])])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_rounds_are_those_without_a_compiler(lab, rounds, backend):
    """Tokens and accepted lengths; and whatever the sizes, little is built."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    drafter, (calls, built) = lab.drafter(), ROUNDS[rounds]
    compiling = CompileConfig(backend=backend, fullgraph=True)
    quicker, as_they_are = (Quicker(lab.target(), drafter, None, how) for how in (compiling, None))
    for rows, budgets, options in calls:
        expected = in_one_loop(lab, drafter, as_they_are, rows, budgets, **options)
        assert in_one_loop(lab, drafter, quicker, rows, budgets, **options) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= built + 2 * len(COMPILED)


DRAFTERS = {
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no head": {"markov_rank": 0, "enable_confidence_head": False},
    "layout F": {"sample_from_anchor": False, "markov_head_type": "rnn"},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "temperatures": {"confidence_temperatures": [0.5, 1.0, 2.0, 1.5]},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_drafters_of_every_kind_are_compiled(lab, changes):
    torch.compiler.reset()
    drafter, compiling = lab.drafter(**changes), CompileConfig(backend="eager", fullgraph=True)
    if drafter.config.has_reduced_vocabulary:
        drafter.d2t[:] = torch.arange(len(drafter.d2t)) // 2
    quicker, as_they_are = (Quicker(lab.target(), drafter, None, how) for how in (compiling, None))
    for options in (GREEDY, DRAWN):
        expected = in_one_loop(lab, drafter, as_they_are, 3, CUT, **options)
        assert in_one_loop(lab, drafter, quicker, 3, CUT, **options) == expected
