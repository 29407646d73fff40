"""The keys of another tool's configuration: each is carried into the run file, agrees with artel, or is reported."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from artel.config.converters.conversion import Converted as Converted
from artel.config.schema.quantities import read_count, read_number
from artel.config.yaml_lines import Key, parse
from artel.errors import InputError, Problem

Reader = Callable[[Any], Any]
"""From a written value to a value of the run file; raises ValueError(`what is wrong; the remedy`)."""

_SECRET = re.compile(r"(hub|hf|ms|om|auth)_(hub_)?token$|(api_key|secret|password)$")
_EMPTY, _OFF = "is empty", "is off"


class OldKeys:
    """A configuration while it is converted into a run file.

    Keys are flat (`lr`, `trainer.learning_rate`). `defaults` are the tool's own defaults;
    `tree` is the beginning of the run file. Problems are collected, so that all are reported together.
    """

    def __init__(self, place: str, defaults: dict[str, Any], tree: dict[str, Any]) -> None:
        self.place = place
        self.problems: list[Problem] = []
        self._refused: set[Problem] = set()
        self._values = dict(defaults)
        self._written: dict[str, tuple[str, str]] = {}  # of each key in the file: `file:line`, and the value for people
        self._below: dict[str, dict[str, None]] = {}  # of each section, the keys of the file within it
        self._given: dict[str, Any] = {}  # the values of the file alone, without the defaults
        self._read_keys: set[str] = set()
        self._carried: dict[str, dict[str, None]] = {}
        self._same: dict[str, str] = {}
        self._left: dict[str, list[str]] = {}
        self._lines: list[str] = []
        self._comments: dict[str, str] = {}
        self._tree = tree

    def give(self, key: str, value: Any, written: str, place: str) -> None:
        """Add a key of the file, which stands at `place` (`file:line`). A value of None means that there is none."""
        if value is not None:
            self._values[key] = value
        if key not in self._written:
            section = key
            while section := section.rpartition(".")[0]:
                self._below.setdefault(section, {})[key] = None
        self._written[key] = (place, written)
        self._given[key] = value

    def give_value(self, key: str, value: Any) -> None:
        """Take a value in another form than it is written in."""
        self._values[key] = value
        if key in self._given:
            self._given[key] = value

    def given(self) -> list[str]:
        return list(self._written)

    def has(self, key: str) -> bool:
        """True where the file has the key with a value."""
        return self._given.get(key) is not None

    def place_of(self, key: str) -> str:
        """`file:line` of a key in the file."""
        return self._written[key][0] if key in self._written else self.place

    def raw(self, key: str) -> Any:
        """The value as it is in the file, of any type; None when there is none."""
        self._read_keys.add(key)
        return self._values.get(key)

    def peek(self, key: str) -> Any:
        """The value as it is in the file, which is not thereby read."""
        return self._values.get(key)

    def below(self, section: str) -> list[str]:
        """The keys of a section in the file: `trainer.seed` and so on for `trainer`."""
        return list(self._below.get(section, ()))

    def unasked(self, section: str = "") -> list[str]:
        """The unknown keys in the file, or in a section of it: neither read nor left out."""
        keys = self._below.get(section, {}) if section else self._written
        return [key for key in keys if key not in self._read_keys]

    def read(self, key: str, read: Reader) -> Any:
        """The value, or the tool's default; None when there is neither, or the value is wrong."""
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
        if problem not in self._refused:  # a key may be read more than once
            self._refused.add(problem)
            self.problems.append(problem)

    def put(self, dotted: str, value: Any, *keys: str) -> None:
        """Write a key of the run file, which `keys` of the old one decided."""
        *sections, name = dotted.split(".")
        section_values = self._tree
        for section in sections:
            section_values = section_values.setdefault(section, {})
        section_values[name] = value
        self.decided(dotted, *keys)

    def value(self, dotted: str) -> Any:
        """The value of a key of the run file; None where it has none yet."""
        value: Any = self._tree
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def change(self, dotted: str, value: Any, reason: str) -> None:
        """Write a key of the run file in another way than the old keys that decided it say, and report it of them."""
        self.put(dotted, value)
        keys = [key for key, decided in self._carried.items() if dotted in decided]
        for key in keys:
            self.leave(key, reason)
        if not keys:
            self.tell(f"{dotted}: {reason}")

    def decided(self, dotted: str, *keys: str) -> None:
        """Note that `keys` of the old file decided a key of the run file."""
        for key in keys:
            self._read_keys.add(key)
            if self.has(key):
                self._carried.setdefault(key, {})[dotted] = None

    def carry(self, key: str, dotted: str, read: Reader) -> None:
        value = self.read(key, read)
        if value is not None:
            self.put(dotted, value, key)

    def leave(self, key: str, reason: str) -> None:
        """Report that the key, if it is in the file, is not carried over; or not as it was meant, if it is.

        Several reasons are all given; a key that was found to agree is left alone.
        """
        self._read_keys.add(key)
        if self.has(key) and key not in self._same and reason not in self._left.setdefault(key, []):
            self._left[key].append(reason)

    def agree(self, key: str, reason: str) -> None:
        """Note that artel does of itself what the key says, unless it was carried over or left already."""
        self._read_keys.add(key)
        if self.has(key) and key not in self._left and key not in self._carried:
            self._same[key] = reason

    def leave_if_on(self, key: str, reason: str) -> None:
        """`leave` a key, unless its value says that nothing is to be done."""
        if self.has(key) and self._given[key] in (False, "", [], {}):  # 0 is False too
            self.agree(key, _OFF)
        else:
            self.leave(key, reason)

    def forget(self, key: str) -> None:
        """Take back what was reported of a key: it turned out to be carried over as it was meant."""
        self._left.pop(key, None)

    def tell(self, line: str) -> None:
        """Report something about what the file does not set."""
        self._lines.append(line)

    def comment(self, dotted: str, text: str) -> None:
        """Mark a key of the run file that the user must fill in; the first comment of a key stays."""
        self._comments.setdefault(dotted, text)

    def converted(self, order: tuple[str, ...]) -> Converted:
        """The run file, its sections in the order in which people read them. Raises InputError with all problems."""
        if self.problems:
            raise InputError(self.problems)
        for key in self._written:
            if key in self._carried or key in self._left or key in self._same:
                continue
            if self.has(key):
                self.leave(key, "has no bearing on this run")
            else:
                self._same[key] = _EMPTY
        return Converted(
            run={key: self._tree[key] for key in order if key in self._tree},
            not_carried=[self._line(key) for key in self._written if key in self._left and key not in self._carried],
            differs=[
                *(self._line(key) for key in self._written if key in self._left and key in self._carried),
                *self._lines,
            ],
            same={key: self._same[key] for key in self._written if key in self._same and key not in self._carried},
            carried={key: list(self._carried[key]) for key in self._written if key in self._carried},
            comments=self._comments,
        )

    def _line(self, key: str) -> str:
        place, written = self._written[key]
        return f"{place}: {key} = {written}: {'; '.join(self._left[key])}"


