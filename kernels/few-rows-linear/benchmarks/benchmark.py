"""
How near the kernel comes to the device's copy bandwidth, and to cuBLAS, after checks of its errors and of its bits.

    python benchmarks/benchmark.py [--json FILE] [--sweep FILE] [--minutes M]

Bytes are those a product must move: the weight, the states and the output. Each repeat reads another copy of the
weight, so that none is found in the last-level cache; times are medians over replays of a CUDA graph. In it the
products follow each other without a gap, as those of queries, keys and values do; the column "after others" is for
products that begin only when the kernel before has ended, as behind most other kernels. `--sweep` first tries other
constants with 8 and with 64 tokens, and writes the best of every shape to FILE, in the form of `tuned.json`.
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
import torch.nn.functional as F
import triton


if importlib.util.find_spec("few_rows_linear") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))
from few_rows_linear import Tiling, few_rows_linear
from few_rows_linear.kernel import NARROW, tilings_for


# rows and columns of the weight, and where it stands: Qwen3-8B, and a drafter for it
SHAPES = {
    (4096, 4096): "q, o",
    (1024, 4096): "k, v",
    (6144, 4096): "q, k and v together",
    (12288, 4096): "gate, up",
    (24576, 4096): "gate and up together",
    (4096, 12288): "down",
    (4096, 20480): "drafter fc",
    (10240, 4096): "k and v of five drafter layers together",
    (151936, 256): "Markov head",
    (151936, 4096): "head",
}
TOKENS = (1, 8, 16, 32, 64)
SWEPT = (8, 64)  # tokens; one number for each tiling of a pair
COPIES_BYTES = 2**28  # of a weight, all together: several times the last-level cache


def candidates(features, size, item_size=2):
    """Lists of tilings for 8 and for 64 tokens, in groups that share what bits depend on."""
    rows = -(-features // 64)
    splits = sorted({max(1, min(round(count / rows), size // 256)) for count in (132, 264, 396)})
    narrow = [(64, 4, 100), (64, 4, 72), (128, 4, 100)]
    wide = [(128, 8, 200), (128, 4, 110), (256, 8, 200)]
    groups = [(split, block_k, narrow, wide) for split, block_k in product(splits, (64, 128))]
    # smaller tiles need fewer splits, and where none is left no second kernel
    for block_n in (32, 16):
        split = max(1, min(round(132 * block_n / features), size // 256))
        if features <= 12288 and split < splits[-1]:
            groups.append((split, 128, [(block_n, 4, 100)], [(block_n, 4, 200)]))
    for split, block_k, *kinds in groups:
        fitting = []
        for tokens, kind in zip(SWEPT, kinds):
            tilings = [Tiling(split, block_k, *rest) for rest in kind]
            # with three stages only one is on its way, unless a split has no more
            stages = [tiling.stages(max(16, tokens), size, item_size) for tiling in tilings]
            enough = min(4, size // (block_k * split) + 1)
            fitting.append([tiling for tiling, count in zip(tilings, stages) if count >= enough])
        yield fitting


def normal(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.bfloat16, device="cuda")


def copies_of(features, size):
    count = max(2, -(-COPIES_BYTES // (features * size * 2)))
    return [normal(features, size, seed=seed) for seed in range(count)]


def seconds(run, repeats=15):
    """Median seconds of `run()` in a CUDA graph."""
    run()
    torch.cuda.synchronize()
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


def time_of(layer, states, weights, **options):
    """Seconds of one product."""

    def run():
        for weight in weights:
            layer(states, weight, **options)

    return seconds(run) / len(weights)


def copy_bandwidth():
    """Bytes per second, read and written, of a large copy by a kernel; a graph would leave it to the copy engines."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times[2:])


def moved(features, size, tokens):
    return 2 * (features * size + tokens * (features + size))


def check(weight, tilings=None):
    """Largest error of the kernel and of cuBLAS against float64, and whether a token keeps its bits among fewer."""
    states = normal(64, weight.shape[1], seed=1)
    truth = torch.cat([states.double() @ part.double().t() for part in weight.split(2**14)], 1)
    ours = few_rows_linear(states, weight, tilings=tilings)
    errors = [(made.double() - truth).abs().max().item() for made in (ours, F.linear(states, weight))]
    counts = (1, 8, 15, 16, 17, 32, 33)
    steady = all(torch.equal(few_rows_linear(states[:n], weight, tilings=tilings), ours[:n]) for n in counts)
    return {"max_error": errors[0], "cublas_max_error": errors[1], "token_bits_steady": steady}


def correct(checked):
    return checked["max_error"] <= 2 * checked["cublas_max_error"] and checked["token_bits_steady"]


