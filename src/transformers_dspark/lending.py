"""Changes to a model that last as long as the calls that need them, nested or on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from torch import nn


Module = TypeVar("Module", bound=nn.Module)


class Lender(Generic[Module]):
    """
    Makes one change to modules: the first of the calls that need it makes it, the last one undoes it.

    Args:
        change (`Callable`): Changes a module, and returns what undoes that; or `None` to leave it as it is.
    """

    def __init__(self, change: Callable[[Module], Callable[[], object] | None]) -> None:
        self._change, self._lock = change, threading.Lock()
        self._changed: dict[Module, tuple[int, Callable[[], object]]] = {}

    @contextmanager
    def __call__(self, modules: Iterable[Module]) -> Iterator[None]:
        """While it lasts, the modules are changed."""
        used = []
        try:
            with self._lock:
                for module in modules:
                    count, undo = self._changed.get(module) or (0, self._change(module))
                    if undo is not None:
                        self._changed[module] = count + 1, undo
                        used.append(module)
            yield
        finally:
            with self._lock:
                for module in used:
                    count, undo = self._changed.pop(module)
                    if count > 1:
                        self._changed[module] = count - 1, undo
                    else:
                        undo()


def lend_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], object]:
    """Gives one module another `forward`. Returns what gives it its own back, for a [`Lender`]."""
    own = vars(module)
    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = forward

    def undo() -> None:
        own.pop("forward", None)
        own.update(before)

    return undo


@contextmanager
def lent_forwards(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """
    While it lasts, modules have these as their `forward`. The compiler finds what it compiled with them in place again
    only if they are the same objects.
    """
    with ExitStack() as undone:
        for module, forward in forwards.items():
            undone.callback(lend_forward(module, forward))
        yield


__all__ = ["Lender", "lend_forward", "lent_forwards"]