class YamlKeys(OldKeys):
    """The keys of a YAML file, flat: `lora.r`, `datasets.0.path`. A list of plain values is one value."""

    def __init__(self, text: str, place: str, defaults: dict[str, Any]) -> None:
        """Raises InputError for what is no YAML."""
        super().__init__(place, defaults, {})
        tree, places = parse(text, place)
        for key, value in flat(tree):
            dotted = ".".join(map(str, key))
            self.give(dotted, value, shown(value, dotted), places.get(key, place))

    def count(self, section: str) -> int:
        """How many members the list `section` has."""
        depth = section.count(".") + 1
        numbers = {key.split(".")[depth] for key in self.below(section)}
        return len({number for number in numbers if number.isdecimal()})


def flat(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """(key, value) of each value that has no section below it; options that are handed on are one value."""
    members: Any = None
    if isinstance(value, dict) and value and not (key and key[-1] in _WHOLE):
        members = value.items()
    elif isinstance(value, list) and value and all(isinstance(member, dict) and member for member in value):
        members = enumerate(value)
    if members is None:
        if key:
            yield key, value
        return
    for name, member in members:
        yield from flat(member, (*key, name))


_WHOLE = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "optim_args")


class Section:
    """A part of a configuration, whose keys are asked for by the names that another tool gives them.

    `names` are the part's own names, of those that differ: {"optim": "optimizer"}.
    """

    def __init__(self, old: OldKeys, prefix: str = "", names: dict[str, str] | None = None) -> None:
        self.old = old
        self._prefix = prefix
        self._names = names or {}

    def key(self, name: str) -> str:
        """The key as it stands in the file."""
        return self._prefix + self._names.get(name, name)

    def own_name(self, name: str) -> str:
        """Its name for people, within its part."""
        return self._names.get(name, name)

    def has(self, name: str) -> bool:
        return self.old.has(self.key(name))

    def raw(self, name: str) -> Any:
        return self.old.raw(self.key(name))

    def peek(self, name: str) -> Any:
        return self.old.peek(self.key(name))

    def read(self, name: str, read: Reader) -> Any:
        return self.old.read(self.key(name), read)

    def refuse(self, name: str, error: str) -> None:
        self.old.refuse(self.key(name), error)

    def put(self, dotted: str, value: Any, *names: str) -> None:
        self.old.put(dotted, value, *map(self.key, names))

    def carry(self, name: str, dotted: str, read: Reader) -> None:
        self.old.carry(self.key(name), dotted, read)

    def leave(self, name: str, reason: str) -> None:
        self.old.leave(self.key(name), reason)

    def agree(self, name: str, reason: str) -> None:
        self.old.agree(self.key(name), reason)

    def unasked(self) -> list[str]:
        """The names of the part's keys that nobody has read."""
        keys = self.old.unasked(self._prefix.removesuffix("."))
        return [key.removeprefix(self._prefix) for key in keys]


def top_level_keys(text: str) -> set[str]:
    """The keys at the beginning of lines, also of a file that is not valid YAML."""
    return {line.partition(":")[0].strip("\"' ") for line in text.splitlines() if ":" in line and line[:1].strip()}


def shown(value: Any, key: str = "") -> str:
    """A value on one line, cut off after 80 characters: chat templates are long. Of a secret nothing is shown."""
    if _SECRET.search(key) and isinstance(value, str):
        return "***"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"


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


def up_to_one(value: object) -> float:
    number = a_number(value)
    if not 0 <= number <= 1:
        raise ValueError(f"{value!r} is not a share from 0 to 1")
    return number


def names(value: object) -> list[str]:
    """A list of names; a single one needs no brackets."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{value!r} is not a list of names")
    return listed