def sweep(shape, deadline, tried):
    """
    The quickest pair that passes the checks; both of a group, as they must keep the same bits. `tried` gets all times.
    """
    weights = copies_of(*shape)
    states = {tokens: normal(tokens, shape[1]) for tokens in SWEPT}
    pairs = []
    for group in [
        [[tiling] for tiling in tilings_for(*weights[0].shape, weights[0].element_size())],
        *candidates(*shape),
    ]:
        if time.monotonic() > deadline:
            break
        best = []
        for tokens, tilings in zip(SWEPT, group):
            timed = []
            for tiling in tilings:
                try:
                    took = time_of(few_rows_linear, states[tokens], weights, tilings=(tiling, tiling))
                    timed.append((took, tiling))
                    tried.append({"shape": shape, "tokens": tokens, "seconds": took, "tiling": tiling._asdict()})
                except Exception as problem:  # more shared memory than there is, say: another tiling's turn
                    print(f"  {tiling}: {type(problem).__name__}: {problem}"[:160])
            best += sorted(timed)[:1]
        if len(best) == len(SWEPT):
            pairs.append((sum(took for took, _ in best), [took for took, _ in best], tuple(t for _, t in best)))
    for _, took, pair in sorted(pairs):
        if correct(check(weights[0], pair)):
            print(f"{shape}, microseconds with {SWEPT} tokens:", *(f"{one * 1e6:.2f}" for one in took))
            print(*pair, sep="\n", flush=True)
            return pair
        print(f"  {pair}: fails the checks")
    return None


def measure(shape, peak, tuned):
    """The rows of a shape's results."""
    weights = copies_of(*shape)
    pair = tuned.get(shape) or tilings_for(*weights[0].shape, weights[0].element_size())
    checked = check(weights[0], pair)
    errors = f"error {checked['max_error']:.2e}, cuBLAS {checked['cublas_max_error']:.2e}"
    steady = "steady" if checked["token_bits_steady"] else "NOT those of fewer tokens"
    print(f"{SHAPES[shape]}: {shape}, {errors}, bits {steady}")
    for tokens in TOKENS:
        states = normal(tokens, shape[1])
        ours = time_of(few_rows_linear, states, weights, tilings=pair)
        after = time_of(few_rows_linear, states, weights, tilings=pair, early=False)
        cublas = time_of(F.linear, states, weights)
        ideal = moved(*shape, tokens) / peak
        print(
            f"  {tokens:3} tokens: kernel {ours * 1e6:8.2f} us, {ideal / ours:6.1%} of copy; "
            f"after others {ideal / after:6.1%}; cuBLAS {cublas * 1e6:8.2f} us, {ideal / cublas:6.1%}",
            flush=True,
        )
        yield {
            "shape": shape,
            "tokens": tokens,
            "seconds": ours,
            "seconds_after_others": after,
            "cublas_seconds": cublas,
            "share_of_copy": ideal / ours,
            "share_of_copy_after_others": ideal / after,
            "cublas_share_of_copy": ideal / cublas,
            "tiling": pair[tokens > NARROW]._asdict(),
        } | checked


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
    parser.add_argument("--sweep", type=Path, help="file for the best constants, in the form of tuned.json")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin nothing new afterwards (default: 5)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "This benchmark needs a CUDA device: the interpreter's times say nothing.\n")
    for path in (args.json, args.sweep):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}; make it first or name another file.")
    begun = time.monotonic()
    deadline = begun + 60 * args.minutes
    device = torch.cuda.get_device_name()
    peak = copy_bandwidth()
    print(f"copy: {peak / 1e12:.2f} TB/s on {device}", flush=True)
    tried, results, tuned = [], [], {}
    report = {
        "environment": environment(),
        "copy_bytes_per_s": peak,
        "results": results,
        "tried": tried,
    }
    if args.sweep:
        # the table that follows takes a third of the time at most
        found = {shape: sweep(shape, begun + 40 * args.minutes, tried) for shape in SHAPES}
        tuned = {shape: pair for shape, pair in found.items() if pair is not None}
        entries = {"{}x{}x2".format(*shape): [t._asdict() for t in pair] for shape, pair in tuned.items()}
        args.sweep.write_text(json.dumps({"device": device, "tilings": entries}, indent=1) + "\n")
        print(f"sweep: {time.monotonic() - begun:.0f} s", flush=True)
    for shape in SHAPES:
        if time.monotonic() > deadline:
            print(f"{SHAPES[shape]}: left out, the time is over")
            continue
        results += measure(shape, peak, tuned)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if not all(correct(row) for row in results):
        parser.exit(1, "Some results are wrong: see above.\n")


if __name__ == "__main__":
    main()
