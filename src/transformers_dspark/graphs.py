"""Work on a CUDA device as a graph: captured once, then replayed without the host's part of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch


Result = TypeVar("Result")
WARM_UP = 2  # runs before a capture: kernels are compiled, libraries make their workspaces


class Graph(Generic[Result]):
    """
    A function without arguments, recorded. It must read and write tensors that stay where they are, and never wait for
    the device. On another device than CUDA a replay simply calls it again.

    Args:
        work (`Callable`): The function. It runs a few times before it is recorded.
        device (`torch.device`): Where it runs.
        pool (*optional*): Memory that graphs share which never run at the same time, of
            `torch.cuda.graph_pool_handle`.

    Attributes:
        result: What the function returned; a replay writes to the same tensors.
    """

    def __init__(self, work: Callable[[], Result], device: torch.device, pool: Any = None) -> None:
        self._work, self._graph, self.result = work, None, None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    work()
        finally:  # what has been launched may read what comes next, also where the rest failed
            torch.cuda.current_stream(device).wait_stream(side)
        gc.collect()  # what is freed while a capture runs would end it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.result = work()
        self._graph = graph

    def replay(self) -> Result:
        """Runs it once more; nothing waits for it."""
        if self._graph is None:
            self.result = self._work()
        else:
            self._graph.replay()
        return self.result  # type: ignore[return-value]  # set by the capture


__all__ = ["Graph"]
