"""Convert the configuration of another tool to a run file, and account for each of its keys.

A converter is one file. Its `KeyTable` lists the keys that are converted one to one, with a reader each, and the
reasons why other keys are not converted. A function handles what a table cannot express, such as a batch size that
depends on two keys. A `Conversion` holds the keys of one configuration, applies the tables and collects the notes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from artel.config.converters.readers import Reader
from artel.config.converters.yaml_text import flatten, format_value, is_opaque, suggest_similar
from artel.config.other_names import OTHER_NAMES
from artel.config.yaml_lines import Key, parse
from artel.errors import InputError, Problem

_SECTION_ORDER = tuple(
    "run seed objective data prepare tokenizer model span_qa masked chat preference train validate parallel checkpoint "
    "log track".split()
)
"""Order of sections in a converted run file. Other sections follow. Keys keep the order of the calls of `put`."""


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Handling of one tool's keys: converted, implied by artel, or unsupported.

    A reason may cover several keys, and patterns such as `dataloader_*`.

    Values that depend on several keys are converted by the converter's own code. Their keys need a row only to give a
    reason if that code does not convert them.
    """

    converted: dict[str, tuple[str, Reader]] = field(default_factory=dict)
    """Key → (key of the run file, reader of its value)."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the tool that differ from artel's. They are written to the run file, to keep the run the same."""
    implied: dict[str, str] = field(default_factory=dict)
    """Keys that need no equivalent → what artel already does."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Keys that are not converted → why, and what to write instead."""

    def names(self) -> Iterator[str]:
        """Yield the keys of all rows, without patterns."""
        yield from self.converted
        for names in (*self.implied, *self.unsupported):
            yield from (name for name in names.split() if "*" not in name)


@dataclass(frozen=True, slots=True)
class ConvertedConfig:
    """A converted configuration, with a report on each of its keys."""

    run: dict[str, Any]
    not_carried: list[str]
    """`file:line: key = value: why, what instead` for each key that was not converted."""
    differs: list[str]
    """Lines of the same form for keys with a slightly different meaning in artel, then general notes."""
    same: dict[str, str]
    """Keys that need no equivalent, because artel does the same anyway or they are empty → the reason."""
    carried: dict[str, list[str]]
    """Converted keys → the dotted keys of the run file that depend on them."""
    comments: dict[str, str] = field(default_factory=dict)
    """Dotted keys of the run file → what the user must fill in there."""


@dataclass(slots=True)
class _SourceKey:
    """A key of the tool's configuration, and how it is handled."""

    name: str
    location: str
    display_value: str
    value: Any
    converted_to: dict[str, None] = field(default_factory=dict)
    """Dotted keys of the run file, as an ordered set."""
    reasons: list[str] = field(default_factory=list)
    implied_by: str = ""


