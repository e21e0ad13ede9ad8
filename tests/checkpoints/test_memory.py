"""Opening a checkpoint beside its target costs what the drafter keeps: the embedding and the head are not read."""

import json
import subprocess
import sys

import torch
from safetensors.torch import save_file

from tests.checkpoints.families import SHAPE, TWINS, canonical, tensors_of, write


MEASURE = """
import sys
from transformers_dspark import DSparkDrafter
import torch
DSparkDrafter.from_pretrained(sys.argv[1])  # what the first call of anything imports

def megabytes():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmHWM"].split()[0]) / 1024

before = megabytes()
drafter = DSparkDrafter.from_pretrained(sys.argv[2], dtype=getattr(torch, sys.argv[3]))
total = sum(float(tensor.float().sum()) for tensor in drafter.state_dict().values())  # every page is touched
kept = sum(tensor.nbytes for tensor in drafter.state_dict().values()) / 2**20
print(megabytes() - before, kept, sum(tensor.numel() for tensor in drafter.state_dict().values()))
"""


def test_peak_memory(tmp_path):
    twin, size = TWINS["DeepSpec"], 1200000
    small = write(tmp_path / "small", twin.raw, tensors_of(twin, canonical(twin)))
    raw = json.loads((small / "config.json").read_text()) | {"vocab_size": size}
    tensors = tensors_of(twin, canonical(twin))
    width = SHAPE["hidden_size"]
    tensors |= {name: torch.ones(size, width).bfloat16() for name in ("embed_tokens.weight", "lm_head.weight")}
    tensors |= {f"markov_head.markov_w{i}.weight": torch.ones(size, 6) for i in (1, 2)}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "large" / "model.safetensors")
    arguments = [str(small), str(tmp_path / "large"), "float32"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, kept, count = map(float, done.stdout.split())
    assert count < 2 * size * width  # neither table was kept
    assert kept > 50
    assert peak < 1.1 * kept + 8  # MB; the allowance is for one tensor's sum and the page cache of the file's head
