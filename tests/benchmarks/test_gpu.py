"""The benchmark of the GPU, on the CPU: forced acceptance is what it says, and no part fails for a slip."""

import copy
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu import divergence, idle, peers, profiles, report, rounds, shapes
from benchmarks.gpu.__main__ import main, parser, settings_of
from benchmarks.gpu.bench import NO_DRAFTS, Bench
from benchmarks.gpu.parts import PARTS
from tests.cli.conftest import pair  # noqa: F401  (a fixture)
from transformers_dspark import decoding, sampling
from transformers_dspark.batch.drafting import RowDrafting
from transformers_dspark.modeling_dspark import DSparkDrafter


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models():
    return shapes.build("tiny", torch.device("cpu"), torch.float32)


def test_profiles_have_the_published_lengths():
    for name, length in profiles.ACCEPTED_LENGTH.items():
        acceptance = profiles.conditional_acceptance(length)
        assert profiles.expected_length(acceptance, 7) == pytest.approx(length)
        assert profiles.mean_length(name, 5, 7) == pytest.approx(length)
    assert 0.91 < profiles.conditional_acceptance(6.17) < 0.94  # of the first draft, 0.93 is published


@pytest.mark.parametrize("profile", ["math", "chat", "mixed"])
def test_forced_confidences_are_calibrated_and_rank(profile):
    rows, block = 30, 7
    confidence, passed = profiles.forced_tables(profile, rows, block, seed=3)
    survived = passed[..., None] > np.arange(block)
    tested = passed[..., None] >= np.arange(block)
    for low in (0.0, 0.5, 0.8, 0.95):
        some = tested & (confidence >= low) & (confidence < low + 0.3)
        error = 5 * 0.5 / np.sqrt(some.sum())
        assert survived[some].mean() == pytest.approx(confidence[some].mean(), abs=error)
    length = 1 + passed.mean()
    assert length == pytest.approx(profiles.mean_length(profile, rows, block), abs=5 * 2.6 / np.sqrt(passed.size))
    good, bad = confidence[tested & survived], confidence[tested & ~survived]
    auc = np.searchsorted(np.sort(bad), good).mean() / len(bad)
    assert 0.79 < auc < 0.92


@pytest.mark.parametrize(("profile", "options"), [("math", {}), ("mixed", {}), ("math", {"max_verify_tokens": 2})])
def test_the_loop_accepts_as_a_profile_says(models, profile, options):
    rows, clock = 12, profiles.RoundClock(torch.device("cpu"))
    with profiles.ForcedAcceptance(clock, 16, 16) as forced, clock:
        batch = rounds.Batch(models, rows, 8, 24, clock, forced)
        found = batch.run(profile, "eager", **options)
    width = options.get("max_verify_tokens", 7)
    expected = profiles.mean_length(profile, rows, width)
    assert found.rounds + found.dropped == 24
    assert found.sent == width
    assert found.observed_length == pytest.approx(expected, abs=5 * 2.6 / np.sqrt(rows * found.rounds))
    assert found.accepted_length == pytest.approx(expected, rel=0.03)
    assert found.tokens_per_second == pytest.approx(rows * found.accepted_length / found.seconds)
    assert 0 < found.draft_seconds < found.seconds
    assert 0 < found.step_seconds < found.seconds


def test_without_drafts_a_row_gets_one_token_a_round(models):
    clock = profiles.RoundClock(torch.device("cpu"))
    with profiles.ForcedAcceptance(clock, 4, 16) as forced, clock:
        found = rounds.Batch(models, 4, 8, 6, clock, forced).run("mixed", "eager", **NO_DRAFTS)
    assert (found.observed_length, found.accepted_length, found.sent, found.draft_seconds) == (1.0, 1.0, 0.0, None)


def test_a_table_of_costs_is_of_the_rounds_it_was_made_of():
    args = ["--shape", "tiny", "--rows", "2", "3", "--context", "8", "--rounds", "3"]
    with Bench(settings_of(parser().parse_args(args))) as bench:
        table = bench.costs([2, 3], [8])
        for rows in (2, 3):
            whole = bench.drafting(rows, 8, 7)
            predicted = table.predict(rows, 8 * rows, whole.mean_context) + table.draft_curve(rows)[-1]
            assert predicted == pytest.approx(whole.seconds)
            plain = bench.drafting(rows, 8, 0)
            assert table.curve(rows, 0, plain.mean_context)[0] == pytest.approx(plain.seconds)