class Conversion:
    """State of a conversion: keys read so far, the run file being written, and the report.

    Keys are flat (`lr`, `datasets.0.path`). `names` maps keys of the tool to the names in code shared with other
    tools, e.g. `{"num_epochs": "num_train_epochs"}`; messages use the tool's own names. Problems are collected, to
    report all of them together.
    """

    def __init__(self, location: str, *tables: KeyTable, names: dict[str, str] | None = None) -> None:
        self.location = location
        """Name of the file, for messages."""
        self.problems: list[Problem] = []
        self.locations: dict[str, str] = {}
        """`file:line` of keys and sections, by the tool's names."""
        self._tables = tables
        self._exact: dict[str, tuple[bool, str]] = {}
        self._patterns: list[tuple[str, bool, str]] = []
        for table in tables:
            for is_implied, reasons in ((True, table.implied), (False, table.unsupported)):
                for name, reason in ((name, reason) for names, reason in reasons.items() for name in names.split()):
                    if "*" in name:
                        self._patterns.append((name, is_implied, reason))
                    else:
                        self._exact.setdefault(name, (is_implied, reason))
        self._names = names or {}
        self._tool_names = {name: tool_name for tool_name, name in self._names.items()}
        self._values = {key: value for table in reversed(tables) for key, value in table.defaults.items()}
        self._keys: dict[str, _SourceKey] = {}
        self._sections: dict[str, list[str]] = {}
        self._keys_read: set[str] = set()
        self._known_by_section: dict[str, set[str]] = {}
        self._notes: list[str] = []
        self._comments: dict[str, str] = {}
        self._run: dict[str, Any] = {}

    @classmethod
    def from_yaml(
        cls,
        text: str,
        location: str,
        *tables: KeyTable,
        names: dict[str, str] | None = None,
        is_value: Callable[[Key], bool] = is_opaque,
    ) -> Conversion:
        """Read YAML without flattening sections for which `is_value` is true. Raise InputError if it is invalid."""
        conversion = cls(location, *tables, names=names)
        tree, locations = parse(text, location)
        conversion.locations = {".".join(map(str, key)): line for key, line in locations.items()}
        for parts, value in flatten(tree, is_value):
            key = ".".join(map(str, parts))
            conversion.add(key, value, format_value(value, key), conversion.locations.get(key, location))
        return conversion

    def add(self, name: str, value: Any, display_value: str, location: str) -> str:
        """Add a key of the file, and return its name in code. A value of None means that it is empty.

        `display_value`: the value in messages.
        """
        key = self._names.get(name) or (f"{name}?" if name in self._tool_names else name)
        if key not in self._keys:
            section = key
            while section := section.rpartition(".")[0]:
                self._sections.setdefault(section, []).append(key)
        self._keys[key] = _SourceKey(name, location, display_value, value)
        if value is not None:
            self._values[key] = value
        return key

    # Reading

    def source_keys(self) -> KeysView[str]:
        """Return the keys of the file."""
        return self._keys.keys()

    def knows(self, key: str) -> bool:
        """True if the converter reads the key or has a reason for it."""
        return key in self._keys_read or key in self._exact

    def keys_in(self, section: str) -> list[str]:
        """Return the keys of a section in the file, e.g. `trainer.seed` for `trainer`."""
        return list(self._sections.get(section, ()))

    def list_length(self, section: str) -> int:
        """Return the number of items of the list `section`."""
        depth = section.count(".") + 1
        names = {key.split(".")[depth] for key in self._sections.get(section, ())}
        return sum(name.isdecimal() for name in names)

    def has(self, key: str) -> bool:
        """True if the file has the key with a value."""
        return key in self._keys and self._keys[key].value is not None

    def raw_value(self, key: str) -> Any:
        """Return the value in the file without conversion, the tool's default, or None."""
        self._keys_read.add(key)
        return self._values.get(key)

    def get(self, key: str, read: Reader) -> Any:
        """Return the value in the file or the tool's default, converted by `read`; None without a valid value."""
        value = self.raw_value(key)
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            self.add_problem(key, *str(error).partition("; ")[::2])
            return None

    def replace(self, key: str, value: Any) -> None:
        """Use another value instead of the one in the file."""
        self._values[key] = value
        if key in self._keys:
            self._keys[key].value = value

    def tool_name(self, key: str) -> str:
        """Return the tool's name of a key."""
        return self._keys[key].name if key in self._keys else self._tool_names.get(key, key)

    def locate(self, key: str) -> str:
        """Return the `file:line` of a key or section in the file."""
        return self._keys[key].location if key in self._keys else self.locations.get(key, self.location)

    # Writing

    def convert_table(self) -> None:
        """Convert the keys in `KeyTable.converted` of all tables."""
        for table in self._tables:
            for key, (target_key, read) in table.converted.items():
                self.convert(key, target_key, read)

    def convert(self, key: str, target_key: str, read: Reader) -> None:
        """Write the key's value, or the tool's default, as `target_key` to the run file."""
        value = self.get(key, read)
        if value is not None:
            self.put(target_key, value, key)

    def put(self, target_key: str, value: Any, *keys: str) -> None:
        """Write a key of the run file. `keys`: the tool's keys that it depends on."""
        *sections, name = target_key.split(".")
        section_values = self._run
        for section in sections:
            section_values = section_values.setdefault(section, {})
        section_values[name] = value
        self.mark_converted(target_key, *keys)

    def mark_converted(self, target_key: str, *keys: str) -> None:
        """Record that a key of the run file depends on `keys` of the tool."""
        self._keys_read.update(keys)
        for key in filter(self.has, keys):
            self._keys[key].converted_to[target_key] = None

    def output_value(self, target_key: str) -> Any:
        """Return the value of a key of the run file so far, or None."""
        value: Any = self._run
        for name in target_key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def change(self, target_key: str, value: Any, reason: str) -> None:
        """Overwrite a key of the run file, and report it for the keys that it depends on."""
        self.put(target_key, value)
        keys = [name for name, key in self._keys.items() if target_key in key.converted_to]
        for key in keys:
            self.report(key, reason)
        if not keys:
            self.note(f"{target_key}: {reason}")

    # Reporting

    def report(self, key: str, reason: str) -> None:
        """Report why a key was not converted, or how its meaning changed.

        Does nothing if the key is not in the file or is marked as implied. All reasons of a key are reported.
        """
        self._keys_read.add(key)
        if self.has(key) and not self._keys[key].implied_by and reason not in self._keys[key].reasons:
            self._keys[key].reasons.append(reason)

    def mark_implied(self, key: str, reason: str) -> None:
        """Record that artel already does what the key asks for. No effect on a converted or reported key."""
        self._keys_read.add(key)
        if self.has(key) and not self._keys[key].reasons and not self._keys[key].converted_to:
            self._keys[key].implied_by = reason

    def report_unless(self, is_implied: object, key: str, reason: str) -> None:
        """Call `mark_implied` if `is_implied` is true, otherwise `report`."""
        (self.mark_implied if is_implied else self.report)(key, reason)

    def report_if_on(self, key: str, reason: str) -> None:
        """Report a key, unless its value switches it off."""
        if self.has(key) and self._keys[key].value in (False, "", [], {}):  # 0 equals False
            self.mark_implied(key, "no effect: it is off")
        else:
            self.report(key, reason)

    def add_problem(self, key: str, what: str, fix: str = "") -> None:
        """Add a problem: an invalid value of a key."""
        self.problems.append(Problem(f"{self.locate(key)}: {self.tool_name(key)}", what, fix))

    def note(self, line: str) -> None:
        """Add a general note, e.g. on something that the file does not set."""
        self._notes.append(line)

    def comment(self, target_key: str, text: str) -> None:
        """Comment on a key of the run file that the user must fill in. Later comments on the same key are ignored."""
        if text:
            self._comments.setdefault(target_key, text)

    def finish(self) -> ConvertedConfig:
        """Return the run file and its notes. Raise InputError with all problems."""
        if self.problems:
            raise InputError(list(dict.fromkeys(self.problems)))  # a key may be read more than once
        for name, key in self._keys.items():
            if not (key.converted_to or key.reasons or key.implied_by):
                self._classify(name, key)
        keys = self._keys.values()
        return ConvertedConfig(
            run={key: self._run[key] for key in [*_SECTION_ORDER, *self._run] if key in self._run},
            not_carried=[_report_line(key) for key in keys if key.reasons and not key.converted_to],
            differs=[*(_report_line(key) for key in keys if key.reasons and key.converted_to), *self._notes],
            same={key.name: key.implied_by for key in keys if key.implied_by and not key.converted_to},
            carried={key.name: list(key.converted_to) for key in keys if key.converted_to},
            comments=self._comments,
        )

    def _classify(self, name: str, key: _SourceKey) -> None:
        """Handle a key by the tables, if the converter's code did not handle it."""
        if key.value is None:
            key.implied_by = "no effect: it is empty"
            return
        matching = (entry[1:] for entry in self._patterns if fnmatchcase(name, entry[0]))
        handling = self._exact.get(name) or next(matching, None)
        if handling is not None and handling[0]:
            key.implied_by = handling[1]
        elif handling is not None:
            self.report_if_on(name, handling[1])
        elif name in self._keys_read:
            self.report_if_on(name, "does not affect this run")
        elif key.name in OTHER_NAMES:  # another name for something that artel has
            self.report(name, f"in a run file this is {OTHER_NAMES[key.name].replace('.0.', '.')}")
        else:
            self.report_if_on(name, f"artel has no equivalent{self._suggest_name(key.name)}")

    def _suggest_name(self, tool_name: str) -> str:
        """Return `; did you mean NAME?`, or "" if no key of the same section is similar."""
        if not self._known_by_section:
            for key in (*self._keys_read, *(name for table in self._tables for name in table.names())):
                section, _, name = _without_indices(self._tool_names.get(key, key)).rpartition(".")
                self._known_by_section.setdefault(section, set()).add(name)
        section, _, name = _without_indices(tool_name).rpartition(".")
        return suggest_similar(name, self._known_by_section.get(section, ()))


def _without_indices(key: str) -> str:
    return re.sub(r"\.\d+(?=\.)", "", key)


def _report_line(key: _SourceKey) -> str:
    return f"{key.location}: {key.name} = {key.display_value}: {'; '.join(key.reasons)}"
