"""Static, compact and cap-accept, under both schedulers: the same tokens, and no token sent that was not admitted."""

import itertools

import pytest
import torch

from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.scheduling import DraftGate

from .conftest import ragged, texts_of


SCHEDULED = list(itertools.product(("compact", "cap-accept"), ("causal", "lagged")))
KINDS = ["gemma2", "gpt-oss"]


def config(lab, mode, scheduler="lagged", **options):
    table = None if mode == "static" else lab.table()
    options = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True, **options}
    return DSparkGenerationConfig(verify_mode=mode, scheduler=scheduler, step_cost_table=table, **options)


def unsure(drafter, scale=6.0):
    """Makes a random confidence head say something, which depends much on the token before."""
    torch.manual_seed(2)
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=scale)
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "scheduler"), [("static", "lagged"), *SCHEDULED])
def test_greedy(lab, kind, mode, scheduler):
    target, (ids, mask) = lab.target(kind), ragged(4)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    eos = [int(free[0, 14]), int(free[2, 20])]
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=eos)
    drafter = unsure(lab.knowing(texts_of(free, mask)))
    ours = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        generation_config=config(lab, mode, scheduler, eos_token_id=eos, pad_token_id=0),
    )
    assert torch.equal(plain, ours.sequences)
    if mode != "static":
        assert len(set(itertools.chain(*ours.dspark.verify_lengths))) > 1


@pytest.mark.parametrize("scheduler", ["causal", "lagged"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_compact_and_cap_accept_agree(lab, scheduler, do_sample):
    """
    Token for token, sampling too: a round draws as many numbers whatever is sent, and neither the schedule nor the
    gate looks at what cap-accept verifies beyond the cut.
    """
    target, (ids, mask) = lab.target(), ragged(4)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    eos = [int(free[0, 14]), int(free[2, 20])]
    outs = {}
    for mode in ("compact", "cap-accept"):
        drafter = unsure(lab.knowing(texts_of(free, mask)))
        options = config(
            lab,
            mode,
            scheduler,
            do_sample=do_sample,
            temperature=0.5 if do_sample else None,
            seed=[4, 5, 6, 7],
            eos_token_id=eos,
            pad_token_id=0,
            max_new_tokens=40,
        )
        outs[mode] = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=options)
    assert torch.equal(outs["compact"].sequences, outs["cap-accept"].sequences)
    compact, cap = (outs[mode].dspark for mode in ("compact", "cap-accept"))
    assert compact.accepted_lengths == cap.accepted_lengths
    assert compact.schedule == cap.schedule
    sent = [sum(map(sum, stats.verify_lengths)) for stats in (compact, cap)]
    assert sent[0] < sent[1]


class Watch:
    """Tokens of each forward of the target, and the confidences of each block."""

    def __init__(self, target, drafter):
        self.sent, self.confidences = [], []
        self.hook = target.model.layers[0].register_forward_pre_hook(self.count)
        chain = drafter.chain

        def watched(*args, **kwargs):
            proposal = chain(*args, **kwargs)
            self.confidences.append(proposal.confidence)
            return proposal

        drafter.chain = watched

    def count(self, module, args):
        self.sent.append(args[0].shape[1])


def best_by_hand(ranked, cost, rows, stop_early):
    """Number of admitted tokens, given survivals in order of admission."""
    throughput = [rows / cost[0]]
    for count in range(1, len(ranked) + 1):
        throughput.append((rows + sum(ranked[:count])) / cost[count])
        if stop_early and throughput[-1] <= throughput[-2]:
            return count - 1
    return throughput.index(max(throughput))


def survivals(confidence, caps):
    """`(survival, position, row)` in order of admission."""
    found = []
    for row, cap in enumerate(caps):
        product = 1.0
        for k in range(cap):
            value = float(confidence[row, k])
            product *= 1.0 if value != value else value
            found.append((-product, k, row))
    return sorted(found)


@pytest.mark.parametrize("scheduler", ["causal", "lagged"])
def test_compact_sends_what_was_admitted(lab, scheduler, monkeypatch):
    """Tokens sent are anchors and windows, and the windows those that the paper's rules give for the confidences."""
    monkeypatch.setattr(DraftGate, "decide", lambda gate, live, cost, draft: live)  # every row drafts
    rows, gamma, steps = 4, 4, 24
    target, (ids, mask) = lab.target(), ragged(rows)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps)
    drafter = unsure(lab.knowing(texts_of(free, mask), block_size=gamma), scale=1.0)  # no ties
    watch = Watch(target, drafter)
    ours = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        generation_config=config(lab, "compact", scheduler, max_new_tokens=steps),
    )
    watch.hook.remove()
    stats, table = ours.dspark, lab.table()
    assert watch.sent[0] == int(mask.sum())
    left, live = [steps - 1] * rows, list(range(rows))
    unknown = torch.full((rows, gamma), float("nan"))
    history, lengths_seen = [unknown, unknown], set()
    taken = [list(lengths) for lengths in stats.verify_lengths]
    for number, confidence in enumerate(watch.confidences):
        caps = [min(gamma, left[row] - 1) for row in live]
        cost = table.curve(len(live), len(live) * gamma, 0) + table.draft_curve(len(live))[sum(map(bool, caps))]
        order = survivals(confidence, [min(cap, confidence.shape[1]) for cap in caps])
        if scheduler == "causal":
            count = best_by_hand([-s for s, _, _ in order], cost, len(live), stop_early=True)
        else:
            ranked = [-s for s, _, _ in survivals(history[0][live], caps)]
            count = max(1, best_by_hand(ranked, cost, len(live), stop_early=False))
        expected = [sum(row == place for _, _, row in order[:count]) for place in range(len(live))]
        got = [taken[row].pop(0) for row in live]
        assert got == expected
        assert watch.sent[1 + number] == len(live) + sum(got)
        lengths_seen |= set(got)
        latest = unknown.clone()
        behind = confidence[:, -1:].expand(-1, gamma - confidence.shape[1])  # not drafted: as sure as the last
        latest[live] = torch.cat((confidence, behind), dim=1)
        history = [history[1], latest]
        for row in live:
            left[row] -= stats.accepted_lengths[row][number]
        if any(left[row] == 0 for row in live) or any(min(gamma, left[row] - 1) <= 0 for row in live):
            break  # from here on some rows draft no more
    assert number > 3
    assert len(lengths_seen) > 2
    rounds = sum(len(lengths) + sum(lengths) for lengths in stats.verify_lengths)
    assert sum(watch.sent[1:]) == rounds