def test_modes_are_compared_over_texts_of_the_same_lengths():
    args = ["--shape", "tiny", "--rows", "2", "--context", "8", "--rounds", "3"]
    with Bench(settings_of(parser().parse_args(args))) as bench:
        plain, whole = (bench.unscheduled(2, 8, "math", drafts) for drafts in (0, 7))
        cut = bench.scheduled(2, 8, "chat", "compact")
    least, most = rounds.Batch(bench.models, 2, 8, 3, bench.clock, bench.forced).span
    for found in (plain, whole, cut):
        assert found.mean_context == pytest.approx(8 + (least + most) / 2, abs=7)  # a round has up to 8
    assert plain.rounds > 2 * whole.rounds > 0


def test_rounds_that_warm_up_are_no_rounds():
    drafting, plain = [0.1, 0.2, 0.3, 0.4, 0.5], [np.nan, np.nan, 0.3, 0.4, 0.5]
    stamps = np.array([plain, drafting, drafting, drafting, plain])  # a prompt, a warm-up, two rounds, one of anchors
    admitted = np.array([[0, 0], [0, 0], [7, 7], [0, 1], [0, 0]])
    assert rounds.real_rounds(stamps, admitted).tolist() == [0, 2, 3, 4]


def test_nothing_is_left_behind():
    before = decoding.accept_greedy, DSparkDrafter._confidence_at, RowDrafting.__call__
    clock = profiles.RoundClock(torch.device("cpu"))
    with profiles.ForcedAcceptance(clock, 2, 7) as forced, clock:
        assert decoding.accept_greedy is not sampling.accept_greedy
        target_ids = torch.tensor([[5, 6, 7], [1, 2, 3]])
        drafts, lengths = torch.tensor([[5, 6], [1, 9]]), torch.tensor([2, 2])
        with forced.paused():
            verdict = decoding.accept_greedy(target_ids, drafts, lengths)
        assert [part.tolist() for part in verdict] == [[2, 1], [7, 2]]
        verdict = decoding.accept_greedy(target_ids, drafts, lengths)  # the tables are zeros as yet
        assert [part.tolist() for part in verdict] == [[0, 0], [5, 1]]
        assert int(clock.round) == 2
    assert (decoding.accept_greedy, DSparkDrafter._confidence_at, RowDrafting.__call__) == before


def test_bytes_of_published_shapes():
    with torch.device("meta"):
        config = Qwen3Config(**shapes.SHAPES["8b"])
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        drafter = shapes.build_drafter("8b", target, 7)
    models = shapes.Models("8b", target, drafter)
    assert shapes.step_bytes(models, 1, 0) == pytest.approx(15.14e9, rel=1e-3)
    assert shapes.step_bytes(models, 2, 100) - shapes.step_bytes(models, 1, 100) == 100 * 147456


def test_idle_shares():
    spans = [(0.0, 1.0), (0.5, 2.0), (2.000005, 3.0), (3.5, 4.0)]  # overlap; a short gap; a long one
    share, long = idle.idle_shares(spans, 0.0, 4.0)
    assert share == pytest.approx((0.5 + 5e-6) / 4)
    assert long == pytest.approx(0.5 / 4)
    assert idle.idle_shares(spans, 3.2, 6.0)[0] == pytest.approx((0.3 + 2.0) / 2.8)
    assert idle.idle_shares([], 0.0, 1.0) == (1.0, 1.0)


def test_a_failure_leaves_the_others_their_turn(tmp_path, capsys):
    path, recovered = tmp_path / "result.json", []

    def broken():
        raise RuntimeError("no memory")

    tasks = [({"rows": 1}, broken), ({"rows": 2}, lambda: [{"seconds": 1.0}, {"seconds": 2.0}])]
    report.Report(path, {}, math.inf).measure("part", tasks, lambda: recovered.append(1))
    lines = json.loads(path.read_text())["parts"]["part"]
    assert lines == [
        {"rows": 1, "failed": "RuntimeError: no memory"},
        {"rows": 2, "seconds": 1.0},
        {"rows": 2, "seconds": 2.0},
    ]
    assert recovered == [1]
    report.Report(path, {}, time.monotonic()).measure("part", tasks, broken)
    assert all("time" in line["skipped"] for line in json.loads(path.read_text())["parts"]["part"])
    capsys.readouterr()


def test_nothing_is_begun_that_would_not_end_in_time(tmp_path, capsys):
    path = tmp_path / "result.json"
    tasks = [({"task": n}, lambda: time.sleep(0.2) or {"done": True}) for n in (1, 2)]
    made = report.Report(path, {}, time.monotonic() + 0.3)
    made.measure("one", tasks, list)
    made.measure("other", tasks[:1], list)  # how long it takes is unknown
    first, second = json.loads(path.read_text())["parts"]["one"]
    assert first["done"]
    assert "time" in second["skipped"]
    capsys.readouterr()


