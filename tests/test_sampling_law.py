"""Sampling with a drafter follows the target's law exactly: chi-square tests on a vocabulary of five tokens."""

import functools
import inspect
import itertools

import pytest
import torch
from scipy import stats
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.sampling import Noise, accept, draw


ROWS, VOCAB, LENGTH = 20_000, 5, 3
PROMPT = torch.tensor([[2, 0, 3, 1]])
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
CPU = torch.device("cpu")

PROCESSORS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top-k": [TopKLogitsWarper(3)],
    "top-p": [TopPLogitsWarper(0.8)],
    "min-p": [MinPLogitsWarper(0.2)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.5)],
    "all": [
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(4),
        TopPLogitsWarper(0.9),
    ],
}
HEADS = {
    "none": {"markov_rank": 0},
    "vanilla": {"markov_rank": 4},
    "gated": {"markov_rank": 4, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 4, "markov_head_type": "rnn"},
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_hidden_layers=2, initializer_range=0.15, eos_token_id=None)
    ).eval()


def drafter_for(target, head):
    torch.manual_seed(1)
    config = DSparkConfig(
        **SHAPE, num_hidden_layers=1, block_size=LENGTH, target_layer_ids=[0], initializer_range=0.15, **HEADS[head]
    )
    return DSparkDrafter(config).eval().bind_target(target)


@torch.no_grad()
def processed_target(target, processors):
    """
    The target's distribution behind every text of up to LENGTH tokens: a table for each length, `[5 ** length, 5]`.
    """
    tables = []
    for length in range(LENGTH + 1):
        texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)), dtype=torch.long).reshape(
            VOCAB**length, length
        )
        ids = torch.cat((PROMPT.expand(len(texts), -1), texts), dim=1)
        tables.append(processors(ids, target(ids).logits[:, -1].clone()).double().softmax(dim=-1))
    return tables


def index_of(tokens):
    """Row of a text `[rows, n]` in its table."""
    powers = VOCAB ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * powers).sum(dim=1)


def joint_law(tables):
    law = torch.ones(1, dtype=torch.float64)
    for table in tables[:LENGTH]:
        law = (law[:, None] * table).flatten()
    return law


@torch.no_grad()
def draft(target, drafter, processors, noise):
    """ROWS independent blocks behind the prompt."""
    states = target.model(PROMPT, output_hidden_states=True).hidden_states[1][:, :-1].expand(ROWS, -1, -1)
    context = drafter.new_context()
    positions = torch.arange(PROMPT.shape[1]).expand(ROWS, -1)
    drafter.extend_context(context, states, positions[:, :-1])
    uniforms = noise(LENGTH, ROWS, device=CPU)

    def select(k, logits, tokens):
        scores = processors(torch.cat((PROMPT.expand(ROWS, -1), tokens), dim=1), logits.clone())
        return draw(scores.softmax(dim=-1), uniforms[k]), scores

    return drafter.propose(PROMPT.expand(ROWS, -1)[:, -1], positions[:, -1], context, select=select)


def committed_texts(tables, proposal, draft_probs, noise, lengths=None):
    """Verifies once, then completes each text to LENGTH tokens from the target's own law."""
    targets = torch.stack([tables[n][index_of(proposal.tokens[:, :n])] for n in range(LENGTH + 1)], dim=1)
    verdict = accept(
        targets, draft_probs, proposal.tokens, noise(ROWS, LENGTH, device=CPU), noise(ROWS, device=CPU), lengths
    )
    texts = torch.cat((proposal.tokens, proposal.tokens[:, :1]), dim=1)
    texts[torch.arange(ROWS), verdict.accepted] = verdict.bonus
    for n in range(LENGTH):
        fresh = draw(tables[n][index_of(texts[:, :n])], noise(ROWS, device=CPU))
        texts[:, n] = torch.where(n > verdict.accepted, fresh, texts[:, n])
    return texts[:, :LENGTH], verdict