def test_cap_accept_sends_the_block(lab):
    target, (ids, mask) = lab.target(), ragged(3)
    drafter = unsure(lab.drafter())
    watch = Watch(target, drafter)
    options = config(lab, "cap-accept", "causal")
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=options)
    watch.hook.remove()
    assert watch.sent[1] == 3 * 5
    assert sum(watch.sent[1:]) == sum(len(n) + sum(n) for n in ours.dspark.verify_lengths)


@pytest.mark.parametrize("option", ["max_verify_tokens", "num_assistant_tokens"])
@pytest.mark.parametrize("most", [0, 2])
def test_caps(lab, option, most):
    target, (ids, mask) = lab.target(), ragged(3)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    for mode in ("static", "compact"):
        drafter, options = lab.knowing(texts_of(plain, mask)), config(lab, mode, **{option: most})
        ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=options)
        assert torch.equal(plain, ours.sequences)
        assert max(itertools.chain(*ours.dspark.verify_lengths)) == most


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_confidence_threshold(lab, mode):
    """A row's block ends before its first token of less confidence, whatever its batch mates are sure of."""
    target, (ids, mask) = lab.target(), ragged(4)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    drafter = unsure(lab.knowing(texts_of(plain, mask)))
    watch = Watch(target, drafter)
    options = config(lab, mode, "causal", assistant_confidence_threshold=0.5)
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=options)
    watch.hook.remove()
    assert torch.equal(plain, ours.sequences)
    caps = [
        (c >= 0.5).long().cumprod(dim=1).sum(dim=1).tolist() if c is not None else [0] * 4 for c in watch.confidences
    ]
    first = [lengths[0] for lengths in ours.dspark.verify_lengths]
    if mode == "static":
        assert first == caps[0]
    assert all(a <= b for a, b in zip(first, caps[0], strict=True)) or mode == "cap-accept"
    accepted = [lengths[0] - 1 for lengths in ours.dspark.accepted_lengths]
    assert all(a <= b for a, b in zip(accepted, caps[0], strict=True))
