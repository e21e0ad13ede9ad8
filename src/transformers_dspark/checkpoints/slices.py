"""Some tensors of a large checkpoint: which files hold them, how many bytes they are, and reading nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from .files import INDEX, local_folder, weight_map


# of the safetensors format; four-bit numbers come as bytes of two
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Slice:
    """
    One tensor's place in a file.

    Args:
        file (`Path`): The file.
        name (`str`): The tensor's name there.
        dtype (`torch.dtype`): Of its numbers.
        shape (`tuple[int, ...]`): Its shape.
        start (`int`): Its first byte, counted from the file's.
        size (`int`): Its bytes.
    """

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> torch.Tensor:
        """The tensor; nothing else of the file is read."""
        buffer = bytearray(self.size)
        with self.file.open("rb", buffering=0) as opened:
            opened.seek(self.start)
            view, done = memoryview(buffer), 0
            while done < self.size:  # the system may give less than was asked for
                count = opened.readinto(view[done:])
                if not count:
                    raise ValueError(f"{self.file} ends inside {self.name}; fetch it again.")
                done += count
        if not buffer:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(self.dtype).view(self.shape)


def find_slices(folder: Path, wanted: Callable[[str], bool]) -> list[Slice]:
    """
    The wanted tensors of a folder, in the order of its files. A file that holds none of them is not opened.

    Raises:
        FileNotFoundError: the index names a file that is not there.
        ValueError: a file is damaged.
    """
    found = []
    for name in sorted({file for tensor, file in weight_map(folder).items() if tensor is None or wanted(tensor)}):
        file = folder / name
        if not file.exists():
            raise FileNotFoundError(f"{folder} holds no {name}, which its index names for the drafter's tensors.")
        found += [piece for piece in _header(file) if wanted(piece.name)]
    return found


def folder_of_some(path: Any, wanted: Callable[[str], bool], **hub: Any) -> Path:
    """A folder with the configuration and the files that hold wanted tensors; from the Hub come only these."""
    if Path(path).is_dir():
        return local_folder(path, **hub)
    inside = f"{hub['subfolder']}/" if hub.get("subfolder") else ""
    hub = {name: value for name, value in hub.items() if name != "subfolder"}
    folder = Path(snapshot_download(str(path), allow_patterns=[f"{inside}*.json"], **hub)) / inside
    files = {file for tensor, file in weight_map(folder).items() if tensor is None or wanted(tensor)}
    snapshot_download(str(path), allow_patterns=sorted(inside + file for file in files), **hub)
    return folder


def total_bytes(folder: Path) -> int | None:
    """Bytes of all the checkpoint's tensors, as its index says; of a single file its size."""
    index = folder / INDEX
    if not index.exists():
        return (folder / "model.safetensors").stat().st_size
    size = json.loads(index.read_text()).get("metadata", {}).get("total_size")
    return None if size is None else int(size)


def _header(file: Path) -> list[Slice]:
    try:
        with file.open("rb", buffering=0) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, file.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(opened.read(length))
        slices = []
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            kind, shape, (start, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
            if kind == "F4":
                kind, shape = "U8", [*shape[:-1], shape[-1] // 2]
            dtype = _DTYPES[kind]
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} of shape {tuple(shape)} has {end - start} bytes")
            slices.append(Slice(file, name, dtype, tuple(shape), 8 + length + start, end - start))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}); fetch it again.") from error
    return slices


__all__ = ["Slice", "find_slices", "folder_of_some", "total_bytes"]
