"""
Processes of one command that share its work on one GPU or several: one alone cannot launch small kernels as quickly as
a GPU runs them. They keep step without a network, through a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore


PATIENCE = timedelta(hours=1)  # until a process that waits for others gives up


class Company:
    """
    One of several processes, as [`launch`] starts them.

    Args:
        file (`Path`): Through which they speak; at first there is none.
        index (`int`): Which of them this is; all go by the clock of the first.
        count (`int`): How many there are.
    """

    def __init__(self, file: Path, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._store = FileStore(str(file), count)
        self._store.set_timeout(PATIENCE)

    def agree(self, topic: str, value: Callable[[], float]) -> float:
        """Waits until all have come to a topic; what the first one then finds holds for all."""
        came = self._store.add(f"came to {topic}", 1)
        if self.index == 0:
            while came < self.count:
                time.sleep(0.005)
                came = self._store.add(f"came to {topic}", 0)
            self._store.set(topic, repr(value()))
        return float(self._store.get(topic))


def launch(module: str, words: Sequence[Sequence[str]]) -> None:
    """
    Runs a module once with each of several lists of words, all at the same time, each with its part of the CPU.

    Raises:
        RuntimeError: one of them failed; the others are then ended.
    """
    cores = str(max(1, len(os.sched_getaffinity(0)) // len(words)))
    own = os.environ | {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": cores}
    running = [subprocess.Popen([sys.executable, "-m", module, *one], env=own) for one in words]
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()  # does nothing to one that has ended
            process.wait()
    if any(codes):
        failed = next(index for index, code in enumerate(codes) if code)
        raise RuntimeError(f"Process {failed} of {len(words)} ended with {codes[failed]}; what it said stands above.")


__all__ = ["Company", "launch"]
