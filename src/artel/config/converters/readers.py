"""Parse values from the configuration files of other tools."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from artel.config.schema.quantities import read_count, read_number

Reader = Callable[[Any], Any]
"""Converts a value of another tool to one of the run file. Raises ValueError("what is wrong; what to write")."""


def number(value: object) -> float:
    """Read a number. 2 stays an integer."""
    parsed = read_number(value)
    return int(parsed) if parsed.is_integer() else parsed


def _create_reader(read: Reader, is_valid: Callable[[float], bool], error: str) -> Reader:
    """Return a reader that raises ValueError with `error` for numbers that are not valid."""

    def read_bounded(value: object) -> Any:
        parsed = read(value)
        if not is_valid(parsed):
            raise ValueError(f"{value!r} {error}")
        return parsed

    return read_bounded


positive_number = _create_reader(number, lambda n: 0 < n < math.inf, "is not above zero")
non_negative_number = _create_reader(number, lambda n: n >= 0, "is below zero")
fraction_below_one = _create_reader(number, lambda n: 0 <= n < 1, "is not a fraction (at least 0, below 1)")
fraction_up_to_one = _create_reader(number, lambda n: 0 <= n <= 1, "is not a fraction from 0 to 1")
positive_int = _create_reader(read_count, lambda n: n >= 1, "is below 1; write 1 or more")
at_least_two = _create_reader(read_count, lambda n: n >= 2, "is below 2; write at least 2")
non_negative_int = _create_reader(read_count, lambda n: n >= 0, "is below zero")


def one_of(choices: dict[str, Any] | str) -> Reader:
    """Return a reader that accepts only some words: a dict of words and their values, or one string of words."""
    values = dict(zip(choices.split(), choices.split(), strict=True)) if isinstance(choices, str) else choices

    def read(value: object) -> Any:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"{value!r} is not one of {', '.join(values)}")
        return values[value]

    return read


def text(value: object) -> str:
    """Read a non-empty string. Raise ValueError for other values."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a path or a name")
    return value


def flag(value: object) -> bool:
    """Read true or false. Raise ValueError for other values."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def switch(on: Any, off: Any) -> Reader:
    """Return a reader that maps true to `on` and false to `off`."""
    return lambda value: on if flag(value) else off


def names(value: object) -> list[str]:
    """Read a list of names, or a single name. Raise ValueError for other values."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{value!r} is not a list of names")
    return items
