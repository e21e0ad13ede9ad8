"""What every test runs under."""

import logging
from collections.abc import Iterator

import pytest


class _Deprecations(logging.Handler):
    """Collects deprecations that Transformers only logs; those it warns about are errors through pyproject.toml."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecated" in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_deprecations() -> Iterator[None]:
    handler = _Deprecations()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.messages, f"deprecated in Transformers: {handler.messages}"
