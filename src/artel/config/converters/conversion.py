"""Turn the configuration of another tool into a run file, and account for each of its keys.

A converter is one file. It has a `KeyTable`: which keys are carried over unchanged, by which reader, and the reasons of
those that are not; and a function for what a table cannot say, such as a batch that two keys decide together. A
`Conversion` holds the keys of one configuration, reads the table, and collects the notes.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import yaml

from artel.config.converters.readers import Reader
from artel.config.other_names import OTHER_NAMES
from artel.config.yaml_lines import Key, parse, read_yaml
from artel.errors import InputError, Problem

_SECRET = re.compile(r"(hub|hf|ms|om|auth)_(hub_)?token$|(api_key|secret|password)$")
_WIDEST = 1_000_000  # no value is folded, so that each key has one line
# Options that are handed on: a section of them is one value.
_WHOLE = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "optim_args")
# The order of a run file's sections; keys within them keep the order in which they were written.
_ORDER = tuple(
    "run seed objective data prepare tokenizer model span_qa masked chat preference train validate parallel checkpoint "
    "log track".split()
)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The keys of one tool: carried over, the same here, or left out.

    A reason may cover several keys, and patterns such as `dataloader_*`.

    Values that two keys decide, or that depend on others, are the converter's own code; its keys need a row only if
    there is a reason to give when the code carries nothing over.
    """

    carried: dict[str, tuple[str, Reader]] = field(default_factory=dict)
    """Key → key of the run file, and the reader of its value."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the tool that differ from artel's: they are written out, so that the run stays the same."""
    same: dict[str, str] = field(default_factory=dict)
    """Keys that need nothing here → what artel does anyway."""
    left: dict[str, str] = field(default_factory=dict)
    """Keys that are not carried over → why, and what to write instead."""

    def names(self) -> Iterator[str]:
        """The keys that are spelled out, without patterns."""
        yield from self.carried
        for names in (*self.same, *self.left):
            yield from (name for name in names.split() if "*" not in name)


@dataclass(frozen=True, slots=True)
class Converted:
    """A configuration of another tool as a run file, with what became of each of its keys."""

    run: dict[str, Any]
    not_carried: list[str]
    """`file:line: key = value: why, what instead` for each key that the run file does not hold."""
    differs: list[str]
    """The same for keys that mean something slightly different here, and notes on what the file leaves open."""
    same: dict[str, str]
    """Keys that need nothing, because artel does the same anyway or they are empty → the reason."""
    carried: dict[str, list[str]]
    """Keys that were carried over → the dotted keys of the run file that they decided."""
    comments: dict[str, str] = field(default_factory=dict)
    """Dotted keys of the run file → what the user has to fill in there."""


@dataclass(slots=True)
class _WrittenKey:
    """A key of the configuration, and what becomes of it."""

    name: str
    place: str
    shown: str
    value: Any
    decided: dict[str, None] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    same: str = ""


