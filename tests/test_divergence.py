"""The report of divergences: sound loops have near-ties at most."""

import pytest
import torch

from tests.batch.conftest import BatchLab, ragged, texts_of
from transformers_dspark.divergence import DivergenceReport, check_greedy, ulp


@pytest.fixture(scope="module")
def lab() -> BatchLab:
    return BatchLab()


def report(lab: BatchLab, dtype: torch.dtype) -> DivergenceReport:
    target = lab.target().to(dtype)
    ids, mask = ragged(3)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    drafter = lab.knowing(texts_of(target.generate(ids, **options), mask)).to(dtype)
    out = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
    return check_greedy(target, ids, out.sequences, [1 + sum(row) for row in out.dspark.accepted_lengths], mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_loops_have_no_defect(lab, dtype) -> None:
    assert report(lab, dtype).verdict in ("equal", "near-tie")


def test_unit_in_the_last_place() -> None:
    assert ulp(torch.tensor([-20.0, float("-inf"), 3.0]), torch.bfloat16) == 0.125
    assert ulp(torch.tensor([1.0]), torch.float32) == torch.finfo(torch.float32).eps
