"""
The `dspark` command: finds the subcommand, turns bad input into one line and an exit code.

A subcommand is a module of this package with three names: `HELP` (one line), `add_arguments(parser)` and
`run(args) -> int` (the exit code). It is imported only when it is asked for, apart from `dspark --help`, which reads
every `HELP`; so those modules import PyTorch and Transformers inside `run`.

What this file deliberately does not know: models, and what any subcommand does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__


if TYPE_CHECKING:
    import torch

COMMANDS: tuple[str, ...] = (
    "demo",
    "generate",
    "bench",
    "why",
    "diff",
    "eval",
    "profile",
    "calibrate",
    "data",
    "train",
    "inspect",
    "export",
    "plot",
)

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UsageError(ValueError):
    """
    Input of the user's that cannot be used.

    The message says what was given, what is allowed and what to do; it is shown as one line, without a traceback.
    """


class Interrupted(KeyboardInterrupt):
    """
    Ctrl-C in a command that can say more than that.

    The message, shown as one line, says what was kept and how to go on.
    """


class _Formatter(argparse.HelpFormatter):
    """Help that fits a screen: an option and its words share a line, and the usage names only what must be given."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=29)

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if len(needed) < len(list(actions)):
            needed.insert(0, argparse.Action([], "options", nargs=argparse.OPTIONAL, metavar="options"))
        super().add_usage(usage, needed, [], prefix)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line: argparse would print the whole usage before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Formatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def _checked(convert: Callable[[str], Any], allowed: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    def parse(word: str) -> Any:
        try:
            value = convert(word)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"{word!r} is not possible: give {wanted}")
        return value

    return parse


def _is_text(word: str) -> bool:
    """Whether a word has letters, all of them whole: what is no UTF-8 reaches Python as lone surrogates."""
    return bool(word) and not any("\ud800" <= letter <= "\udfff" for letter in word)


def _is_place(word: str) -> bool:
    """Whether a word is a folder's name, or nothing on this machine and of a hub id's form."""
    path = Path(word)
    return bool(word) and (
        path.is_dir() or (not path.exists() and bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", word)))
    )


# Types of options. What a value must be whatever the other options are is said here, once.
positive_int = _checked(int, lambda value: 1 <= value < 2**31, "a whole number from 1 on")
positive_float = _checked(float, lambda value: 0 < value < float("inf"), "a finite number above 0")
seed = _checked(int, lambda value: 0 <= value < 2**62, "a whole number from 0 on, below 2**62")
share = _checked(float, lambda value: 0 <= value <= 1, "a number in 0..1")
valid_temperature = _checked(
    float, lambda value: value == 0 or 1e-5 <= value < float("inf"), "0 for greedy, or 1e-5 and above to sample"
)
path_or_id = _checked(str, bool, "a folder or a hub id")
target_place = _checked(str, _is_place, "a target's folder that exists, or a hub id such as org/name")
valid_text = _checked(str, _is_text, "text in UTF-8, one character or more")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json FILE` that every subcommand has; `write_json` writes there."""
    parser.add_argument("--json", type=json_file, metavar="FILE", help="also write the result to FILE as JSON")


def json_file(name: str) -> Path:
    """Refuses what cannot be written before the work whose result it would hold."""
    path = Path(name)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name}: there is no folder {path.parent}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name} cannot be written; name a file in a folder of yours")
    return path


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """
    Writes a result where `--json` points; does nothing without the option.

    Args:
        path (`Path`, *optional*): The file, made or replaced.
        result (`Mapping[str, Any]`): What `json` can write.

    Raises:
        OSError: the file cannot be written.
    """
    if path is not None:
        path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def device_of(name: str | None) -> torch.device:
    """
    The device that `--device` names.

    Args:
        name (`str`, *optional*): `cpu`, `cuda` or `cuda:N`. By default CUDA if there is one, else the CPU.

    Raises:
        UsageError: it is no such name, or no such device is here.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not (kind == "cuda" and index.isdecimal())):
        raise UsageError(f"--device {name} is no device: give cpu, cuda or cuda:N")
    if kind == "cuda" and count == 0:
        raise UsageError(f"--device {name}: PyTorch finds no CUDA device here; give cpu, or leave the option out")
    if index and int(index) >= count:
        raise UsageError(f"--device {name}: PyTorch finds {count} here, cuda:0 to cuda:{count - 1}")
    return torch.device(name)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Args:
        argv (`Sequence[str]`, *optional*): The words after `dspark`; those of the process by default.

    Returns:
        `int`: The exit code: that of the subcommand, 2 for input that cannot be used, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _build_parser(words).parse_args(words, argparse.Namespace(words=["dspark", *words]))
        if args.print_completion:
            print(_completion(args.print_completion))
            return 0
        if args.command is None:
            raise UsageError("no command given (see `dspark --help`)")
        return _load(args.command).run(args)
    except KeyboardInterrupt as interrupt:
        print(f"dspark: interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    # How the package refuses input or misses an extra. Anything else is a fault of ours and keeps its traceback.
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"dspark: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USAGE


def _build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="dspark", description="DSpark speculative decoding for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    parser.add_argument("--print-completion", choices=("bash", "zsh", "tcsh"), help="tab completion; needs shtab")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    asked = next((word for word in words if not word.startswith("-")), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        command = _load(name)
        command.add_arguments(subparsers.add_parser(name, help=command.HELP, description=command.HELP))
    return parser


def _completion(shell: str) -> str:
    try:
        import shtab
    except ImportError:
        raise ImportError("Tab completion needs shtab: pip install 'transformers-dspark[completion]'") from None
    return shtab.complete(_build_parser([]), shell)


def _load(name: str) -> Any:
    return import_module(f".{name}", __name__)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
