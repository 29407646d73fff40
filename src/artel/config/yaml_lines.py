"""Parse YAML to plain values with the `file:line` of each key. Reject values that no run can have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from artel.errors import InputError, Problem

Key = tuple[str | int, ...]

# A run file has a hundred keys; anchors within anchors (`a: [*b, *b]`) can make billions of values.
_MAX_VALUES = 100_000
_MAX_DEPTH = 100
# Characters that YAML can escape but no path or UTF-8 file can contain.
_UNWRITABLE = re.compile("[\\0\\ud800-\\udfff]")
_LINE = re.compile(r"(.+?):(\d+)(?::|$)")
# What YAML makes of some unquoted keys (2020-01-01, on, ~), by tag.
_NON_STRING_KEYS = {"timestamp": "a date", "bool": "true or false", "null": "null", "binary": "binary data"}


def sort_by_line(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems by file and line, without duplicates. Problems without a line come last."""
    files: dict[str, int] = {}

    def order(problem: Problem) -> tuple[float, int]:
        match = _LINE.match(problem.where)
        if match is None:
            return math.inf, 0
        return files.setdefault(match[1], len(files)), int(match[2])

    return sorted(dict.fromkeys(problems), key=order)


def parse(text: str, file: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """Return the YAML as plain values, and the `file:line` of each key. Raise InputError if it is invalid."""
    try:
        tree, lines, problems = read_yaml(text, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        fix = "check indentation, colons and brackets"
        if "'\\t'" in what:
            what, fix = "has a tab where YAML does not allow one", "indent with spaces"
        raise InputError.at(where, f"is not valid YAML: {what}", fix) from None
    except (ValueError, RecursionError) as error:  # dates out of range, documents nested without end
        raise InputError.at(file, f"is not valid YAML: {error}", "check its values") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        problems.append(Problem(file, "is not a mapping of keys to values", "write keys such as data: and train:"))
    problems += unwritable_problems(tree, lines)
    if problems:
        raise InputError(problems)
    return tree, lines


def read_yaml(text: str, file: str) -> tuple[Any, dict[Key, str], list[Problem]]:
    """Return plain values, the `file:line` of each key, and problems of keys.

    Raise YAMLError, ValueError or RecursionError if the text cannot be parsed.
    """
    lines: dict[Key, str] = {(): file}
    problems: list[Problem] = []
    num_values = 0

    def walk(node: yaml.Node, key: Key) -> None:
        nonlocal num_values
        num_values += 1
        if num_values > _MAX_VALUES:
            raise ValueError(f"over {_MAX_VALUES:,} values, counting an anchor wherever it is used")
        lines.setdefault(key, f"{file}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.MappingNode):
            walk_keys(node, key)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*key, index))

    def walk_keys(node: yaml.MappingNode, key: Key) -> None:
        seen: set[str] = set()
        for name, value in node.value:
            where = f"{file}:{name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode):
                problems.append(Problem(where, "a key is a list or a mapping", "write a word, e.g. data or train"))
                continue
            kind = name.tag.rpartition(":")[2]
            if kind in _NON_STRING_KEYS:
                what = f"YAML reads the key {name.value} as {_NON_STRING_KEYS[kind]}"
                problems.append(Problem(where, what, f"quote it: '{name.value}'"))
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
        if self._depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem=f"lists and mappings are nested over {_MAX_DEPTH} deep", problem_mark=mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def unwritable_problems(tree: Any, lines: dict[Key, str]) -> list[Problem]:
    """Return a problem for each value that RUN/config.yaml could not store."""
    return [Problem(format_location(key, lines), what, fix) for key, what, fix in _find_unwritable(tree, ())]


def _find_unwritable(value: object, key: Key) -> Iterator[tuple[Key, str, str]]:
    """Yield (key, what is wrong, fix) for each value that RUN/config.yaml could not store."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _find_unwritable(name, key)
            yield from _find_unwritable(item, (*key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_unwritable(item, (*key, index))
    elif isinstance(value, str):
        if _UNWRITABLE.search(value):
            yield key, "has a zero byte or a surrogate, which no file can store", "write the character itself"
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            yield key, "is a number of more than 64 bits", "write a smaller number"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield key, f"{value} is not a finite number", "write a finite number"
    elif value is not None:
        yield key, f"YAML reads it as a {type(value).__name__}", "quote it, or write it as a number"


def format_location(key: Key, lines: dict[Key, str]) -> str:
    """Return `file:line: a.b.c`, or `a.b.c` if the run is not in a file."""
    return ": ".join(part for part in (find_line(key, lines), ".".join(map(str, key))) if part)


def find_line(key: Key, lines: dict[Key, str]) -> str:
    """Return `file:line` of a key, or of the nearest section above it that is in the file; "" without a file."""
    while key and key not in lines:
        key = key[:-1]
    return lines[key]
