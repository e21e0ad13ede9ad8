"""Opening a checkpoint beside its target costs what the drafter keeps: the embedding and the head are not read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.families import SHAPE, TWINS, canonical, tensors_of, write
from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.checkpoints.forms import FORMS


MEASURE = """
import sys, time
from transformers_dspark import DSparkDrafter
import torch
DSparkDrafter.from_pretrained(sys.argv[1])  # what the first call of anything imports

def megabytes(field):
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields[field].split()[0]) / 1024

before, start = megabytes("VmRSS"), time.perf_counter()
drafter = DSparkDrafter.from_pretrained(sys.argv[2], **eval(sys.argv[3]))
state = drafter.state_dict().values()
total = sum(float(tensor.flatten()[::512].float().sum()) for tensor in state)  # every page is touched
seconds = time.perf_counter() - start
print(megabytes("VmHWM") - before, sum(t.nbytes for t in state) / 2**20, sum(t.numel() for t in state), seconds)
"""


def measured(folder: Path, options: str, tmp_path: Path) -> tuple[float, float, float, float]:
    """Peak in MB, what is kept of it, numbers kept, and seconds, of opening a folder in a fresh process."""
    twin = TWINS["DeepSpec"]
    small = write(tmp_path / "small", twin.raw, tensors_of(twin, canonical(twin)))
    words = [sys.executable, "-c", MEASURE, str(small), str(folder), options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, kept, count, seconds = map(float, done.stdout.split())
    return peak, kept, count, seconds


@pytest.mark.parametrize("options", ["{}", "{'dtype': 'float32', 'device_map': 'cpu'}"])
def test_peak_memory(options, tmp_path):
    twin, size = TWINS["DeepSpec"], 600000
    width = SHAPE["hidden_size"]
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(twin, canonical(twin)).items()}
    tensors |= {name: torch.ones(size, width).bfloat16() for name in ("embed_tokens.weight", "lm_head.weight")}
    tensors |= {f"markov_head.markov_w{i}.weight": torch.ones(size, 24).bfloat16() for i in (1, 2)}
    tensors["confidence_head.proj.weight"] = torch.ones(1, width + 24).bfloat16()
    folder = write(tmp_path / "large", twin.raw | {"vocab_size": size, "markov_rank": 24}, tensors)
    peak, kept, count, _ = measured(folder, options, tmp_path)
    assert count < 1.6 * size * width  # neither table was kept
    assert kept > 50
    # MB; the allowance is for the page cache of the file's head, and for one tensor of the file in the other dtype
    assert peak < 1.1 * kept + (8 if options == "{}" else 35)


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory) -> Path:
    """A drafter for an 8B target as it is published: 1.1 G parameters, and both tables beside them, 4.7 GB."""
    config = DSparkConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        mask_token_id=151669,
        target_layer_ids=[1, 9, 17, 25, 33],
        markov_rank=256,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DSparkDrafter(config).state_dict().items()}
    shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), torch.Size((151936, 4096)))
    pattern, folder = torch.randn(1 << 20).bfloat16(), tmp_path_factory.mktemp("eight")
    tensors = {n: pattern.repeat(-(-s.numel() // len(pattern)))[: s.numel()].view(s) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FORMS["deepspec"].config(config, torch.bfloat16)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["{}", "{'device_map': 'cpu'}", "{'dtype': 'auto', 'low_cpu_mem_usage': True}", "{'dtype': 'float32'}"]
)
def test_a_drafter_for_an_8b_target(options, eight_billion, tmp_path):
    peak, kept, count, seconds = measured(eight_billion, options, tmp_path)
    print(f"\n{options}: {seconds:.2f} s, peak {peak:.0f} MB, {kept:.0f} MB kept, {peak / kept:.3f} times as much")
    assert count == pytest.approx(1.126e9, rel=1e-3)  # neither table
    assert peak < 1.1 * kept
