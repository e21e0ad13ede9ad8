"""The benchmark of targets with recurrent state, on the CPU: it runs to its end."""

import json

import pytest

from benchmarks import recurrent


def test_it_runs_and_says_what_it_found(tmp_path, capsys):
    file = tmp_path / "out.json"
    engines = ["--engines", "eager", "compiled"]  # the second needs another device
    assert recurrent.main(["--rows", "2", "--rounds", "6", "--context", "8", "--json", str(file), *engines]) == 0
    (result,) = json.loads(file.read_text())["results"]
    assert result["rows"] == 2
    eager, compiled = result["engines"].values()
    assert set(eager["speed_up"]) == {"generate", "static cache"}
    assert eager["tokens_per_second"] == pytest.approx(2 * eager["accepted_length"] / eager["seconds"])
    assert 4 < eager["accepted_length"] < 8
    assert 0 < eager["reread_share_of_mixer_tokens"] < 1
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert "the target is on cpu" in compiled["failure"]
    assert "2 rows, compiled: NotImplementedError" in shown


def test_wrong_numbers_end_with_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        recurrent.main(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds must be at least 1" in capsys.readouterr().err
