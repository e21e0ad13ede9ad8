"""
How near the kernel comes to the device's copy bandwidth, after a check against the reference.

    python benchmarks/benchmark.py [--json FILE] [--sweep] [--minutes M]

Bytes are those a step must move: keys and values that are visible, queries and the output. Each repeat reads another
cache, so that none is found in the last-level cache; times are medians over replays of a CUDA graph, in which launches
cost nothing. `--sweep` tries other constants of a launch and prints the best of each case.
"""

import argparse
import importlib.util
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

import torch
import triton


if importlib.util.find_spec("ragged_attention") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))
from ragged_attention import Tiling, default_tiling, ragged_attention, ragged_attention_reference


# rows, entries before the window, tokens of each window, query heads, key heads, head size
CASES = [
    (1, 512, 8, 32, 8, 128),
    (1, 4096, 8, 32, 8, 128),
    (1, 32768, 8, 32, 8, 128),
    (8, 4096, 8, 32, 8, 128),
    (64, 4096, None, 32, 8, 128),
    (64, 4096, 1, 32, 8, 128),
    (256, 512, None, 32, 8, 128),
    (64, 1024, None, 9, 3, 64),
    (32, 4096, None, 8, 4, 256),
]


def make(case, dtype, device, copies):
    rows, length, width, heads, kv_heads, dim = case
    generator = torch.Generator(device).manual_seed(0)
    widths = [1 + row % 8 for row in range(rows)] if width is None else [width] * rows
    capacity = length + max(widths)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

    caches = [(normal(rows, kv_heads, capacity, dim), normal(rows, kv_heads, capacity, dim)) for _ in range(copies)]
    offsets = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
    query = normal(sum(widths), heads, dim)
    moved = 2 * (rows * length + sum(widths)) * kv_heads * dim + 2 * query.numel()
    options = {"scaling": dim**-0.5, "max_width": max(widths), "max_length": length}
    return query, caches, lengths, offsets, options, moved * query.element_size()


def check(case, dtype, device):
    """Largest error against the reference, of a few rows; and whether the order of rows leaves their bits alone."""
    query, [(keys, values)], lengths, offsets, options, _ = make((min(case[0], 8), *case[1:]), dtype, device, 1)
    ours = ragged_attention(query, keys, values, lengths, offsets, **options)
    args = (query.float(), keys.float(), values.float(), lengths, offsets)
    truth = ragged_attention_reference(*args, scaling=options["scaling"])
    back = torch.arange(len(lengths) - 1, -1, -1, device=device)
    starts = offsets.tolist()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in back.tolist()]).to(device)
    widths = offsets.diff()[back]
    turned = torch.cat((offsets[:1], widths.cumsum(0).to(offsets.dtype)))
    again = ragged_attention(query[tokens], keys[back], values[back], lengths[back], turned, **options)
    return (ours.float() - truth).abs().max().item(), torch.equal(again, ours[tokens])


def seconds(run, repeats=30):
    """Median seconds of `run()` in a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[repeats // 5 :])


def copy_bandwidth(device):
    """Bytes per second, read and written, of a large copy by a kernel; a graph would leave it to the copy engines."""
    source = torch.empty(2**32, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times[2:])


def measure(case, dtype, device, tiling):
    rows, length, _, _, kv_heads, dim = case
    size = 2 * rows * length * kv_heads * dim * 2
    copies = max(2, min(64, 2**28 // size))  # 256 MiB and more: nothing stays in the last-level cache
    query, caches, lengths, offsets, options, moved = make(case, dtype, device, copies)

    def run():
        for keys, values in caches:
            ragged_attention(query, keys, values, lengths, offsets, tiling=tiling, **options)

    return seconds(run) / copies, moved


def environment():
    """What a reader needs to judge the figures or to measure them again."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None  # no git, or no checkout
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *words]),
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--sweep", action="store_true", help="try other constants, too")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin nothing new afterwards (default: 5)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "This benchmark needs a CUDA device: the interpreter's times say nothing.\n")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"{args.json}: there is no folder {args.json.parent}; make it first or name another file.")
    deadline = time.monotonic() + 60 * args.minutes
    device, dtype = torch.device("cuda"), torch.bfloat16
    peak = copy_bandwidth(device)
    print(f"copy: {peak / 1e12:.2f} TB/s on {torch.cuda.get_device_name(device)}")
    results = []
    report = {"environment": environment(), "copy_bytes_per_s": peak, "results": results}
    for case in CASES:
        if time.monotonic() > deadline:
            print(case, "left out, the time is over")
            continue
        heads, kv_heads, dim = case[3:]
        error, steady = check(case, dtype, device)
        default = default_tiling(heads // kv_heads, dim * 2)
        tilings = [default]
        if args.sweep:
            choices = product((64, 128), (8, 32, 128), (4, 8), (2, 4))
            tilings += [Tiling(default.block_m, *choice) for choice in choices]
        timed = []
        for tiling in tilings:
            try:
                timed.append((*measure(case, dtype, device, tiling), tiling))
            except Exception as problem:  # more shared memory than there is, say: another tiling's turn
                print(f"  {tiling}: {type(problem).__name__}")
        for label, (took, moved, tiling) in {"default": timed[0], "best": min(timed)}.items():
            share = moved / took / peak
            figures = f"{took * 1e6:9.1f} us {share:6.1%} of copy  error {error:.1e} steady {steady}"
            print(case, f"{label:8}", figures, tiling)
            results.append(
                {"case": case, "tiling": tiling._asdict(), "label": label, "seconds": took, "share_of_copy": share}
                | {"max_error": error, "row_bits_steady": steady}
            )
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
