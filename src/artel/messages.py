"""Messages for people: records of the logger `artel`.

A message is printed only inside `printed_by`, which the command line and functions of `import artel` enter, or by a
handler that the program itself has added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger("artel")
_is_silenced = ContextVar("is_silenced", default=False)
logger.addFilter(lambda record: record.levelno >= logging.WARNING or not _is_silenced.get())


class _Printer(logging.Handler):
    def __init__(self, print_record: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._print = print_record

    def emit(self, record: logging.LogRecord) -> None:
        self._print(record)


@contextmanager
def printed_by(print_record: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Pass messages to `print_record` inside the block, and to no other handler."""
    original = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [_Printer(print_record)], False
    logger.setLevel(logger.level or logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate, level = original
        logger.setLevel(level)


@contextmanager
def silenced() -> Iterator[None]:
    """Log only warnings inside the block, in this thread."""
    token = _is_silenced.set(True)
    try:
        yield
    finally:
        _is_silenced.reset(token)
