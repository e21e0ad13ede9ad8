"""The benchmark of the drafter inside DeepSeek-V4, on the CPU: it runs to its end, and its floor is what it says."""

import json

import pytest
import torch

from benchmarks import deepseek_v4


def test_it_runs_and_says_what_it_found(tmp_path, capsys):
    options = ["--shape", "tiny", "--rows", "1", "3", "--samples", "1", "--context", "12", "--experts", "7"]
    assert deepseek_v4.main([*options, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [figures["rows"] for figures in result["rounds"]] == [1, 3]
    assert result["experts_by_stage"] == 7
    for figures in result["rounds"]:
        assert figures["floor_bytes"] == sum(figures["floor_bytes_by_part"].values())
        assert len(figures["experts_chosen_by_stage"]) == 3
        assert figures["draft_milliseconds"] > 0
    assert "3 rows: a round takes" in capsys.readouterr().out


def test_the_floor_counts_every_weight_of_a_stage_once():
    drafter = deepseek_v4.build("tiny", None, torch.device("cpu"), torch.float32)
    parts = deepseek_v4.floor_bytes(drafter, 2, 100, [8, 8, 8])
    stages = sum(weight.nbytes for weight in drafter.layers.parameters())
    behind = (drafter.norm, drafter.hc_head, drafter.confidence_head)
    others = sum(weight.nbytes for module in behind for weight in module.parameters())
    assert parts["experts"] + parts["other stage weights"] == stages + others
    assert parts["markov"] == 5 * drafter.markov_head.markov_w2.weight.nbytes
    assert parts["context"] == 2 * 8 * 32 * 4 * 3  # the window, one latent vector a token and stage


def test_the_shape_of_flash_has_its_published_sizes():
    with torch.device("meta"):
        drafter = deepseek_v4.build("flash", None, torch.device("meta"), torch.bfloat16)
    experts = sum(weight.numel() for name, weight in drafter.named_parameters() if ".experts." in name)
    assert experts == 3 * 256 * 3 * 4096 * 2048
    borrowed = drafter.embed_tokens.weight.numel() + drafter.lm_head.weight.numel()
    assert sum(weight.numel() for weight in drafter.parameters()) - borrowed == pytest.approx(19.8e9, rel=0.005)


def test_wrong_numbers_end_with_one_line(capsys):
    for options in (["--rows", "0"], ["--experts", "3"]):
        with pytest.raises(SystemExit) as ended:
            deepseek_v4.main(["--shape", "tiny", *options])
        assert ended.value.code == 2
        assert "must be at least 1, and --experts at least 6" in capsys.readouterr().err
