"""The keys of another tool's configuration: each is carried into the run file or reported as left out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

from artel.config.schema.quantities import read_count, read_number
from artel.errors import Problem

Reader = Callable[[Any], Any]
"""From a written value to a value of the run file; raises ValueError(`what is wrong; the remedy`)."""


class OldKeys:
    """A configuration while it is converted into a run file.

    Keys are flat (`lr`, `trainer.learning_rate`). `defaults` are the script's own defaults;
    `tree` is the beginning of the run file. Problems are collected, so that all are reported together.
    """

    def __init__(self, place: str, defaults: dict[str, Any], tree: dict[str, Any]) -> None:
        self.place = place
        self.problems: list[Problem] = []
        self._values = dict(defaults)
        self._written: dict[str, tuple[str, str]] = {}  # of each key in the file: `file:line`, and the value for people
        self._read_keys: set[str] = set()
        self._left: dict[str, str] = {}
        self._lines: list[str] = []
        self._tree = tree

    def give(self, key: str, value: Any, written: str, place: str) -> None:
        """Add a key of the file, which stands at `place` (`file:line`). A value of None means that there is none."""
        self._values[key] = value
        self._written[key] = (place, written)

    def given(self) -> list[str]:
        return list(self._written)

    def has(self, key: str) -> bool:
        """True where the file has the key with a value."""
        return key in self._written and self._values[key] is not None

    def raw(self, key: str) -> Any:
        """The value as it is in the file, of any type; None when there is none."""
        self._read_keys.add(key)
        return self._values.get(key)

    def below(self, section: str) -> list[str]:
        """The keys of a section in the file: `trainer.seed` and so on for `trainer`."""
        return [key for key in self._written if key.startswith(f"{section}.")]

    def unasked(self) -> list[str]:
        """The unknown keys in the file: neither read nor left out."""
        return [key for key in self._written if key not in self._read_keys]

    def read(self, key: str, read: Reader) -> Any:
        """The value, or the script's default; None when there is neither, or the value is wrong."""
        self._read_keys.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            self.refuse(key, str(error))
            return None

    def refuse(self, key: str, error: str) -> None:
        """Report a wrong value: `what is wrong; the remedy`."""
        place, _ = self._written.get(key, (self.place, ""))
        what, _, fix = error.partition("; ")
        problem = Problem(f"{place}: {key}", what, fix)
        if problem not in self.problems:  # a key may be read more than once
            self.problems.append(problem)

    def put(self, dotted: str, value: Any) -> None:
        *sections, name = dotted.split(".")
        section_values = self._tree
        for section in sections:
            section_values = section_values.setdefault(section, {})
        section_values[name] = value

    def carry(self, key: str, dotted: str, read: Reader) -> None:
        value = self.read(key, read)
        if value is not None:
            self.put(dotted, value)

    def leave(self, key: str, reason: str) -> None:
        """Report that the key, if it is in the file, is not carried over."""
        self._read_keys.add(key)
        if key in self._written:
            self._left[key] = f"{key} = {self._written[key][1]}: {reason}"

    def tell(self, line: str) -> None:
        """Report something about what the file does not set."""
        self._lines.append(line)

    def run_file(self, order: tuple[str, ...]) -> dict[str, Any]:
        """The sections in the order in which people read them."""
        return {key: self._tree[key] for key in order if key in self._tree}

    def left_in_order(self) -> list[str]:
        """`key = value: reason` for each key left out, in the file's order, then the other reports."""
        return [*(self._left[key] for key in self._written if key in self._left), *self._lines]


def did_you_mean(name: str, known: set[str]) -> str:
    """`; did you mean NAME?`, or nothing where the name itself is known or none is similar."""
    near = [] if name in known else difflib.get_close_matches(name, sorted(known), 1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


def a_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a path")
    return value


def a_name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a name")
    return value


def a_number(value: object) -> float:
    """A number; 2 stays an integer."""
    number = read_number(value)
    return int(number) if number.is_integer() else number


def above_zero(value: object) -> float:
    number = a_number(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{value!r} is not above zero")
    return number


def at_least_one(value: object) -> int:
    count = read_count(value)
    if count < 1:
        raise ValueError(f"{value!r} is below 1; write 1 or more")
    return count


def one_of(choices: dict[str, Any]) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return choices[value]

    return read


def a_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def from_zero(value: object) -> int:
    count = read_count(value)
    if count < 0:
        raise ValueError(f"{value!r} is below zero")
    return count


def not_negative(value: object) -> float:
    number = a_number(value)
    if number < 0:
        raise ValueError(f"{value!r} is below zero")
    return number


def a_share(value: object) -> float:
    number = a_number(value)
    if not 0 <= number < 1:
        raise ValueError(f"{value!r} is not a share from 0 to below 1")
    return number


def names(value: object) -> list[str]:
    """A list of names; a single one needs no brackets."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{value!r} is not a list of names")
    return listed
