"""Fields of a JSON line, by simdjson if it is installed (the extra `fast`), else by orjson."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import orjson


def line_parser(text: str, column: str) -> Callable[[bytes], Any]:
    """A parser of lines with a string in the field `text` and an object, a string or nothing in the field `column`.

    For such a line it returns a dictionary of these two fields; for any other line everything in it. simdjson creates
    Python objects for these fields only, and parses the rest faster. Raises orjson.JSONDecodeError.
    """
    if find_spec("simdjson") is None:
        return orjson.loads
    import simdjson

    parser, Object = simdjson.Parser(), simdjson.Object

    def parse(line: bytes) -> Any:
        # No all() over the values and no suppress(): they took as long as the rest of a short line.
        try:
            entry = parser.parse(line)
            if isinstance(entry, Object):
                names = list(entry)
                # Of two fields with one name simdjson returns the first, orjson the last.
                is_unique = names.count(text) == 1 and names.count(column) <= 1
                if is_unique and isinstance(content := entry[text], str):
                    if column not in names:
                        return {text: content}
                    value = entry[column]
                    if isinstance(value, Object):
                        return {text: content, column: value.as_dict()}
                    if isinstance(value, str):
                        return {text: content, column: value}
        except (ValueError, RuntimeError):  # simdjson has no floats for large integers; orjson reports what is wrong
            pass
        return orjson.loads(line)

    return parse
