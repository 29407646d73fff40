"""Fields of a JSON line that a source asks for, by simdjson where it is installed (the extra `fast`), or by orjson."""

from __future__ import annotations

from collections.abc import Callable
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

    parser, Object = simdjson.Parser(), simdjson.Object

    def parse(line: bytes) -> Any:
        # Written out: all() over the values and suppress() took as long as all the rest of a short line.
        try:
            entry = parser.parse(line)
            if isinstance(entry, Object):
                names = list(entry)
                # Of two of one name it gives the first, and orjson the last.
                once = names.count(text) == 1 and names.count(column) <= 1
                if once and isinstance(content := entry[text], str):
                    if column not in names:
                        return {text: content}
                    value = entry[column]
                    if isinstance(value, Object):
                        return {text: content, column: value.as_dict()}
                    if isinstance(value, str):
                        return {text: content, column: value}
        except (ValueError, RuntimeError):  # it has no floats for large integers; what is wrong orjson says
            pass
        return orjson.loads(line)

    return parse
