"""Fields of a JSON line that a source asks for, by simdjson where it is installed (the extra `fast`), or by orjson."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import orjson


def parser_of(text: str, column: str) -> Callable[[bytes], Any]:
    """A parser of lines that have a string in the field `text` and an object, a string or nothing in `column`.

    Of such a line it gives these two fields, as a dictionary; of any other all that is there. Raises
    orjson.JSONDecodeError. simdjson makes Python's objects of the asked fields alone, and is faster at the rest.
    """
    if find_spec("simdjson") is None:
        return orjson.loads
    import simdjson

    parser = simdjson.Parser()

    def asked(line: bytes) -> dict[str, Any] | None:
        entry = parser.parse(line)
        if not isinstance(entry, simdjson.Object):
            return None
        names = list(entry)
        if names.count(text) != 1 or names.count(column) > 1:  # of two of one name it gives the first, not the last
            return None
        found: dict[str, Any] = {text: entry[text]}
        if column in names:
            value = entry[column]
            found[column] = value.as_dict() if isinstance(value, simdjson.Object) else value
        return found if all(isinstance(value, str | dict) for value in found.values()) else None

    def parse(line: bytes) -> Any:
        with suppress(ValueError, RuntimeError):  # it has no floats for large integers; what is wrong orjson says
            found = asked(line)
            if found is not None:
                return found
        return orjson.loads(line)

    return parse