class Conversion:
    """A configuration while it is converted.

    Keys are flat (`lr`, `datasets.0.path`). `names` maps keys of the tool to the names that code shared with other
    tools asks for: `{"num_epochs": "num_train_epochs"}`; messages show the tool's own. Problems are collected, so that
    all are reported together.
    """

    def __init__(self, place: str, *tables: KeyTable, names: dict[str, str] | None = None) -> None:
        self.place = place
        self.problems: list[Problem] = []
        self.places: dict[str, str] = {}
        """`file:line` of keys and sections, by their own names."""
        self._tables = tables
        self._exact: dict[str, tuple[bool, str]] = {}
        self._patterns: list[tuple[str, bool, str]] = []
        for table in tables:
            for is_same, rows in ((True, table.same), (False, table.left)):
                for word, reason in ((word, reason) for words, reason in rows.items() for word in words.split()):
                    if "*" in word:
                        self._patterns.append((word, is_same, reason))
                    else:
                        self._exact.setdefault(word, (is_same, reason))
        self._names = names or {}
        self._own_names = {theirs: own for own, theirs in self._names.items()}
        self._values = {key: value for table in reversed(tables) for key, value in table.defaults.items()}
        self._keys: dict[str, _WrittenKey] = {}
        self._sections: dict[str, list[str]] = {}
        self._asked: set[str] = set()
        self._known: dict[str, set[str]] = {}
        self._notes: list[str] = []
        self._comments: dict[str, str] = {}
        self._run: dict[str, Any] = {}

    @classmethod
    def of_yaml(
        cls,
        text: str,
        place: str,
        *tables: KeyTable,
        names: dict[str, str] | None = None,
        is_value: Callable[[Key], bool] = lambda key: key[-1] in _WHOLE,
    ) -> Conversion:
        """Read YAML; a section that `is_value` is not flattened. Raises InputError if the text is not YAML."""
        old = cls(place, *tables, names=names)
        tree, places = parse(text, place)
        old.places = {".".join(map(str, key)): line for key, line in places.items()}
        for parts, value in flat(tree, is_value):
            key = ".".join(map(str, parts))
            old.add(key, value, shown(value, key), old.places.get(key, place))
        return old

    def add(self, name: str, value: Any, written: str, place: str) -> str:
        """Add a key of the file, and return the name that code asks for. A value of None means that it is empty.

        `written`: the value as messages show it.
        """
        key = self._names.get(name) or (f"{name}?" if name in self._own_names else name)
        if key not in self._keys:
            section = key
            while section := section.rpartition(".")[0]:
                self._sections.setdefault(section, []).append(key)
        self._keys[key] = _WrittenKey(name, place, written, value)
        if value is not None:
            self._values[key] = value
        return key

    # Reading

    def given(self) -> KeysView[str]:
        """The keys of the file."""
        return self._keys.keys()

    def knows(self, key: str) -> bool:
        """True if the converter reads the key or has a reason for it."""
        return key in self._asked or key in self._exact

    def within(self, section: str) -> list[str]:
        """The keys of a section in the file: `trainer.seed` and so on for `trainer`."""
        return list(self._sections.get(section, ()))

    def members(self, section: str) -> int:
        """The number of members of the list `section`."""
        depth = section.count(".") + 1
        numbers = {key.split(".")[depth] for key in self._sections.get(section, ())}
        return sum(number.isdecimal() for number in numbers)

    def has(self, key: str) -> bool:
        """True if the file has the key with a value."""
        return key in self._keys and self._keys[key].value is not None

    def raw(self, key: str) -> Any:
        """Return the value as it is in the file, or the tool's default, or None."""
        self._asked.add(key)
        return self._values.get(key)

    def get(self, key: str, read: Reader) -> Any:
        """Return the value as `read` converts it, or the tool's default. None without a value, or if it is wrong."""
        value = self.raw(key)
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            self.refuse(key, *str(error).partition("; ")[::2])
            return None

    def replace(self, key: str, value: Any) -> None:
        """Take another value in place of the one in the file."""
        self._values[key] = value
        if key in self._keys:
            self._keys[key].value = value

    def own_name(self, key: str) -> str:
        """The name that the tool itself has for a key."""
        return self._keys[key].name if key in self._keys else self._own_names.get(key, key)

    def place_of(self, key: str) -> str:
        """`file:line` of a key or section in the file."""
        return self._keys[key].place if key in self._keys else self.places.get(key, self.place)

    # Writing

    def carry_table(self) -> None:
        """Write what the tables say is carried over."""
        for table in self._tables:
            for key, (dotted, read) in table.carried.items():
                self.carry(key, dotted, read)

    def carry(self, key: str, dotted: str, read: Reader) -> None:
        """Write the key's value, or the tool's default, as `dotted` of the run file."""
        value = self.get(key, read)
        if value is not None:
            self.put(dotted, value, key)

    def put(self, dotted: str, value: Any, *keys: str) -> None:
        """Write a key of the run file, which `keys` of the old one decided."""
        *sections, name = dotted.split(".")
        section_values = self._run
        for section in sections:
            section_values = section_values.setdefault(section, {})
        section_values[name] = value
        self.decided(dotted, *keys)

    def decided(self, dotted: str, *keys: str) -> None:
        """Note that `keys` of the old file decided a key of the run file."""
        self._asked.update(keys)
        for key in filter(self.has, keys):
            self._keys[key].decided[dotted] = None

    def written(self, dotted: str) -> Any:
        """Return the value of a key of the run file so far, or None."""
        value: Any = self._run
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def change(self, dotted: str, value: Any, reason: str) -> None:
        """Overwrite a key of the run file, and report it for the keys that decided it."""
        self.put(dotted, value)
        keys = [key for key, written in self._keys.items() if dotted in written.decided]
        for key in keys:
            self.leave(key, reason)
        if not keys:
            self.note(f"{dotted}: {reason}")

    # Reporting

    def leave(self, key: str, reason: str) -> None:
        """Report that the key, if it is in the file, is not carried over; or with a difference, if it is.

        Several reasons are all reported. A key that agrees with artel stays so.
        """
        self._asked.add(key)
        if self.has(key) and not self._keys[key].same and reason not in self._keys[key].reasons:
            self._keys[key].reasons.append(reason)

    def agree(self, key: str, reason: str) -> None:
        """Note that artel does anyway what the key says, unless it was carried over or reported already."""
        self._asked.add(key)
        if self.has(key) and not self._keys[key].reasons and not self._keys[key].decided:
            self._keys[key].same = reason

    def leave_unless(self, agrees: object, key: str, reason: str) -> None:
        """Note the reason as one of agreement if `agrees` is true, else as one why the key is not carried over."""
        (self.agree if agrees else self.leave)(key, reason)

    def leave_if_on(self, key: str, reason: str) -> None:
        """Report a key, unless its value switches it off."""
        if self.has(key) and self._keys[key].value in (False, "", [], {}):  # 0 equals False
            self.agree(key, "is off")
        else:
            self.leave(key, reason)

    def refuse(self, key: str, what: str, fix: str = "") -> None:
        """Report a wrong value."""
        self.problems.append(Problem(f"{self.place_of(key)}: {self.own_name(key)}", what, fix))

    def note(self, line: str) -> None:
        """Report something that the file does not set."""
        self._notes.append(line)

    def comment(self, dotted: str, text: str) -> None:
        """Mark a key of the run file that the user must fill in. The first comment of a key stays."""
        if text:
            self._comments.setdefault(dotted, text)

    def finish(self) -> Converted:
        """Return the run file and its notes. Raises InputError with all problems."""
        if self.problems:
            raise InputError(list(dict.fromkeys(self.problems)))  # a key may be read more than once
        for key, written in self._keys.items():
            if not (written.decided or written.reasons or written.same):
                self._settle(key, written)
        keys = self._keys.values()
        return Converted(
            run={key: self._run[key] for key in _ORDER if key in self._run},
            not_carried=[_line(key) for key in keys if key.reasons and not key.decided],
            differs=[*(_line(key) for key in keys if key.reasons and key.decided), *self._notes],
            same={key.name: key.same for key in keys if key.same and not key.decided},
            carried={key.name: list(key.decided) for key in keys if key.decided},
            comments=self._comments,
        )

    def _settle(self, key: str, written: _WrittenKey) -> None:
        """Account for a key that the converter's code left alone, by the tables."""
        if written.value is None:
            written.same = "is empty"
            return
        matching = (row[1:] for row in self._patterns if fnmatchcase(key, row[0]))
        row = self._exact.get(key) or next(matching, None)
        if row is not None and row[0]:
            written.same = row[1]
        elif row is not None:
            self.leave_if_on(key, row[1])
        elif key in self._asked:
            self.leave_if_on(key, "does not affect this run")
        elif written.name in OTHER_NAMES:  # another name for something that artel has
            self.leave(key, f"in a run file this is {OTHER_NAMES[written.name].replace('.0.', '.')}")
        else:
            self.leave_if_on(key, f"artel has no equivalent{self._meant(written.name)}")

    def _meant(self, own_name: str) -> str:
        """`; did you mean NAME?`, or nothing if no key of the same section is similar."""
        if not self._known:
            for key in (*self._asked, *(name for table in self._tables for name in table.names())):
                section, _, name = _numberless(self._own_names.get(key, key)).rpartition(".")
                self._known.setdefault(section, set()).add(name)
        section, _, name = _numberless(own_name).rpartition(".")
        return did_you_mean(name, self._known.get(section, ()))


