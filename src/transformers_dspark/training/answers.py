"""On-policy answers on disk: flat shards of token ids and an index that is replaced last.

A folder holds `answers-00000.safetensors`, ... and `index.json`. A shard counts only once the index names it, and
every file is written under a temporary name and renamed, so an interrupted run leaves a readable folder and a resumed
one repeats nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file


INDEX_NAME = "index.json"
FORMAT = 1
FINISHES = ("cut", "eos", "length", "loop")


@dataclass(frozen=True)
class Answer:
    """
    One conversation turn answered by the target.

    Args:
        prompt (`int`): Index of the prompt in its file.
        turn (`int`): Which of the prompt's user turns this answers, from 0.
        ids (`np.ndarray` of shape `(tokens,)`): Prompt after the chat template, then the answer with its EOS if it
            came to one.
        prompt_length (`int`): How many of `ids` are prompt.
        temperature (`float`): What the answer was drawn at; 0 is greedy.
        finish (`str`): `"eos"`, `"length"` (limit reached), `"loop"` (stopped while repeating itself) or `"cut"` (time
            was up).
    """

    prompt: int
    turn: int
    ids: np.ndarray
    prompt_length: int
    temperature: float
    finish: str


@dataclass
class AnswerWriter:
    """
    Appends answers to a folder, one shard whenever enough tokens or seconds have come together.

    Args:
        folder (`Path`): Where the shards live; created if missing, continued if it holds some.
        facts (`dict`): What the answers depend on (target, seed, prompts, ...). A folder written under other facts is
            refused.
        vocab_size (`int`): Decides the integer type of the ids: uint16 up to 65,536, int32 beyond.
        shard_tokens (`int`, *optional*, defaults to 2,000,000): Tokens that fill a shard.
        shard_seconds (`float`, *optional*, defaults to 120): After so long a shard is written however small, so that
            a machine that fails costs no more than that.

    Raises:
        ValueError: The folder was written under different facts, or is damaged.
    """

    folder: Path
    facts: dict[str, Any]
    vocab_size: int
    shard_tokens: int = 2_000_000
    shard_seconds: float = 120.0
    shards: list[dict[str, Any]] = field(init=False)
    done: set[tuple[int, int]] = field(init=False)  # (prompt, turn)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards, self.done = [], set()
        self._pending: list[Answer] = []
        self._pending_tokens = 0
        self._flushed = time.monotonic()
        if (self.folder / INDEX_NAME).exists():
            index = read_index(self.folder)
            changed = {k: (index["facts"].get(k), v) for k, v in self.facts.items() if index["facts"].get(k) != v}
            if changed:
                raise ValueError(
                    f"{self.folder} holds answers made with other settings ({changed}, there and here);"
                    " choose another folder or the same settings."
                )
            self.shards = index["shards"]
            for shard in self.shards:
                arrays = _read_shard(self.folder, shard)
                self.done.update(zip(arrays["prompts"].tolist(), arrays["turns"].tolist(), strict=True))

    def add(self, answer: Answer) -> None:
        """Keeps an answer; it is on disk after the next `flush`."""
        self.done.add((answer.prompt, answer.turn))
        self._pending.append(answer)
        self._pending_tokens += len(answer.ids)
        late = time.monotonic() - self._flushed >= self.shard_seconds
        if late or self._pending_tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending as one shard, then the index."""
        self._flushed = time.monotonic()
        if not self._pending:
            return
        name = f"answers-{len(self.shards):05d}.safetensors"
        answers = self._pending
        lengths = np.array([len(a.ids) for a in answers], dtype=np.int64)
        prompt_lengths = np.array([a.prompt_length for a in answers], dtype=np.int32)
        arrays = {
            "ids": np.concatenate([a.ids for a in answers]).astype(
                np.uint16 if self.vocab_size <= 65536 else np.int32
            ),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "prompt_lengths": prompt_lengths,
            "temperatures": np.array([a.temperature for a in answers], dtype=np.float32),
            "prompts": np.array([a.prompt for a in answers], dtype=np.int32),
            "turns": np.array([a.turn for a in answers], dtype=np.uint8),
            "finishes": np.array([FINISHES.index(a.finish) for a in answers], dtype=np.uint8),
        }
        _replace(self.folder / name, lambda path: save_file(arrays, path))
        shard = {
            "file": name,
            "answers": len(answers),
            "tokens": int(lengths.sum()),
            "answer_tokens": int(lengths.sum() - prompt_lengths.sum()),
        }
        shards = [*self.shards, shard]
        index = {"format": FORMAT, "vocab_size": self.vocab_size, "facts": self.facts, "shards": shards}
        _replace(self.folder / INDEX_NAME, lambda path: path.write_text(json.dumps(index, indent=1)))
        # only now, so that a flush that was interrupted can be repeated
        self.shards, self._pending, self._pending_tokens = shards, [], 0


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(path.name + ".part")
    write(temporary)
    os.replace(temporary, path)


