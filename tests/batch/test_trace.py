"""Records of rounds: ceilings beside those of cap-accept, files, and nothing at all where nobody asked."""

import pytest
import torch

from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.batch.trace import RoundTrace
from transformers_dspark.ceiling import CeilingWindow, acceptance_ceiling
from transformers_dspark.telemetry import read_trace

from .conftest import ragged, texts_of
from .test_modes import config, unsure


def traced(lab, mode, scheduler, callback, do_sample=False, **options):
    target, (ids, mask) = lab.target(), ragged(4)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 20} if do_sample else {}
    options = config(
        lab,
        mode,
        scheduler,
        round_callback=callback,
        seed=5,
        max_new_tokens=40,
        eos_token_id=int(free[0, 20]),
        pad_token_id=0,
        dspark_loop="batched",
        **sampling,
        **options,
    )
    drafter = unsure(lab.knowing(texts_of(free, mask)))
    return target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=options)


@pytest.mark.parametrize("scheduler", ["causal", "lagged"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_ceilings_beside_cap_accept(lab, scheduler, do_sample):
    found, late, trimmed = {}, 0, 0
    for mode in ("compact", "cap-accept"):
        records = []
        traced(lab, mode, scheduler, records.append, do_sample)
        found[mode] = {(c.row, c.round): c for record in records for c in record.ceilings}
        late += mode == "compact" and sum(c.round < r.round for r in records for c in r.ceilings)
        trimmed += sum(
            taken == good < drafted
            for r in records
            for drafted, taken, good in zip(r.drafted, r.sent, r.accepted, strict=True)
        )
        blocks = {(row, r.round) for r in records for row, n in zip(r.rows, r.drafted, strict=True) if n}
        assert found[mode].keys() == blocks  # each block is settled, and counted once
    compact, exact = found["compact"], found["cap-accept"]
    assert compact.keys() == exact.keys()
    assert all(c.lower == c.upper for c in exact.values())
    assert trimmed
    assert late or scheduler == "lagged"  # trimmed blocks of which later rounds had to tell
    if not do_sample:  # one-hot distributions leave nothing to chance
        assert all(c.lower <= exact[key].lower <= c.upper for key, c in compact.items())
    mean = {name: sum(getattr(c, name) for c in compact.values()) / len(compact) for name in ("lower", "upper")}
    true = sum(c.lower for c in exact.values()) / len(exact)
    chance = 0.5 if do_sample else 0.0  # the bounds are those of an expectation
    assert mean["lower"] - chance <= true <= mean["upper"] + chance


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_a_file_holds_the_same(lab, tmp_path, mode):
    path, window, records = tmp_path / "rounds.jsonl", CeilingWindow(8), []
    traced(lab, mode, "causal", path, do_sample=True)
    out = traced(lab, mode, "causal", records.append, do_sample=True)
    for record in records:
        window.add(record)
    read = list(read_trace(path))
    assert acceptance_ceiling(read, 8) == window.bounds is not None
    clock = ("draft_seconds", "verify_seconds")
    plain = [[{k: v for k, v in r.to_dict().items() if k not in clock} for r in some] for some in (read, records)]
    assert str(plain[0]) == str(plain[1])
    assert len(records) == out.dspark.rounds
    assert sum(sum(r.committed) for r in records) == sum(map(sum, out.dspark.accepted_lengths))
    assert all(r.tokens == len(r.rows) + sum(r.sent) and r.budget <= sum(r.sent) for r in records)
    assert all(r.predicted_verify_seconds is not None for r in records) == (mode == "compact")


def test_the_text_stays_and_off_does_nothing(lab, monkeypatch):
    records = []
    asked = traced(lab, "compact", "lagged", records.append, do_sample=True)
    assert records
    calls = []
    monkeypatch.setattr(RoundTrace, "__init__", lambda *args: calls.append(args))
    unasked = traced(lab, "compact", "lagged", None, do_sample=True)
    assert torch.equal(asked.sequences, unasked.sequences)
    assert not calls


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"round": 1}\n')
    with pytest.raises(ValueError, match="line 1: no record of a round"):
        list(read_trace(path))


def test_the_option(tmp_path):
    records = []
    options = DSparkGenerationConfig(round_callback=records.append)
    options.save_pretrained(tmp_path)
    assert DSparkGenerationConfig.from_pretrained(tmp_path).round_callback is None
    with pytest.raises(ValueError, match="round_callback=3 must be"):
        DSparkGenerationConfig(round_callback=3)


def test_a_single_prompt_is_recorded_as_well(lab):
    """Its loop is chosen for the callback; the one that has no records is refused, not left silent."""
    target, drafter, records = lab.target(), lab.drafter(), []
    options = {"round_callback": records.append, "max_new_tokens": 9, "do_sample": False}
    prompt = torch.tensor([[5, 17, 3]])
    out = target.generate(
        prompt,
        assistant_model=drafter,
        generation_config=DSparkGenerationConfig(**options, return_dict_in_generate=True),
    )
    assert [record.committed for record in records] == [[n] for n in out.dspark.accepted_lengths[0]]
    own = DSparkGenerationConfig(**options, dspark_loop="transformers")
    with pytest.raises(ValueError, match="round_callback is called by the batched loop alone"):
        target.generate(prompt, assistant_model=drafter, generation_config=own)