def _numberless(key: str) -> str:
    return re.sub(r"\.\d+(?=\.)", "", key)


def _line(key: _WrittenKey) -> str:
    return f"{key.place}: {key.name} = {key.shown}: {'; '.join(key.reasons)}"


def flat(
    value: Any, is_value: Callable[[Key], bool] = lambda key: key[-1] in _WHOLE, key: Key = ()
) -> Iterator[tuple[Key, Any]]:
    """Yield (key, value) of each value without a section below it. A list of plain values is one value."""
    members: Any = None
    if key and is_value(key):
        yield key, value
    elif isinstance(value, dict) and value:
        members = value.items()
    elif isinstance(value, list) and any(isinstance(member, dict) and member for member in value):
        members = enumerate(value)
    elif key:
        yield key, value
    for name, member in members or ():
        yield from flat(member, is_value, (*key, name))


def top_level_keys(text: str) -> set[str]:
    """The keys at the beginning of lines, also of a file that is not valid YAML."""
    return {line.partition(":")[0].strip("\"' ") for line in text.splitlines() if ":" in line and line[:1].strip()}


def shown(value: Any, key: str = "") -> str:
    """A value on one line, cut off after 80 characters, since chat templates are long. Secrets are not shown."""
    if _SECRET.search(key) and isinstance(value, str):
        return "***"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?`, or nothing if the name itself is known or none is similar."""
    near = [] if name in (candidates := sorted(known)) else difflib.get_close_matches(name, candidates, 1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


def with_comments(run: dict[str, Any], comments: dict[str, str]) -> str:
    """The YAML of a run file, with each of `comments` above the dotted key it belongs to."""
    text = yaml.safe_dump(run, sort_keys=False, allow_unicode=True, width=_WIDEST)
    _, places, _ = read_yaml(text, "")
    above: dict[int, str] = {}
    for dotted, comment in comments.items():
        key = tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))
        if key in places:
            above[int(places[key].rpartition(":")[2])] = comment
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if number in above:
            lines.append(f"{line[: len(line) - len(line.lstrip())]}# {above[number]}")
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)
