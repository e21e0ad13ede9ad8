"""
Sampling in batches follows the target's law exactly: chi-square tests on five tokens, through generate.

The confidences depend much on the drafted tokens, so a scheduler that let a cut depend on what it drops would be seen.
The full product of heads, modes, schedulers and processors, 20,000 tokens each:
`pytest tests/batch/test_law.py -m slow`.
"""

import functools
import inspect
import itertools
import math

import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from tests.test_sampling_law import HEADS, LENGTH, OPTIONS, SHAPE, VOCAB, WARPERS, grouped, law_of_state
from transformers_dspark import DSparkConfig, DSparkDrafter, DSparkGenerationConfig
from transformers_dspark.batch import schedule
from transformers_dspark.scheduling import DraftGate, budget, top_k_lengths
from transformers_dspark.step_costs import DraftCost, StepCost

from .conftest import FixedTable


ROWS = 8
SCHEDULES = [("static", "lagged"), *itertools.product(("compact", "cap-accept"), ("causal", "lagged"))]
PROCESSORS = {
    "plain": ({}, []),
    **{name: ({name: value}, [warper]) for (name, value), warper in zip(OPTIONS.items(), WARPERS, strict=True)},
    "all": (OPTIONS, WARPERS),
}


@pytest.fixture(scope="module")
def target():
    """Looks at its last token only, so a few states (last token, tokens seen) make up its whole law."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1, initializer_range=0.15, eos_token_id=None))
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    return model.eval()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # Transformers inspects every processor anew at every position, which would be half of the time
    monkeypatch.setattr(inspect, "signature", functools.cache(inspect.signature))
    monkeypatch.setattr(DraftGate, "decide", lambda gate, live, cost, draft: live)  # every row drafts in every round


def drafter_for(head):
    torch.manual_seed(1)
    options = {"num_hidden_layers": 1, "block_size": LENGTH, "target_layer_ids": [0], "initializer_range": 0.15}
    config = DSparkConfig(**SHAPE, **options, **HEADS[head], enable_confidence_head=True)
    drafter = DSparkDrafter(config).eval()
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=3.0)
    return drafter


def table():
    steps = tuple(StepCost(rows, n, 0, 1 + 0.12 * n) for rows in (1, ROWS) for n in (rows, 16 * rows))
    return FixedTable(steps, (DraftCost(1, 0.05), DraftCost(ROWS, 0.05)))


def tail(target, texts, warpers):
    """Probability of so large a chi-square: the counts after each state against the processed law of that state."""
    counts = {}
    for text in texts:
        for n in range(1, len(text)):
            counts.setdefault((text[n - 1], frozenset(text[:n])), [0] * VOCAB)[text[n]] += 1
    statistic, freedom = 0.0, 0
    for state, seen in counts.items():
        law = law_of_state(target, warpers, *state)
        assert not [n for p, n in zip(law, seen, strict=True) if p == 0 and n]  # what is forbidden never appears
        groups = grouped(seen, law)
        statistic += sum((observed - expected) ** 2 / expected for observed, expected in groups)
        freedom += max(0, len(groups) - 1)
    assert freedom > 10
    return stats.chi2.sf(statistic, freedom)


def check(target, head, mode, scheduler, name, tokens):
    options, warpers = PROCESSORS[name]
    drafter, texts, accepted, sent = drafter_for(head), [], set(), set()
    prompts = torch.arange(ROWS)[:, None] % VOCAB
    for seed in itertools.count():
        config = DSparkGenerationConfig(
            verify_mode=mode,
            scheduler=scheduler,
            step_cost_table=None if mode == "static" else table(),
            do_sample=True,
            max_new_tokens=50,
            top_k=options.get("top_k", 0),
            seed=1000 * seed,
            return_dict_in_generate=True,
            **{key: value for key, value in options.items() if key != "top_k"},
        )
        out = target.generate(prompts, assistant_model=drafter, generation_config=config)
        texts += out.sequences.tolist()
        accepted |= set(itertools.chain(*out.dspark.accepted_lengths))
        sent |= set(itertools.chain(*out.dspark.verify_lengths))
        if len(texts) * 50 >= tokens:
            break
    assert {1, 2, LENGTH + 1} <= accepted  # every outcome is exercised
    assert mode == "static" or {0, 1, LENGTH} <= sent
    assert tail(target, texts, warpers) > 1e-4


FAST = [(head, *SCHEDULES[i % 5], list(PROCESSORS)[-1 - i]) for i, head in enumerate([*HEADS, *list(HEADS)[1:3]])]


@pytest.mark.parametrize(("head", "mode", "scheduler", "name"), FAST)
def test_law(target, head, mode, scheduler, name):
    check(target, head, mode, scheduler, name, 1600)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("mode", "scheduler"), SCHEDULES)
@pytest.mark.parametrize("head", HEADS)
def test_law_in_full(target, head, mode, scheduler, name):
    check(target, head, mode, scheduler, name, 20_000)


# ---- the paper's example
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coin():
    """A target that says token 0 with probability 0.7, always, and a drafter that tosses a fair coin."""
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 2}
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1, eos_token_id=None, pad_token_id=None)).eval()
    with torch.no_grad():
        layer = target.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        target.model.embed_tokens.weight[1] = target.model.embed_tokens.weight[0]
        state = target.model(torch.tensor([[0]])).last_hidden_state[0, 0]
        target.lm_head.weight[0] = state / state.square().sum() * math.log(0.7 / 0.3)
        target.lm_head.weight[1] = 0.0
    torch.testing.assert_close(target(torch.tensor([[1, 0]])).logits[0, -1].softmax(-1), torch.tensor([0.7, 0.3]))

    class Coin(DSparkDrafter):
        def unembed(self, hidden):
            return hidden.new_zeros(*hidden.shape[:2], 2)

        def _confidence_at(self, k, hidden, previous):
            # the second confidence is 0.9 behind token 0 and 0 behind token 1: the anchor's embedding tells them apart
            if k == 0:
                return torch.full((len(hidden),), 0.8)
            return 0.9 * (previous[:, 0] > 0)

    config = DSparkConfig(
        **shape, num_hidden_layers=1, block_size=2, target_layer_ids=[0], markov_rank=2, enable_confidence_head=True
    )
    drafter = Coin(config).eval()
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight[:] = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        drafter.markov_head.markov_w2.weight.zero_()
    return target, drafter


def toss(coin, scheduler, tokens=300):
    """Tokens of one long text with steps per second of 1, 0.5 and 0.45 for one, two and three tokens."""
    target, drafter = coin
    costs = FixedTable(tuple(StepCost(1, n, 0, 1 / rate) for n, rate in ((1, 1.0), (2, 0.5), (3, 0.45))))
    config = DSparkGenerationConfig(
        verify_mode="compact",
        scheduler=scheduler,
        step_cost_table=costs,
        do_sample=True,
        top_k=0,
        seed=3,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
    )
    out = target.generate(torch.tensor([[0]]), assistant_model=drafter, generation_config=config)
    return out.sequences[0, 1:].tolist(), set(out.dspark.verify_lengths[0])


@pytest.mark.parametrize("scheduler", ["causal", "lagged"])
def test_the_papers_example(coin, scheduler):
    tokens, lengths = toss(coin, scheduler)
    # one token more does not pay, whatever a second one would bring; the lagged budget knows earlier blocks only
    assert lengths == ({0} if scheduler == "causal" else {0, 1, 2})
    assert stats.binomtest(tokens.count(0), len(tokens), 0.7).pvalue > 1e-3


def test_the_example_shows_a_search_that_looks_ahead(coin, monkeypatch):
    """Without the stop, the first token is admitted only where the second would pay: 0.85 instead of 0.7."""
    monkeypatch.setattr(
        schedule, "causal_lengths", lambda now, cost, caps: top_k_lengths(now, budget(now, cost, caps), caps)
    )
    tokens, lengths = toss(coin, "causal")
    assert lengths == {0, 2}
    assert tokens.count(0) / len(tokens) > 0.75
