"""What a table of step costs says between, at and beyond its measurements, and which files and targets it takes."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_dspark import StepCostTable
from transformers_dspark.step_costs import DraftCost, StepCost


def measured(seconds=lambda rows, tokens, context: 1.0 + rows / 10 + tokens / 4 + context / 1000, **options):
    """A table of an additive machine, measured over rows x tokens a row x contexts."""
    steps = [
        StepCost(rows, rows * width, context, seconds(rows, rows * width, context))
        for rows, width, context in product((1, 4, 16), (1, 2, 4, 8), (0, 500))
    ]
    return StepCostTable(steps, **options)


def tiny_target(**sizes) -> LlamaForCausalLM:
    options = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**options, **heads, **sizes})).eval()


def test_measured_points_come_back() -> None:
    table = measured()
    for cost in table.steps:
        assert table.predict(cost.rows, cost.tokens, cost.context) == pytest.approx(cost.seconds)


def test_between_points_it_is_linear_and_beyond_them_it_continues() -> None:
    table = measured()
    assert table.predict(4, 10, 250) == pytest.approx(1.0 + 0.4 + 2.5 + 0.25)
    assert table.predict(4, 10, 2000) == pytest.approx(1.0 + 0.4 + 2.5 + 2.0)  # context
    assert table.predict(16, 200, 0) == pytest.approx(1.0 + 1.6 + 50)  # tokens
    assert table.predict(8, 24, 0) == pytest.approx(1.0 + 0.8 + 6)  # rows
    assert table.predict(64, 64, 0) == pytest.approx(1.0 + 1.6 + 16)  # more rows than measured count as the most


def test_a_curve_follows_its_neighbour_where_it_was_not_measured() -> None:
    """Sixteen rows have no step of eight tokens, one row has none of sixty-four; both exist between."""
    table = measured(lambda rows, tokens, context: max(1.0, tokens / 16))  # flat, then compute-bound
    for rows, tokens in ((8, 8), (8, 16), (2, 2)):
        assert table.predict(rows, tokens, 0) == pytest.approx(1.0)
    assert table.predict(2, 128, 0) == pytest.approx(8.0)
    assert (np.diff(table.curve(8, 200, 0)) >= 0).all()


def test_many_totals_at_once() -> None:
    table = measured()
    curve = table.curve(4, 28, 100)
    assert curve.shape == (29,)
    assert curve.dtype == np.float64
    assert curve.tolist() == pytest.approx([table.predict(4, 4 + k, 100) for k in range(29)])


def test_totals_round_up_on_a_staircase() -> None:
    steps = [StepCost(1, tier, 0, float(tier)) for tier in (4, 8, 16)]
    table = StepCostTable(steps, staircase=True)
    assert table.predict(1, np.arange(1, 19), 0).tolist() == [4] * 4 + [8] * 4 + [16] * 8 + [17, 18]
    assert StepCostTable(steps).predict(1, 6, 0) == 6


def test_a_longer_context_is_never_cheaper() -> None:
    table = StepCostTable([StepCost(1, 1, 10, 2.0), StepCost(1, 1, 500, 1.9)])
    assert table.predict(1, 1, 300) == table.predict(1, 1, 5000) == 2.0


def test_drafts() -> None:
    table = measured(drafts=[DraftCost(1, 0.1), DraftCost(4, 0.4)])
    assert table.draft_curve(6).tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert measured().draft_curve(2).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [StepCost(0, 1, 0, 1.0)],
        [StepCost(1, 0, 0, 1.0)],
        [StepCost(1, 1, -1, 1.0)],
        [StepCost(1, 1, 0, 0.0)],
        [StepCost(1, 1, 0, float("nan"))],
        [StepCost(1, 1, 0, float("inf"))],
        [StepCost(1, 1, 0, 5e-324)],
        [StepCost(1, 1, 0, 1e300)],
    ],
)
def test_tables_that_cannot_be(steps) -> None:
    with pytest.raises(ValueError, match=r"must be|at least one"):
        StepCostTable(steps)


def test_a_saved_table_is_the_same(tmp_path) -> None:
    file = tmp_path / "costs.json"
    table = measured(
        drafts=(DraftCost(1, 0.1, 0.5),), staircase=True, target={"id": "a/b", "dtype": "float32"}, measured={"x": 1}
    )
    table.save(file)
    loaded = StepCostTable.load(file)
    assert loaded.to_dict() == table.to_dict()
    assert loaded.predict(5, 17, 300) == table.predict(5, 17, 300)
    assert len(loaded.unstable) == json.loads(file.read_text())["unstable"] == 1


@pytest.mark.parametrize(("rows", "tokens"), [(1.5, 2), (1, float("nan")), (10**30, 2)])
def test_counts_are_whole_numbers(rows, tokens) -> None:
    with pytest.raises(ValueError, match="whole numbers from 1 on"):
        StepCostTable([StepCost(rows, tokens, 0, 1.0)])


def test_a_step_is_measured_once() -> None:
    with pytest.raises(ValueError, match="one step for each number of rows, tokens and context"):
        StepCostTable([StepCost(1, 1, 0, 1.0), StepCost(1, 2, 0, 1.0), StepCost(1, 1, 0, 2.0)])


def test_a_refresh_stays_in_range() -> None:
    table = StepCostTable([StepCost(1, 1, 0, 1e-9), StepCost(1, 9, 0, 1.0)])
    assert table.refreshed(1, 9, 0, 0.5).predict(1, 1, 0) == 1e-9


def test_a_draft_is_measured_once() -> None:
    with pytest.raises(ValueError, match="one draft for each number of rows"):
        StepCostTable([StepCost(1, 1, 0, 1.0)], [DraftCost(1, 1.0), DraftCost(1, 2.0)])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "", "[]", "{}", '{"format": "dspark-step-costs"}', '{"bias_seconds": 1}', "3"]
)
def test_files_that_hold_no_table(tmp_path, text) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json is no table of step costs .* `dspark profile`"):
        StepCostTable.load(file)


def test_sglangs_additive_form(tmp_path) -> None:
    form = {
        "bias_seconds": 0.01,
        "bs_probes": [1, 8, 32],
        "alpha_seconds": [0.0, 0.001, 0.004],
        "m_probes": [1, 16, 64, 256],
        "theta_seconds": [0.0, 0.002, 0.003, 0.02],
    }
    file = tmp_path / "sps.json"
    file.write_text(json.dumps(form))
    table = StepCostTable.load(file)
    for rows, budget in product((1, 3, 8, 20, 32), (0, 5, 40, 200)):
        alpha = np.interp(rows, form["bs_probes"], form["alpha_seconds"])
        theta = np.interp(rows + budget, form["m_probes"], form["theta_seconds"])
        assert table.curve(rows, 200, context=700)[budget] == pytest.approx(0.01 + alpha + theta)
    file.write_text(json.dumps({**form, "m_probes": [1, 16, 16, 256]}))
    with pytest.raises(ValueError, match="m_probes must rise"):
        StepCostTable.load(file)


def test_sglangs_one_dimensional_form(tmp_path) -> None:
    file = tmp_path / "sps.json"
    file.write_text(
        '{"sample_batch_tokens": [8, 16, 32], "sample_steps_per_sec": [100.0, 50.0, 40.0], "max_batch_tokens": 64}'
    )
    table = StepCostTable.load(file)
    assert [table.predict(rows, 16, 0) for rows in (1, 4)] == [pytest.approx(0.02)] * 2
    assert table.predict(2, 24, 0) == pytest.approx((0.02 + 0.025) / 2)
    assert table.predict(2, 1, 0) == pytest.approx(0.01)


def test_measured_rounds_refresh_a_table() -> None:
    table = fresh = measured()
    before = fresh.predict(4, 16, 250)
    for _ in range(100):
        table = table.refreshed(4, 16, 250, 1.5 * before)
    assert table.predict(4, 16, 250) == pytest.approx(1.5 * before, rel=0.05)
    assert table.predict(1, 1, 0) > 1.1 * fresh.predict(1, 1, 0)  # a slower machine is slower everywhere
    jolted = fresh.refreshed(4, 16, 250, 1000 * before)
    assert jolted.predict(4, 16, 250) < 1.2 * before
    assert fresh.predict(4, 16, 250) == before
    with pytest.raises(ValueError, match="seconds=0"):
        fresh.refreshed(4, 16, 250, 0)


def test_what_a_total_takes_beside_the_others_is_its_own() -> None:
    """A step of a tile more: what is true of all steps comes first, and what is not settles on the total itself."""
    steps = [StepCost(rows, rows * width, 0, rows * width) for rows in (8, 64) for width in range(1, 9)]
    table = StepCostTable(steps)
    for _ in range(20):
        table = table.refreshed(64, 512, 0, 512.0)
    for _ in range(20):
        table = table.refreshed(64, 384, 0, 1.2 * 384)
    assert table.predict(64, 384, 0) == pytest.approx(1.2 * 384, rel=0.02)
    assert table.predict(64, 512, 0) == pytest.approx(512, rel=0.1)
    for _ in range(30):
        for width, factor in ((8, 1.0), (6, 1.2), (4, 1.0)):
            table = table.refreshed(64, 64 * width, 0, factor * 64 * width)
    found = [table.predict(64, 64 * width, 0) / (64 * width) for width in (8, 7, 6, 5, 4, 3)]
    assert found == pytest.approx([1.0, 1.0, 1.2, 1.0, 1.0, 1.0], abs=0.06)
    between = table.refreshed(64, 416, 0, 2 * 416)
    assert between.predict(64, 416, 0) > table.predict(64, 416, 0)
    assert between.to_dict() == table.to_dict() == StepCostTable(steps).to_dict()  # what was measured stays


def test_measured_drafts_refresh_a_table() -> None:
    table = measured().refreshed_draft(4, 0.4)
    assert table.draft_curve(4).tolist() == pytest.approx([0.0, 0.4, 0.4, 0.4, 0.4])
    for _ in range(60):
        table = table.refreshed_draft(4, 0.6)
    assert table.draft_curve(4)[-1] == pytest.approx(0.6, rel=0.01)


def test_a_table_of_another_target_is_refused() -> None:
    target = tiny_target()
    target.config.name_or_path = "org/tiny"
    facts = {"id": "/somewhere/tiny", "hidden_size": 16, "dtype": "float32", "device": "cpu"}
    measured(target=facts).check_target(target)
    measured().check_target(target)  # a foreign form does not say whose it is
    for name, value in {"id": "org/other", "hidden_size": 32, "dtype": "bfloat16", "device": "cuda"}.items():
        with pytest.raises(ValueError, match=f"another target: it has {name} .*`dspark profile`"):
            measured(target={**facts, name: value}).check_target(target)


def test_a_profile_of_a_real_forward() -> None:
    target, calls = tiny_target(), []
    table = StepCostTable.profile(
        target, rows=(1, 2), tokens_per_row=(1, 3), context=(4, 8), samples=2, progress=lambda: calls.append(1)
    )
    points = {(cost.rows, cost.tokens, cost.context) for cost in table.steps}
    assert points == {(r, r * w, c) for r in (1, 2) for w in (1, 3) for c in (4, 8)}
    assert len(calls) == len(table.steps) == 8
    table.check_target(target)
    assert table.measured["versions"]["torch"]
    with pytest.raises(ValueError, match="hidden_size 16, not 24"):
        table.check_target(tiny_target(hidden_size=24))


@pytest.mark.parametrize("options", [{"rows": (0,)}, {"tokens_per_row": ()}, {"context": (0, 5)}, {"context": (64,)}])
def test_profiles_that_cannot_be(options) -> None:
    with pytest.raises(ValueError, match=r"at least 1|positions"):
        StepCostTable.profile(tiny_target(), **options)
