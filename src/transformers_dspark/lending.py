"""Changes to a model that last as long as the calls that need them, nested or on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from torch import nn


Module = TypeVar("Module", bound=nn.Module)
_GIVEN = "_forward_while_lent"  # where a module's own `forward`, or `None`, is noted while it has another


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
    before = {name: own[name] for name in ("forward", _GIVEN) if name in own}
    own.update({"forward": forward, _GIVEN: given_forward(module)})

    def undo() -> None:
        for name in ("forward", _GIVEN):
            own.pop(name, None)
        own.update(before)

    return undo


def given_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The `forward` that a single module was given in the place of its class's, those lent to it left aside."""
    own = vars(module)
    return own[_GIVEN] if _GIVEN in own else own.get("forward")


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


__all__ = ["Lender", "given_forward", "lend_forward", "lent_forwards"]
