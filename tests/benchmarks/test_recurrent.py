"""The benchmark of targets with recurrent state, on the CPU: it runs to its end."""

import json

import pytest

from benchmarks import recurrent


def test_it_runs_and_says_what_it_found(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert recurrent.main(["--rows", "2", "--tokens", "48", "--context", "8", "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text())["results"]
    assert result["rows"] == 2
    assert set(result["speed_up"]) == {"generate", "static cache"}
    assert result["tokens_per_second"] == pytest.approx(2 * 6.17 / result["round_seconds"])
    assert 0 < result["reread_share_of_mixer_tokens"] < 1
    assert "read again" in capsys.readouterr().out


def test_wrong_numbers_end_with_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        recurrent.main(["--tokens", "3"])
    assert ended.value.code == 2
    assert "--tokens at least 48" in capsys.readouterr().err
