"""Hidden states on disk: exactly those that were put, read while others write, and the same training with them."""

import json

import pytest
import torch

from tests.training.processes import run
from transformers_dspark import DSparkConfig
from transformers_dspark.training.held_out import target_states
from transformers_dspark.training.state_cache import FACTS_NAME, StateCache, cache_bytes, cache_facts, check_room


FACTS = {"taps": [1], "dtype": "float32", "target": "x"}


def states(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(length, 6).to(dtype), torch.randn(length, 3).to(dtype)


def same(found, given) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, given, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_put_is_what_is_read(tmp_path, dtype):
    cache = StateCache(tmp_path, FACTS)
    rows, given = [torch.arange(5), torch.arange(1)], [states(5, dtype), states(1, dtype)]
    assert cache.get(rows) == [None, None]
    cache.put(rows, given)
    assert all(map(same, cache.get(rows), given))
    assert cache.get([torch.arange(4)]) == [None]
    assert all(map(same, StateCache(tmp_path, FACTS).get(rows), given))


def test_one_reads_while_another_writes(tmp_path):
    reader, writer = StateCache(tmp_path, FACTS), StateCache(tmp_path, FACTS, process=1)
    for number in range(3):
        given = states(4 + number)
        writer.put([torch.full((4 + number,), number)], [given])
        assert same(reader.get([torch.full((4 + number,), number)])[0], given)


def test_a_half_written_entry_is_cut_away(tmp_path):
    cache, first, second = StateCache(tmp_path, FACTS), states(5), states(6)
    cache.put([torch.arange(5)], [first])
    size = cache.nbytes
    with (tmp_path / "states-00000.bin").open("ab") as data:
        data.write(b"half of an entry")
    with (tmp_path / "states-00000.jsonl").open("ab") as index:
        index.write(b'["abc", 12')
    other = StateCache(tmp_path, FACTS, process=1)  # reads past neither
    assert len(other.places) == 1
    again = StateCache(tmp_path, FACTS)
    assert again.nbytes == size
    again.put([torch.arange(6)], [second])
    assert same(other.get([torch.arange(6)])[0], second)
    assert same(again.get([torch.arange(5)])[0], first)


def test_byte_planes_compress(tmp_path):
    cache = StateCache(tmp_path, FACTS)
    values = torch.randn(200, 64).bfloat16()
    cache.put([torch.arange(200)], [(values, values)])
    assert cache.nbytes < 0.85 * 2 * values.nbytes


def test_other_states_are_refused(tmp_path, tiny):
    StateCache(tmp_path, cache_facts(tiny, [1]))
    for facts in (cache_facts(tiny, [0, 1]), cache_facts(tiny, [1]) | {"target": "other"}):
        with pytest.raises(ValueError, match="holds other hidden states"):
            StateCache(tmp_path, facts)
    (tmp_path / FACTS_NAME).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        StateCache(tmp_path, FACTS)


def test_room(tmp_path):
    config = DSparkConfig(
        hidden_size=8, num_attention_heads=2, head_dim=4, vocab_size=16, target_layer_ids=[0, 1], num_target_layers=3
    )
    assert cache_bytes(config, 100, torch.bfloat16) == 100 * 3 * 8 * 2
    check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(OSError, match="GiB are free"):
        check_room(tmp_path, 2**60)


def test_training_with_a_cache_is_training_without(tmp_path, tiny, monkeypatch):
    options = {"num_train_epochs": 2, "evaluations": None}
    plain = run(tmp_path / "plain", **options)
    calls = []

    def counted(target, ids, *rest):
        calls.append(ids.shape)
        return target_states(target, ids, *rest)

    monkeypatch.setattr("transformers_dspark.training.trainer.target_states", counted)
    for name in ("first", "second"):
        found = run(tmp_path / name, **options, state_cache=str(tmp_path / "cache"))
        assert len(found["log"]) == len(plain["log"])
        for ours, theirs in zip(found["log"], plain["log"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        # half of the steps, the first pass, run the target; another run none
        assert 0 < len(calls) <= len(plain["log"]) // 2 + 1 if name == "first" else not calls
        calls.clear()
    facts = json.loads((tmp_path / "cache" / FACTS_NAME).read_text())
    assert facts["dtype"] == "float32"
