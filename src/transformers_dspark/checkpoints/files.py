"""Reading a checkpoint's files from a folder or the Hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from ..configuration_dspark import DSparkConfig


INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A foreign checkpoint in canonical terms: configuration, tensors by canonical name, the body's dtype, family."""

    config: DSparkConfig
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype
    family: str


def local_folder(path: str | os.PathLike[str], subfolder: str = "", **hub: Any) -> Path:
    """The folder itself, or a snapshot of the Hub repository's configuration and safetensors files."""
    root = Path(path)
    if not root.is_dir():
        root = Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"], **hub))
    return root / subfolder


def weight_map(folder: Path) -> dict[str | None, str]:
    """
    The file of each tensor by a folder's index; of a folder without one, its file for all of them (`None`).

    Raises:
        ValueError: the index is damaged.
    """
    index = folder / INDEX
    if not index.exists():
        return {None: "model.safetensors"}
    try:
        names = json.loads(index.read_text())["weight_map"]
        if wrong := [name for name in names.values() if not isinstance(name, str)]:
            raise TypeError(f"weight_map names {wrong[0]!r}, which is no file")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is damaged or incomplete ({error!r}); fetch it again.") from error
    return dict(names)


def shard_names(folder: Path) -> list[str]:
    """The safetensors files of a folder, see [`weight_map`]."""
    return sorted(set(weight_map(folder).values()))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """
    All tensors of a folder's safetensors file, or of the shards that its index names.

    Raises:
        FileNotFoundError: no safetensors weights.
        ValueError: a file is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name in shard_names(folder):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} holds no {name}; a drafter needs its weights as safetensors.")
        try:
            tensors |= _mapped(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged or incomplete ({error}); fetch it again.") from error
    return tensors


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, each mapped by itself: whoever drops or replaces one gives its pages back at once."""
    with safe_open(file, framework="pt") as names:
        keys = list(names.keys())
    tensors = {}
    for key in keys:
        with safe_open(file, framework="pt") as opened:
            tensors[key] = opened.get_tensor(key)
    return tensors


__all__ = ["INDEX", "OpenedCheckpoint", "local_folder", "read_tensors", "shard_names", "weight_map"]
