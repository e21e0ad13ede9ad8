"""`import transformers_dspark` stays cheap."""

import importlib
import json
import statistics
import subprocess
import sys

import pytest

import transformers_dspark


MEASURE = """
import json, sys, time
import transformers
before = set(sys.modules)
start = time.process_time()
import transformers_dspark
added = time.process_time() - start
print(json.dumps({"added": added, "new": sorted(set(sys.modules) - before)}))
"""
BASELINE = """
import time
start = time.process_time()
import transformers
print(time.process_time() - start)
"""


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_neither_torch_nor_triton() -> None:
    loaded = {name.partition(".")[0] for name in json.loads(fresh(MEASURE))["new"]}
    assert not loaded & {"torch", "triton", "peft", "accelerate", "rich", "tokenizers", "safetensors"}


def test_import_alone_loads_no_torch() -> None:
    loaded = fresh("import sys, transformers_dspark; print(*sys.modules)").split()
    assert not {"torch", "triton"} & set(loaded)


def test_import_adds_at_most_a_fifth() -> None:
    # Processor time of both, taken in turn: a busy machine slows them alike and the medians keep their proportion.
    added, baseline = [], []
    for _ in range(3):
        added.append(json.loads(fresh(MEASURE))["added"])
        baseline.append(float(fresh(BASELINE)))
    assert statistics.median(added) <= 0.2 * statistics.median(baseline)


@pytest.mark.parametrize("name", sorted(transformers_dspark.__all__))
def test_public_names_are_there(name: str) -> None:
    assert getattr(transformers_dspark, name) is not None
    assert name in dir(transformers_dspark)


@pytest.mark.parametrize("name", ["DSparkDrafter", "DSparkCandidateGenerator"])
def test_public_names_come_first(name: str) -> None:
    """In a fresh process, where our modules load Transformers' and its hooks in turn ask for ours."""
    fresh(f"from transformers_dspark import {name}; from transformers import AutoModel, AutoModelForCausalLM")


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DSparkTarget'"):
        importlib.import_module("transformers_dspark").DSparkTarget  # noqa: B018 (reading it is the test)