def p_value(texts, law):
    """Chi-square over all texts; those expected less than five times count as one."""
    observed = torch.bincount(index_of(texts), minlength=len(law)).double()
    expected = law * len(texts)
    assert observed[law == 0].sum() == 0  # what the processors forbid never appears
    rare = expected < 5
    cells = [torch.cat((t[~rare], t[rare].sum()[None])) for t in (observed, expected)]
    used = cells[1] > 0
    return stats.chisquare(cells[0][used].numpy(), cells[1][used].numpy()).pvalue


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("head", HEADS)
def test_law_of_committed_tokens(target, head, name):
    processors, noise = LogitsProcessorList(PROCESSORS[name]), Noise(5)
    tables = processed_target(target, processors)
    proposal = draft(target, drafter_for(target, head), processors, noise)
    texts, verdict = committed_texts(tables, proposal, proposal.logits.softmax(dim=-1), noise)
    assert 0.02 < (verdict.accepted == LENGTH).float().mean() < 0.98  # every outcome is exercised
    assert p_value(texts, joint_law(tables)) > 1e-4


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_law_when_rows_admit_different_lengths(target, head):
    noise = Noise(6)
    processors = LogitsProcessorList(PROCESSORS["temperature"])
    tables = processed_target(target, processors)
    proposal = draft(target, drafter_for(target, head), processors, noise)
    texts, _ = committed_texts(
        tables, proposal, proposal.logits.softmax(dim=-1), noise, torch.arange(ROWS) % (LENGTH + 1)
    )
    assert p_value(texts, joint_law(tables)) > 1e-4


def test_the_test_sees_a_wrong_draft_distribution(target):
    """Acceptance with other probabilities than those that drew the tokens is the classic fault."""
    noise = Noise(5)
    warped = LogitsProcessorList(PROCESSORS["temperature"])
    tables = processed_target(target, warped)
    proposal = draft(target, drafter_for(target, "vanilla"), warped, noise)
    texts, _ = committed_texts(tables, proposal, (proposal.logits * 0.7).softmax(dim=-1), noise)
    assert p_value(texts, joint_law(tables)) < 1e-6


# ---- through generate
# ------------------------------------------------------------------------------------------------

OPTIONS = {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 4, "top_p": 0.86, "min_p": 0.28}
WARPERS = [
    RepetitionPenaltyLogitsProcessor(1.3),
    TemperatureLogitsWarper(0.8),
    TopKLogitsWarper(4),
    TopPLogitsWarper(0.86),
    MinPLogitsWarper(0.28),
]


@pytest.fixture(scope="module")
def memoryless():
    """A target that looks at its last token only, so a few states (last token, tokens seen) make up its whole law."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1, initializer_range=0.15, eos_token_id=None))
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    return model.eval()


def law_of_state(target, warpers, last, seen):
    ids = torch.tensor([[*sorted(seen), last]])  # a penalty counts tokens seen, in whatever order
    with torch.no_grad():
        return LogitsProcessorList(warpers)(ids, target(ids).logits[:, -1]).softmax(dim=-1)[0].tolist()


def grouped(seen, law):
    """Counts and expected counts of one state, the smallest joined until at least five are expected in each group."""
    groups, observed, expected = [], 0, 0.0
    for p, n in sorted(zip(law, seen, strict=True)):
        observed, expected = observed + n, expected + p * sum(seen)
        if expected >= 5:
            groups.append((observed, expected))
            observed, expected = 0, 0.0
    return groups


@pytest.mark.parametrize("tokens", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", HEADS)
def test_law_through_generate(memoryless, head, tokens, monkeypatch):
    """Many short texts from the slot itself: the counts after each state follow the processed law of that state."""
    # Transformers inspects every processor anew at every position, which would be half of the time
    monkeypatch.setattr(inspect, "signature", functools.cache(inspect.signature))
    drafter, counts, accepted = drafter_for(memoryless, head), {}, []
    torch.manual_seed(7)
    while sum(map(sum, counts.values())) < tokens:
        out = memoryless.generate(
            torch.tensor([[2]]),
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=50,
            return_dict_in_generate=True,
            **OPTIONS,
        )
        accepted += out.dspark.accepted_lengths[0]
        text = out.sequences[0].tolist()
        for n in range(1, len(text)):
            counts.setdefault((text[n - 1], frozenset(text[:n])), [0] * VOCAB)[text[n]] += 1
    assert {1, 2, LENGTH + 1} <= set(accepted)  # every outcome is exercised
    statistic, freedom = 0.0, 0
    for state, seen in counts.items():
        law = law_of_state(memoryless, WARPERS, *state)
        assert not [n for p, n in zip(law, seen, strict=True) if p == 0 and n]  # what is forbidden never appears
        groups = grouped(seen, law)
        statistic += sum((observed - expected) ** 2 / expected for observed, expected in groups)
        freedom += max(0, len(groups) - 1)
    assert freedom > 10
    assert stats.chi2.sf(statistic, freedom) > 1e-4


def test_every_option_changes_the_law_through_generate(memoryless):
    states = [(last, {last, other}) for last in range(VOCAB) for other in range(VOCAB)]
    for left_out in range(len(WARPERS)):
        others = WARPERS[:left_out] + WARPERS[left_out + 1 :]
        changed = [law_of_state(memoryless, w, *state) for state in states for w in (WARPERS, others)]
        assert changed[::2] != changed[1::2], WARPERS[left_out]
