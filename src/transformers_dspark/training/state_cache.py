"""
Hidden states of a target on disk, for those who pass over the same texts often: taps and normed last states, nothing
of the size of a vocabulary. What is missing is computed and added: a first pass fills the cache, later ones read it.

Each process appends to a file of its own and then tells an index, so that others read what is there while it grows,
and what an interrupted run left half written is never seen. Values are kept as the target gave them: the same loss as
without a cache.

Source: byte planes before a general compressor, as in Blosc's shuffle filter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig


FACTS_NAME = "cache.json"
FORMAT = 1
LEVEL = 1  # of zlib; more costs time and gains little on bytes of floats
States = tuple[torch.Tensor, torch.Tensor]


class StateCache:
    """
    Args:
        folder (`Path`): Made if missing.
        facts (`dict`): What the states depend on, see [`cache_facts`].
        process (`int`): Rank of the writing process.
        threads (`int`): That compress and read.

    Raises:
        ValueError: the folder holds states of something else, or is damaged.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any], process: int = 0, threads: int = 8) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        facts, file = {"format": FORMAT, **facts}, self.folder / FACTS_NAME
        if file.exists():
            try:
                theirs = json.loads(file.read_text(encoding="utf-8"))
                changed = [name for name in facts if theirs.get(name) != facts[name]]
            except (ValueError, AttributeError) as error:
                raise ValueError(
                    f"{file} is damaged: remove {self.folder}; its states can be computed again."
                ) from error
            if changed:
                raise ValueError(
                    f"{self.folder} holds other hidden states ({', '.join(changed)}): give another folder."
                )
        else:
            file.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        self.places: dict[str, tuple[Path, int, list[int], int, int]] = {}
        self._read_until: dict[Path, int] = {}
        self._data = self.folder / f"states-{process:05d}.bin"
        self._index = self._data.with_suffix(".jsonl")
        self._pool = ThreadPoolExecutor(threads)
        self.refresh()
        self._mend()

    def _mend(self) -> None:
        """Cuts what an interrupted run of this process left behind its last entry."""
        own = [place for place in self.places.values() if place[0] == self._data]
        end = max((offset + sum(sizes) for _, offset, sizes, _, _ in own), default=0)
        for file, size in ((self._data, end), (self._index, self._read_until.get(self._index, 0))):
            with file.open("ab") as written:
                written.truncate(size)

    def refresh(self) -> None:
        """Takes up what other processes have added."""
        for index in sorted(self.folder.glob("states-*.jsonl")):
            with index.open("rb") as lines:
                lines.seek(self._read_until.get(index, 0))
                for line in lines:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    key, *place = json.loads(line)
                    self.places[key] = (index.with_suffix(".bin"), *place)
                    self._read_until[index] = self._read_until.get(index, 0) + len(line)

    @property
    def nbytes(self) -> int:
        """What the cache takes on disk."""
        return sum(file.stat().st_size for file in self.folder.glob("states-*"))

    def get(self, rows: Sequence[torch.Tensor]) -> list[States | None]:
        """
        States of texts, `None` for those that are missing.

        Args:
            rows (`Sequence[torch.LongTensor]`): Token ids `(length,)` of each text.

        Returns:
            Taps `(length, num_taps * hidden)` and last states `(length, hidden)`, on the CPU.
        """
        keys = [_key(ids) for ids in rows]
        if any(key not in self.places for key in keys):
            self.refresh()
        return list(self._pool.map(lambda key: self._read(key) if key in self.places else None, keys))

    def put(self, rows: Sequence[torch.Tensor], states: Sequence[States]) -> None:
        """Adds the states of texts; they are on disk when this returns."""
        parts = list(self._pool.map(lambda both: [_packed(part) for part in both], states))
        lines = []
        with self._data.open("ab") as data:
            for ids, (taps, last), packed in zip(rows, states, parts, strict=True):
                place = [data.tell(), [len(part) for part in packed], taps.shape[1], last.shape[1]]
                data.write(b"".join(packed))
                lines.append(json.dumps([_key(ids), *place]) + "\n")
        with self._index.open("ab") as index:
            index.write("".join(lines).encode())
        self.refresh()

    def _read(self, key: str) -> States:
        file, offset, sizes, *widths = self.places[key]
        with file.open("rb") as data:
            data.seek(offset)
            taps, last = (_unpacked(data.read(size), width) for size, width in zip(sizes, widths, strict=True))
        return taps, last

    def states(
        self, input_ids: torch.Tensor, lengths: Sequence[int], compute: Callable[[torch.Tensor], States]
    ) -> States:
        """
        States of a padded batch: from the cache where it has them, else computed and kept.

        Args:
            input_ids (`torch.LongTensor` of shape `(rows, length)`): Padded on the right.
            lengths (`Sequence[int]`): Tokens of each row whose states matter.
            compute (`Callable`): From a padded batch to taps and last states on its device.

        Returns:
            Taps `(rows, length, num_taps * hidden)` and last states `(rows, length, hidden)`; zeros where there is
            padding.
        """
        rows = [ids[:length] for ids, length in zip(input_ids.cpu(), lengths, strict=True)]
        found = self.get(rows)
        missing = [k for k, states in enumerate(found) if states is None]
        if missing:
            longest = max(lengths[k] for k in missing)
            fresh = [part.cpu() for part in compute(input_ids[missing, :longest])]
            cut: list[States] = [
                (fresh[0][place, : lengths[k]], fresh[1][place, : lengths[k]]) for place, k in enumerate(missing)
            ]
            self.put([rows[k] for k in missing], cut)
            for k, states in zip(missing, cut, strict=True):
                found[k] = states
        padded = []
        for part in range(2):
            values = [states[part] for states in found if states is not None]
            whole = values[0].new_zeros(len(values), input_ids.shape[1], values[0].shape[1])
            for row, value in enumerate(values):
                whole[row, : len(value)] = value
            padded.append(whole.to(input_ids.device))
        return padded[0], padded[1]


