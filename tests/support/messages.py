"""What artel logs, collected as a program does it: by a handler of its own."""

import logging
from collections.abc import Callable


class _Collector(logging.Handler):
    def __init__(self, then: Callable[[str], object]) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._then(self.messages[-1])


def logged(then: Callable[[str], object] = lambda _: None) -> list[str]:
    """The messages from now on; `then` is called with each. The list grows until the test ends (`conftest.py`)."""
    collector = _Collector(then)
    logging.getLogger("artel").addHandler(collector)
    logging.getLogger("artel").setLevel(logging.INFO)
    return collector.messages
