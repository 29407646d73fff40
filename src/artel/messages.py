"""Messages for people: records of the logger `artel`, and phrases that a run stores for its report.

A message is printed only inside `route_messages`, which the command line and functions of `import artel` enter, or by a
handler that the program itself has added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from string import Formatter
from typing import Any, Self

logger = logging.getLogger("artel")
_is_silenced = ContextVar("is_silenced", default=False)
logger.addFilter(lambda record: record.levelno >= logging.WARNING or not _is_silenced.get())

_MAX_SPEC_CHARACTERS = 5


class PhraseFormatter(Formatter):
    """Formats `{name}` and `{name:spec}` from named arguments. The spec of a list is its separator, by default `, `.

    A template may come from the file of a hostile run, so it cannot read attributes or fill the memory. KeyError is
    raised if an argument is used twice, ValueError if a spec has over five characters or `!r` is used on a non-text.
    """

    def fill(self, template: str, arguments: dict[str, Any]) -> str:
        return self.vformat(template, (), dict(arguments))

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs.pop(field_name), field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion and type(value) is not str:
            raise ValueError(f"!{conversion} is not for {type(value).__name__}")
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if len(format_spec) > _MAX_SPEC_CHARACTERS:
            raise ValueError(f"the format {format_spec!r} is too long")
        if isinstance(value, list):
            return (format_spec or ", ").join(self.format_field(item, "") for item in value)
        return super().format_field(value, format_spec)


class Phrase(str):
    """An English text that keeps its template and arguments, so that the report can show it in another language.

    `Phrase("{count:,} of {names: or }", count=2000, names=["a", "b"])` equals "2,000 of a or b". Arguments are numbers,
    texts, further phrases, which are translated with it, or lists of these. Without arguments the template is the text.
    """

    template: str
    arguments: dict[str, Any]

    def __new__(cls, template: str, /, **arguments: Any) -> Self:
        """Raise KeyError if an argument is missing or used twice, ValueError if one does not fit its format."""
        text = PhraseFormatter().fill(template, arguments) if arguments else template
        phrase = super().__new__(cls, text)
        phrase.template, phrase.arguments = template, arguments
        return phrase


def to_json(value: Any) -> Any:
    """Return a value with each phrase as {"text": template, "arguments": {…}}, also inside lists and dictionaries."""
    if isinstance(value, Phrase):
        return {"text": value.template, "arguments": to_json(value.arguments)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    """Return a value with the phrases that `to_json` wrote. A damaged phrase becomes its template."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    parsed = {key: from_json(item) for key, item in value.items()}
    if parsed.keys() != {"text", "arguments"} or not isinstance(parsed["text"], str):
        return parsed
    try:
        return Phrase(parsed["text"], **parsed["arguments"])
    except (LookupError, OverflowError, TypeError, ValueError):
        return parsed["text"]


class _Printer(logging.Handler):
    def __init__(self, print_record: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._print = print_record

    def emit(self, record: logging.LogRecord) -> None:
        self._print(record)


@contextmanager
def route_messages(print_record: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Send messages only to `print_record` inside the block."""
    original = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [_Printer(print_record)], False
    logger.setLevel(logger.level or logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate, level = original
        logger.setLevel(level)


@contextmanager
def silence_messages() -> Iterator[None]:
    """Log only warnings inside the block, in this thread."""
    token = _is_silenced.set(True)
    try:
        yield
    finally:
        _is_silenced.reset(token)