def read_index(folder: str | Path) -> dict[str, Any]:
    """
    Reads the index of an answer folder.

    Raises:
        ValueError: There is no index, it is damaged, or it has a newer format.
    """
    path = Path(folder) / INDEX_NAME
    if not path.exists():
        raise ValueError(
            f"{folder} is not a folder of answers: it has no {INDEX_NAME}. Make one with `dspark data answers`."
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(index, dict) or not isinstance(index.get("format"), int):
        raise _damaged(path, "it holds no object with a whole number as `format`")
    if index["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {index['format']}, this version reads up to {FORMAT}; upgrade transformers-dspark."
        )
    shards = index.get("shards")
    if not isinstance(index.get("facts"), dict) or not isinstance(shards, list) or not all(map(_is_shard, shards)):
        raise _damaged(path, "`facts` or `shards` are not of the form that a run writes")
    return index


def read_answers(folder: str | Path) -> Iterator[Answer]:
    """
    Yields every answer of a folder in the order it was written, one shard in memory at a time.

    Raises:
        ValueError: The index or a shard is damaged.
    """
    for shard in read_index(folder)["shards"]:
        arrays = _read_shard(Path(folder), shard)
        offsets = arrays["offsets"]
        for i in range(shard["answers"]):
            yield Answer(
                prompt=int(arrays["prompts"][i]),
                turn=int(arrays["turns"][i]),
                ids=arrays["ids"][offsets[i] : offsets[i + 1]],
                prompt_length=int(arrays["prompt_lengths"][i]),
                temperature=float(arrays["temperatures"][i]),
                finish=FINISHES[int(arrays["finishes"][i])],
            )


def _damaged(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} is damaged ({problem}); remove its folder and run `dspark data answers` again.")


def _is_shard(shard: Any) -> bool:
    return (
        isinstance(shard, dict)
        and isinstance(shard.get("file"), str)
        and Path(shard["file"]).name == shard["file"]  # beside the index
        and isinstance(shard.get("answers"), int)
        and shard["answers"] > 0
    )


def _read_shard(folder: Path, shard: dict[str, Any]) -> dict[str, np.ndarray]:
    """
    The arrays of a shard, which fit each other and the index.

    Raises:
        ValueError: They do not, or the file cannot be read.
    """
    path, answers = folder / shard["file"], shard["answers"]
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    per_answer = ("prompt_lengths", "temperatures", "prompts", "turns", "finishes")
    for name, size in {"ids": None, "offsets": answers + 1, **dict.fromkeys(per_answer, answers)}.items():
        array = arrays.get(name)
        kinds = "f" if name == "temperatures" else "iu"
        if array is None or array.ndim != 1 or array.dtype.kind not in kinds or size not in (None, len(array)):
            raise _damaged(path, f"`{name}` is missing or not what {INDEX_NAME} promises for {answers} answers")
        if not (array >= 0).all():
            raise _damaged(path, f"`{name}` holds a number below 0")
    offsets = arrays["offsets"].astype(np.int64)
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(arrays["ids"]) or (lengths < 1).any():
        raise _damaged(path, "`offsets` does not divide `ids`")
    if (arrays["prompt_lengths"] > lengths).any():
        raise _damaged(path, "a prompt is longer than its answer's end")
    if (arrays["finishes"] >= len(FINISHES)).any():
        raise _damaged(path, f"`finishes` holds a number above {len(FINISHES) - 1}")
    return arrays
