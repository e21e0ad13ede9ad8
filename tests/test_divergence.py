"""The report of divergences: a sound loop has near-ties at most, and a fault in it is a defect, whatever its kind."""

import pytest
import torch
from transformers import LogitsProcessorList

import transformers_dspark
from tests.batch.conftest import BatchLab, ragged, texts_of
from transformers_dspark import DSparkGenerationConfig, decoding
from transformers_dspark.cache import RaggedCache, RaggedLayer
from transformers_dspark.decoding import accept_greedy as sound_accept
from transformers_dspark.divergence import DivergenceReport, check_greedy, ulp
from transformers_dspark.sampling import Verdict
from transformers_dspark.target import TargetTaps
from transformers_dspark.windows import VerifyWindow


@pytest.fixture(scope="module")
def lab() -> BatchLab:
    return BatchLab()


def report(lab: BatchLab, dtype: torch.dtype, plant) -> DivergenceReport:
    """Of a call for ragged rows, of which one ends early, with a drafter that is often right."""
    target = lab.target().to(dtype)
    ids, mask = ragged(4)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 24}
    plain = target.generate(ids, **options)
    options |= {"eos_token_id": int(plain[1, 14]), "pad_token_id": 0}
    drafter = lab.knowing(texts_of(plain, mask), block_size=4).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        out = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
    return check_greedy(target, ids, out.sequences, [1 + sum(row) for row in out.dspark.accepted_lengths], mask)


def one_more_is_accepted(patch):
    def accept(choices, tokens, admitted):
        accepted = torch.minimum(sound_accept(choices, tokens, admitted).accepted + 1, admitted)
        return Verdict(accepted, choices.gather(1, accepted[:, None])[:, 0])

    patch.setattr(decoding, "accept_greedy", accept)


def the_bonus_is_the_first_positions(patch):
    def accept(choices, tokens, admitted):
        return sound_accept(choices, tokens, admitted)._replace(bonus=choices[:, 0])

    patch.setattr(decoding, "accept_greedy", accept)


def the_bonus_is_another_rows(patch):
    def accept(choices, tokens, admitted):
        verdict = sound_accept(choices, tokens, admitted)
        return verdict._replace(bonus=verdict.bonus.roll(1))

    patch.setattr(decoding, "accept_greedy", accept)


def in_rounds(patch, change):
    """Changes the positions of tokens in every round but not for the prompts."""
    step = TargetTaps.step

    def planted(taps, ids, positions, window, *args, **kwargs):
        if not window.certain:
            positions = change(positions, window)
        return step(taps, ids, positions, window, *args, **kwargs)

    patch.setattr(TargetTaps, "step", planted)


def positions_are_one_ahead(patch):
    in_rounds(patch, lambda positions, window: positions + 1)


def positions_of_a_window_stand_still(patch):
    in_rounds(patch, lambda positions, window: positions - window.offsets)


def a_token_sees_the_one_behind_it(patch):
    visible = VerifyWindow.visible

    def planted(window, sliding_window):
        seen = visible(window, sliding_window).clone()
        seen[..., 1:] |= visible(window, sliding_window)[..., :-1]
        return seen

    patch.setattr(VerifyWindow, "visible", planted)


def anchors_leave_no_keys(patch):
    write = RaggedLayer._write_packed

    def planted(layer, keys, values, window):
        old = layer.keys.clone()
        found = write(layer, keys, values, window)
        first = (window.offsets == 0) & (window.columns > 0)
        layer.keys[window.rows[first], :, window.columns[first]] = old[window.rows[first], :, window.columns[first]]
        return found

    patch.setattr(RaggedLayer, "_write_packed", planted)


def rows_that_end_swap_no_entries(patch):
    def planted(cache, first, second):
        cache.context.swap_rows(first, second)

    patch.setattr(RaggedCache, "swap_rows", planted)


FAULTS = [
    one_more_is_accepted,
    the_bonus_is_the_first_positions,
    the_bonus_is_another_rows,
    positions_are_one_ahead,
    positions_of_a_window_stand_still,
    a_token_sees_the_one_behind_it,
    anchors_leave_no_keys,
    rows_that_end_swap_no_entries,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_a_defect(lab, dtype, fault) -> None:
    assert report(lab, dtype, fault).verdict == "defect"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sound_loop_has_no_defect(lab, dtype) -> None:
    found = report(lab, dtype, lambda patch: None)
    assert found.verdict in (("equal",) if dtype == torch.float32 else ("equal", "near-tie"))
    assert sum(row.tokens for row in found.rows) > 40


def test_taps_of_another_layer_cost_acceptance_and_nothing_else(lab) -> None:
    def plant(patch):
        read = TargetTaps.read
        patch.setattr(TargetTaps, "read", lambda *args: read(*args).flip(-1))

    assert report(lab, torch.float32, plant).verdict == "equal"


def test_unit_in_the_last_place() -> None:
    assert ulp(torch.tensor([-20.0, float("-inf"), 3.0]), torch.bfloat16) == 0.125
    assert ulp(torch.tensor([1.0]), torch.float32) == torch.finfo(torch.float32).eps


class Alternating:
    """Keeps state: forbids another token at every second step of a text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, 5 + self.calls % 2] = float("-inf")
        return scores


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("door", ["slot", "custom_generate"])
def test_the_report_comes_with_the_output(lab, rows, door) -> None:
    target, drafter, (ids, mask) = lab.target().float(), lab.drafter(), ragged(rows)
    config = DSparkGenerationConfig(
        report_divergence=True,
        return_dict_in_generate=True,
        max_new_tokens=9,
        repetition_penalty=1.3,
        do_sample=False,
    )
    given = {"assistant_model": drafter}
    if door == "custom_generate":
        given = {"custom_generate": transformers_dspark.generate, "drafter": drafter}
    processors = LogitsProcessorList([Alternating()])
    out = target.generate(ids, attention_mask=mask, generation_config=config, logits_processor=processors, **given)
    assert out.divergence.verdict == "equal"
    assert [row.tokens for row in out.divergence.rows] == [9] * rows
    blind = check_greedy(target, ids, out.sequences, [9] * rows, mask)  # to what the processors did
    assert blind.verdict == "defect"


@pytest.mark.parametrize("options", [{"do_sample": True, "return_dict_in_generate": True}, {"do_sample": False}])
def test_a_report_that_cannot_be(lab, options) -> None:
    config = DSparkGenerationConfig(report_divergence=True, max_new_tokens=4, **options)
    with pytest.raises(ValueError, match="report_divergence=True compares greedy texts"):
        lab.target().generate(ragged(1)[0], assistant_model=lab.drafter(), generation_config=config)
