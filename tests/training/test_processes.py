"""
Two processes on the CPU: the losses of one process with the same batches. They are launched with `torchrun`, which is
what `accelerate launch` runs on GPUs; on CPUs that one wants MPI.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.processes import run


ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_two_processes_are_one(tmp_path):
    ways = [{}, {"shard_target": True, "activation_checkpointing": True}]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    launch += ["-m", "tests.training.processes"]
    done = subprocess.run(
        [*launch, str(tmp_path), json.dumps(ways)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for number, way in enumerate(ways):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        assert found["processes"] == 2
        way.pop("shard_target", None)
        alone = run(tmp_path / "alone", gradient_accumulation_steps=2, **way)
        assert alone["processes"] == 1
        assert len(alone["log"]) == len(found["log"]) >= 4
        for ours, theirs in zip(found["log"], alone["log"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
