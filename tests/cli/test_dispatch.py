"""The command line says what is wrong in one line and never shows a traceback for bad input."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from transformers_dspark import __version__, cli


def scripted(action) -> SimpleNamespace:
    """A subcommand that does as it is told."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=1)
        cli.add_json_option(parser)

    return SimpleNamespace(HELP="does as told", add_arguments=add_arguments, run=action)


@pytest.fixture
def with_command(monkeypatch):
    def install(action) -> None:
        monkeypatch.setattr(cli, "COMMANDS", ("told",))
        monkeypatch.setattr(cli, "_load", lambda name: scripted(action))

    return install


def raiser(error: BaseException):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (cli.UsageError("--size is -1: it must be at least 1"), "--size is -1: it must be at least 1"),
        (ValueError("first line\n\n  second line"), "first line second line"),
        (NotImplementedError("beams are not supported: use num_beams=1"), "beams are not supported: use num_beams=1"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "x.json: No such file or directory"),
        (ImportError("needs gguf"), "needs gguf"),
        (ValueError(), "ValueError"),
    ],
)
def test_refusals_are_one_line(with_command, capsys, error, line) -> None:
    with_command(raiser(error))
    assert cli.main(["told"]) == 2
    assert capsys.readouterr().err == f"dspark: error: {line}\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["no command given"]),
        (["tolt"], ["'tolt'", "told"]),
        (["told", "--size", "big"], ["--size", "'big'"]),
        (["told", "--colour"], ["--colour"]),
    ],
)
def test_bad_words_are_one_line(with_command, capsys, words, parts) -> None:
    with_command(lambda args: 0)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(part in err for part in parts)


EVAL, TRAIN = ["eval", "x.jsonl"], ["train", "--target", "t", "--answers", "a", "--out", "o"]
ANSWERS = ["data", "answers", "--target", "t", "--prompts", "p", "--out", "o"]


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *((["demo"], "--prompt", text) for text in ("", "\ud800", "a\udcff")),
        *((command, "--temperature", t) for command in (["demo"], EVAL) for t in ("nan", "-1", "inf", "1e-320", "x")),
        *((["demo"], "--confidence-threshold", c) for c in ("nan", "-0.1", "2", "x")),
        *((["demo"], "--max-new-tokens", n) for n in ("0", "-1", "2.5", "1" * 30, "1" * 9000)),
        *((command, "--target", "") for command in (["demo"], EVAL, TRAIN, ANSWERS)),
        (["demo"], "--drafter", ""),
        *((command, "--seed", n) for command in (EVAL, TRAIN, ANSWERS) for n in ("-1", str(10**30), "x")),
        *((TRAIN, option, x) for option in ("--epochs", "--learning-rate") for x in ("inf", "nan", "0", "-1")),
        *((command, "--max-seconds", x) for command in (TRAIN, ANSWERS) for x in ("inf", "nan", "-1")),
        (ANSWERS, "--slots", "0"),
        (EVAL, "--limit", "0"),
    ],
)
def test_values_that_no_option_takes(capsys, command, option, value) -> None:
    """Before anything is loaded, one line names the option and what it takes."""
    assert cli.main([*command, f"{option}={value}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"argument {option}: " in error
    assert "is not possible: give " in error


@pytest.mark.parametrize("place", ["./nowhere", "/nowhere/at/all", __file__])
def test_targets_that_are_nowhere(capsys, place) -> None:
    assert cli.main(["generate", "hi", "--target", place]) == 2
    assert f"{place!r} is not possible: give a target's folder" in capsys.readouterr().err


def test_faults_of_ours_keep_their_traceback(with_command) -> None:
    with_command(raiser(KeyError("lost")))
    with pytest.raises(KeyError):
        cli.main(["told"])


def test_interrupted(with_command) -> None:
    with_command(raiser(KeyboardInterrupt()))
    assert cli.main(["told"]) == 130


def test_exit_code_and_json(with_command, tmp_path: Path) -> None:
    def run(args) -> int:
        cli.write_json(args.json, {"größe": args.size})
        return 3

    with_command(run)
    assert cli.main(["told", "--size", "4", "--json", str(tmp_path / "a.json")]) == 3
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "größe": 4\n}\n'


def test_an_unwritable_result_is_known_before_the_work(with_command, tmp_path: Path, capsys, monkeypatch) -> None:
    with_command(raiser(AssertionError("the work began")))
    for file in (tmp_path / "none" / "a.json", tmp_path, tmp_path / "locked.json"):
        if file.name == "locked.json":
            monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
        assert cli.main(["told", "--json", str(file)]) == 2
        error = capsys.readouterr().err
        assert str(file) in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(("count", "default"), [(0, "cpu"), (2, "cuda")])
def test_devices(monkeypatch, count: int, default: str) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert cli.device_of(None) == torch.device(default)
    assert cli.device_of("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "meta", ""):
        with pytest.raises(cli.UsageError, match="give cpu, cuda or cuda:N"):
            cli.device_of(name)
    if count:
        assert cli.device_of("cuda:1") == torch.device("cuda:1")
    with pytest.raises(cli.UsageError, match="cuda:0 to cuda:1" if count else "no CUDA device"):
        cli.device_of("cuda:2")


def test_tab_completion_names_every_command(capsys) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["--print-completion", "bash"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert "--max-new-tokens" in out


def test_tab_completion_names_its_extra(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["--print-completion", "bash"]) == 2
    assert "transformers-dspark[completion]" in capsys.readouterr().err


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "transformers_dspark", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"dspark {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_commands_are_quick_to_list(name: str) -> None:
    """Help must not load PyTorch: a command imports it inside `run`."""
    code = (
        f"import sys; from transformers_dspark import cli; command = cli._load({name!r}); "
        "print(command.HELP); assert 'torch' not in sys.modules and callable(command.run)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_fits_a_screen(name, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*name.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= (64 if name == "train" else 40)
    assert lines[0].startswith(f"usage: dspark {name}".strip())
    assert "[options]" in lines[0] + lines[1]
    # `data` has it in both of its parts
    assert any("--json FILE" in line for line in lines) != (name in ("", "data"))