def test_steps_that_all_requests_share():
    begins, step = (0.0, 0.1, 0.2), 0.05
    times = [[begin + step * k for k in range(20)] for begin in begins]  # together from 0.2 to 0.95
    found = peers.together(times, 3)
    assert found["step_seconds"] == pytest.approx(step, rel=0.05)
    assert found["tokens_per_second"] == pytest.approx(3 / step, rel=0.05)
    with pytest.raises(RuntimeError, match="1 of 4"):
        peers.together(times, 4)
    with pytest.raises(RuntimeError, match="ended before"):
        peers.together([[0.0, 0.1], [0.5, 0.6]], 2)


def test_modes_are_measured_one_after_the_other_and_in_turns():
    """A device that slows down would else favour the mode that comes first."""
    words = ["--shape", "tiny", "--rows", "2", "--modes", "static", "compact", "--profiles", "math", "chat"]
    tasks = [about for about, _ in PARTS["throughput"][0](Bench(settings_of(parser().parse_args(words))))]
    assert [(task.get("profile"), task["mode"]) for task in tasks] == [
        ("math", "no drafter"),
        ("chat", "no drafter"),
        ("math", "static"),
        ("math", "compact"),
        ("chat", "compact"),
        ("chat", "static"),
    ]


def test_every_part_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "result.json"
    sizes = {"--rows": "2", "--context": "8", "--peer-rows": "2", "--rounds": "2", "--profiles": "chat"}
    words = ["--shape", "tiny", *(word for option in sizes.items() for word in option)]
    parts = "verify,round,throughput,peers,host-gap,draft-length,costs,pair,divergence"
    assert main([*words, "--parts", parts, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["environment"]["device"]
    assert not [line for lines in result["parts"].values() for line in lines if "failed" in line]
    assert list(result["parts"]) == ["device", *parts.split(",")]
    speeds = {line["mode"]: line["tokens_per_second"] for line in result["parts"]["throughput"]}
    assert set(speeds) == {"no drafter", "static", "compact", "cap-accept"}
    assert all(line["simulated_acceptance"] for line in result["parts"]["throughput"])
    said = capsys.readouterr().out
    assert "verify step" in said
    assert "native DFlash" in said
    assert main(["--shape", "tiny", "--parts", "pair", "--json", str(path), "--add"]) == 0  # the others are kept
    assert set(json.loads(path.read_text())["parts"]) == set(result["parts"])
    more = ["--rows", "1", "2", "--modes", "static", "--parts", "throughput", "--json", str(path), "--add"]
    assert main(["--shape", "tiny", *words[4:], *more]) == 0  # what is measured anew takes the place of what there was
    lines = json.loads(path.read_text())["parts"]["throughput"]
    kept, anew = {"compact", "cap-accept"}, {"no drafter", "static"}
    expected = [*((2, mode) for mode in kept | anew), *((1, mode) for mode in anew)]
    assert sorted((line["rows"], line["mode"]) for line in lines) == sorted(expected)
    assert main(["--plot", str(path)]) == 0
    assert len(list(tmp_path.glob("result-*.svg"))) == 2


def test_a_file_keeps_what_a_later_command_cannot_measure():
    earlier = [{"rows": 1, "speed": 2.0}, {"rows": 8, "speed": 3.0}]
    made = report.Report(None, {"parts": {"pair": list(earlier)}}, math.inf)
    made.measure("pair", [({}, lambda: {"skipped": "no pair"}), ({"rows": 8}, lambda: 1 / 0)], lambda: None)
    assert made.result["parts"]["pair"] == earlier
    made.result["parts"]["pair"] += [
        {"rows": 8, "failed": "before"},
        {"rows": 64, "skipped": "no room"},
        {"failed": "all"},
    ]
    made.measure("pair", [({"rows": 8}, lambda: {"speed": 4.0})], lambda: None)
    assert made.result["parts"]["pair"] == [earlier[0], {"rows": 64, "skipped": "no room"}, {"rows": 8, "speed": 4.0}]
    made.measure("pair", [({"rows": 64, "mode": "static"}, lambda: {"speed": 5.0})], lambda: None)
    assert made.result["parts"]["pair"][1:] == [
        {"rows": 8, "speed": 4.0},
        {"rows": 64, "mode": "static", "speed": 5.0},
    ]


def test_a_file_of_another_shape_is_refused(tmp_path, capsys):
    path = tmp_path / "result.json"
    words = ["--shape", "tiny", "--rows", "1", "--parts", "pair", "--json", str(path)]
    assert main(words) == 0
    result = json.loads(path.read_text())
    result["settings"]["shape"] = "8b"
    path.write_text(json.dumps(result))
    assert main([*words, "--add"]) == 2
    assert "has shape 8b, not tiny" in capsys.readouterr().err
    nowhere = {name: value for name, value in result["environment"].items() if name != "device"}
    empty = {name: {} for name in ("environment", "settings", "parts")}
    for broken in (empty, {**result, "environment": nowhere}, {**result, "settings": {}}, {**result, "parts": []}, []):
        path.write_text(json.dumps(broken))
        assert main([*words, "--add"]) == main(["--plot", str(path)]) == 2
        assert "is no result of this benchmark" in capsys.readouterr().err


def test_the_pair(pair, capsys):  # noqa: F811
    words = [
        "--pair-target",
        pair / "target",
        "--pair-drafter",
        pair / "drafter",
        "--pair-prompts",
        pair / "prompts.jsonl",
    ]
    settings = ["--shape", "tiny", "--rows", "2", "--parts", "pair,divergence", "--pair-tokens", "6"]
    assert main([*settings, *map(str, words), "--json", str(pair / "result.json")]) == 0
    parts = json.loads((pair / "result.json").read_text())["parts"]
    (line,) = parts["pair"]
    assert line["same_texts"] == 1.0  # float32, and the acceptance is its own
    assert line["tokens_per_second"] > 0
    assert not line["simulated_acceptance"]
    assert [line["compared"] for line in parts["divergence"]] == ["rounds, eager", "generate"]
    for line in parts["divergence"]:
        assert (line["prompts"], line["tokens"], line["divergences"]) == (6, 36, 0)
    assert "0 of 6 texts" in capsys.readouterr().out


def test_planted_divergences(models):
    """A token that is nowhere near the best is a defect; one whose scores are the best's but for rounding is not."""
    target, prompt = copy.deepcopy(models.target).bfloat16(), torch.tensor([5, 9, 2, 77])
    plain = target.generate(prompt[None], do_sample=False, max_new_tokens=6)[0, 4:].tolist()
    same, worse, twin = (list(plain) for _ in range(3))
    worse[2] = (worse[2] + 1) % target.config.vocab_size
    twin[3] = 126 if plain[3] != 126 else 125
    head = target.get_output_embeddings().weight.data
    head[twin[3]] = head[plain[3]]
    found = divergence.parted(target, [prompt] * 3, [same, worse, twin], [plain] * 3)
    assert (found["prompts"], found["divergences"], found["defects"]) == (3, 2, 1)
    bad, tie = found["found"]
    assert (bad["row"], bad["position"], bad["token"], bad["verdict"]) == (1, 2, worse[2], "defect")
    assert bad["apart"] > bad["tolerance"] > 0
    assert found["largest_margin"] == bad["apart"]
    assert found["largest_margin_ulps"] > 8
    assert bad["float32_apart"] == pytest.approx(bad["apart"], rel=0.1)
    assert (tie["row"], tie["position"], tie["verdict"], tie["apart"]) == (2, 3, "near-tie", 0.0)
    with pytest.raises(RuntimeError, match="Row 0 has 5 tokens and 6"):
        divergence.parted(target, [prompt], [plain[:5]], [plain])


@pytest.mark.slow
def test_a_fresh_process(tmp_path, capsys):
    path = tmp_path / "result.json"
    words = ["--shape", "tiny", "--context", "8", "--parts", "startup", "--json", str(path)]
    assert main(words) == 0
    lines = json.loads(path.read_text())["parts"]["startup"]
    assert [line["process"] for line in lines] == [1, 2]
    assert all(line["process_seconds"] > line["first_seconds"] > 0 for line in lines)
    assert main([*words, "--minutes", "0.02"]) == 0
    assert all("skipped" in line for line in json.loads(path.read_text())["parts"]["startup"])


@pytest.mark.parametrize(
    "words",
    [
        "--parts speed",
        "--rows 0",
        "--shape 70b",
        "--engine graph --device cpu",
        "--shape 8b --device cpu",
        "--shape tiny --pair-target nowhere",
        "--plot no.json",
        "--plot benchmarks/results/h200/ragged_attention.json",
    ],
)
def test_bad_input(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err
