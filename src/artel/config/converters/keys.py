"""What every conversion of an old configuration needs: its keys, each carried into the run file or told as left out."""

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
    """An old configuration while it is turned into a run file.

    Keys are flat (`lr`, `trainer.learning_rate`). `defaults` are what the old script does where its file is silent;
    `tree` is what the run file begins with. Problems are gathered, so that all are told at once.
    """

    def __init__(self, place: str, defaults: dict[str, Any], tree: dict[str, Any]) -> None:
        self.place = place
        self.problems: list[Problem] = []
        self._values = dict(defaults)
        self._written: dict[str, tuple[str, str]] = {}  # of each given key: `file:line` and the value as people read it
        self._asked: set[str] = set()
        self._left: dict[str, str] = {}
        self._lines: list[str] = []
        self._tree = tree

    def give(self, key: str, value: Any, written: str, where: str) -> None:
        """A key that the file gives; a value of None is as good as none. `where` is `file:line`."""
        self._values[key] = value
        self._written[key] = (where, written)

    def given(self) -> list[str]:
        return list(self._written)

    def has(self, key: str) -> bool:
        """Whether the file gives the key, and a value."""
        return key in self._written and self._values[key] is not None

    def raw(self, key: str) -> Any:
        """The value as it is written, whatever it is; None when there is none."""
        self._asked.add(key)
        return self._values.get(key)

    def below(self, section: str) -> list[str]:
        """The given keys of a section: those of `trainer` are `trainer.seed` and so on."""
        return [key for key in self._written if key.startswith(f"{section}.")]

    def unasked(self) -> list[str]:
        """The given keys that were neither read nor left: those that nobody knows."""
        return [key for key in self._written if key not in self._asked]

    def read(self, key: str, read: Reader) -> Any:
        """The value, the script's default when the key is absent; None when there is neither, or it is wrong."""
        self._asked.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            self.refuse(key, str(error))
            return None

    def refuse(self, key: str, error: str) -> None:
        """The key's value is wrong: `what is wrong; the remedy`."""
        where, _ = self._written.get(key, (self.place, ""))
        what, _, fix = error.partition("; ")
        problem = Problem(f"{where}: {key}", what, fix)
        if problem not in self.problems:  # a key may be read more than once
            self.problems.append(problem)

    def put(self, dotted: str, value: Any) -> None:
        *sections, name = dotted.split(".")
        here = self._tree
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value

    def carry(self, key: str, dotted: str, read: Reader) -> None:
        value = self.read(key, read)
        if value is not None:
            self.put(dotted, value)

    def leave(self, key: str, reason: str) -> None:
        """Tell that the key is not carried over, when the file gives it."""
        self._asked.add(key)
        if key in self._written:
            self._left[key] = f"{key} = {self._written[key][1]}: {reason}"

    def tell(self, line: str) -> None:
        """Tell what the file does not say and the run file cannot either."""
        self._lines.append(line)

    def run_file(self, order: tuple[str, ...]) -> dict[str, Any]:
        """The sections in the order in which people read them."""
        return {key: self._tree[key] for key in order if key in self._tree}

    def left_in_order(self) -> list[str]:
        """`key = value: reason` of the keys left, as they stand in the file, and what else there was to tell."""
        return [*(self._left[key] for key in self._written if key in self._left), *self._lines]


def did_you_mean(name: str, known: set[str]) -> str:
    """`; did you mean NAME?`, or nothing where the name is known itself or none is near."""
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
    """As written: 2 stays a whole number."""
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
    """A list of names; one alone may stand without brackets."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{value!r} is not a list of names")
    return found