def cache_bytes(config: DSparkConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that states of so many tokens take, before compression."""
    return tokens * (config.num_taps + 1) * config.target_hidden_size * dtype.itemsize


def check_room(folder: Path, needed: int) -> None:
    """
    Raises:
        OSError: the disk of a cache has less room than it will need at most.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    held = sum(file.stat().st_size for file in folder.glob("states-*"))
    free = shutil.disk_usage(place).free + held
    if needed > free:
        raise OSError(
            f"The hidden states may take {needed / 2**30:.1f} GiB in {folder}, where {free / 2**30:.1f} GiB are free: "
            "give another folder, fewer answers or a smaller --max-length, or train without a cache."
        )


def cache_facts(target: PreTrainedModel, layer_ids: Sequence[int]) -> dict[str, Any]:
    """What hidden states depend on: taps, dtype and weights, of which the first of each parameter stand for all."""
    digest = hashlib.sha256()
    for name, parameter in target.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return {"taps": list(layer_ids), "dtype": str(target.dtype).removeprefix("torch."), "target": digest.hexdigest()}


def _key(ids: torch.Tensor) -> str:
    return hashlib.blake2b(ids.numpy().astype(np.int64).tobytes(), digest_size=16).hexdigest()


def _packed(values: torch.Tensor) -> bytes:
    """Bytes of the same significance beside each other: those with the exponents repeat, which zlib sees."""
    size = values.dtype.itemsize
    planes = values.contiguous().view(torch.uint8).view(-1, size).T.contiguous()
    header = str(values.dtype).removeprefix("torch.").encode().ljust(16)
    return header + zlib.compress(planes.numpy().tobytes(), LEVEL)


def _unpacked(data: bytes, width: int) -> torch.Tensor:
    dtype = getattr(torch, data[:16].decode().strip())
    flat = torch.frombuffer(bytearray(zlib.decompress(data[16:])), dtype=torch.uint8)
    return flat.view(dtype.itemsize, -1).T.contiguous().view(-1).view(dtype).view(-1, width)


__all__ = ["StateCache", "cache_bytes", "cache_facts", "check_room"]
