"""YAML as plain values with the `file:line` of each key; refuses values that no run can have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from artel.errors import InputError, Problem

Key = tuple[str | int, ...]

# A run file has a hundred keys; anchors within anchors (`a: [*b, *b]`) can make billions of values.
_MOST_VALUES = 100_000
_DEEPEST = 100
# YAML can write them as escapes; no path or UTF-8 file can have them.
_UNWRITABLE = re.compile("[\\0\\ud800-\\udfff]")
_LINE = re.compile(r"(.+?):(\d+)(?::|$)")
# How YAML reads some keys without quotes (2020-01-01, on, ~), by tag.
_NO_KEYS = {"timestamp": "a date", "bool": "true or false", "null": "null", "binary": "binary data"}


def by_line(problems: Iterable[Problem]) -> list[Problem]:
    """Problems in the order of the lines that they name, file by file; those that name no line come last."""
    files: dict[str, int] = {}

    def order(problem: Problem) -> tuple[float, int]:
        place = _LINE.match(problem.where)
        if place is None:
            return math.inf, 0
        return files.setdefault(place[1], len(files)), int(place[2])

    return sorted(dict.fromkeys(problems), key=order)


def parse(text: str, place: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """The YAML as plain values, and the `file:line` of each key. Raises InputError."""
    try:
        tree, lines, problems = read_yaml(text, place)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark else place
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        fix = "check indentation, colons and brackets"
        if "'\\t'" in what:
            what, fix = "has a tab where YAML takes none", "indent with spaces"
        raise InputError.at(where, f"is not valid YAML: {what}", fix) from None
    except (ValueError, RecursionError) as error:  # dates out of range, documents nested without end
        raise InputError.at(place, f"is not valid YAML: {error}", "check its values") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        problems.append(Problem(place, "is not a mapping of keys to values", "write keys like data: and train:"))
    problems += unwritable_problems(tree, lines)
    if problems:
        raise InputError(problems)
    return tree, lines


def read_yaml(text: str, place: str) -> tuple[Any, dict[Key, str], list[Problem]]:
    """Plain values, the places of keys, and problems of keys. Raises YAMLError, ValueError, RecursionError."""
    lines: dict[Key, str] = {(): place}
    problems: list[Problem] = []
    values = 0

    def walk(node: yaml.Node, key: Key) -> None:
        nonlocal values
        values += 1
        if values > _MOST_VALUES:
            raise ValueError(f"over {_MOST_VALUES:,} values, those of an anchor counted wherever it is used")
        lines.setdefault(key, f"{place}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.MappingNode):
            walk_keys(node, key)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*key, index))

    def walk_keys(node: yaml.MappingNode, key: Key) -> None:
        seen: set[str] = set()
        for name, value in node.value:
            where = f"{place}:{name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode):
                problems.append(Problem(where, "a key is a list or a mapping", "write a word: data, train"))
                continue
            kind = name.tag.rpartition(":")[2]
            if kind in _NO_KEYS:
                what = f"the key {name.value} is read by YAML as {_NO_KEYS[kind]}"
                problems.append(Problem(where, what, f"write it in quotes: '{name.value}'"))
                continue
            if name.value in seen:
                problems.append(Problem(where, f"the key {name.value} is given twice", "keep one of them"))
            seen.add(name.value)
            lines[(*key, name.value)] = where
            walk(value, (*key, name.value))

    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None, lines, problems
    walk(node, ())
    return loader.construct_document(node), lines, problems


class _Loader(yaml.SafeLoader):
    """Limits the depth: PyYAML takes 9 seconds and all of Python's stack for 2,000 nested brackets."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > _DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"lists and mappings are nested over {_DEEPEST} deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def unwritable_problems(tree: Any, lines: dict[Key, str]) -> list[Problem]:
    return [Problem(place_of(key, lines), what, fix) for key, what, fix in _unwritable(tree, ())]


def _unwritable(value: object, key: Key) -> Iterator[tuple[Key, str, str]]:
    """Values that RUN/config.yaml could not repeat: key, what is wrong, and the remedy."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _unwritable(name, key)
            yield from _unwritable(item, (*key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unwritable(item, (*key, index))
    elif isinstance(value, str):
        if _UNWRITABLE.search(value):
            yield key, "has a zero byte or half of a character, which no file can hold", "write the character itself"
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            yield key, "is a number of more than 64 bits", "write a smaller one"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield key, f"{value} is no number", "write a finite one"
    elif value is not None:
        yield key, f"is read by YAML as a {type(value).__name__}", "write it in quotes, or as a number"


def place_of(key: Key, lines: dict[Key, str]) -> str:
    """`file:line: a.b.c`; `a.b.c` alone of a run that is in no file."""
    return ": ".join(part for part in (line_of(key, lines), ".".join(map(str, key))) if part)


def line_of(key: Key, lines: dict[Key, str]) -> str:
    """`file:line` of a key, or of the nearest section above it that is in the file; empty where there is no file."""
    while key and key not in lines:
        key = key[:-1]
    return lines[key]
