"""Where a figure was measured: what a reader needs to judge it or to measure it again."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


PACKAGES = ("transformers-dspark", "transformers", "torch", "tokenizers", "safetensors")


def environment(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """
    Date, command, commit of the checkout, machine and versions, as plain strings and numbers.

    Args:
        device (`torch.device`): Where the figures were measured.
        command (`Sequence[str]`): The words that measured them; of files only the names are kept.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(Path(word).name if Path(word).is_absolute() else word for word in command),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    """The commit of this package's checkout; `None` where it is installed otherwise."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # no git


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None
