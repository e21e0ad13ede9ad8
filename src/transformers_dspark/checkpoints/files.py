"""Reading a checkpoint's files from a folder or the Hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..configuration_dspark import DSparkConfig


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A foreign checkpoint in canonical terms: configuration, tensors by canonical name, and the body's dtype."""

    config: DSparkConfig
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype


def local_folder(path: str | os.PathLike[str], subfolder: str = "", **hub: Any) -> Path:
    """The folder itself, or a snapshot of the Hub repository's configuration and safetensors files."""
    root = Path(path)
    if not root.is_dir():
        root = Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"], **hub))
    return root / subfolder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """
    All tensors of a folder's safetensors file, or of the shards that its index names.

    Raises:
        FileNotFoundError: no safetensors weights.
        ValueError: a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is damaged or incomplete ({error!r}); fetch it again.") from error
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} holds no {name}; a drafter needs its weights as safetensors.")
        try:
            tensors.update(load_file(folder / name))
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged or incomplete ({error}); fetch it again.") from error
    return tensors


__all__ = ["OpenedCheckpoint", "local_folder", "read_tensors"]
