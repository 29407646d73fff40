"""Overrides of keys of a run file: `{"train.steps": 300}`, or `train.steps=300` on the command line."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from artel.config.yaml_lines import Key, read_yaml
from artel.errors import Problem

_PREFIX = "override "  # of the location of an overridden key
_MAX_WORD_CHARS = 200  # of an override in a message
# Only one key of each group can be set. An override of one key removes the other keys from the run file.
_EXCLUSIVE_KEYS = (
    ("model.config", "model.from", "model.auto"),
    ("tokenizer.train", "tokenizer.from"),
    ("train.epochs", "train.steps", "train.tokens", "train.budget"),
)


class Overrides(dict[str, Any]):
    """Dotted keys -> values that replace those of a run file. Numbers index lists (`data.sources.0.path`)."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self._words: dict[str, str] = {}
        self.problems: dict[str, list[Problem]] = {}
        """Problems of command-line words, by the key that the word begins with."""

    @classmethod
    def parse(cls, words: Sequence[str] | None) -> Overrides:
        """Parse words `a.b.0.c=value`. Values are YAML; the last of several words for a key counts."""
        overrides = cls()
        words = list(words or ())
        while words:
            word = words.pop(0)
            parts = [word]
            if words and "=" not in word and words[0].startswith("="):  # KEY = VALUE, KEY =VALUE
                parts.append(words.pop(0))
            if words and parts[-1].endswith("=") and "=" not in words[0]:  # KEY= VALUE
                parts.append(words.pop(0))
            if len(parts) == 1:
                overrides._add_word(word)
                continue
            fix = f"no spaces around =: write {shlex.join([''.join(parts)])}"
            overrides.problems[word] = [Problem(_format_location(" ".join(parts)), "is not of the form key=value", fix)]
        return overrides

    def with_arguments(self, words: Sequence[str]) -> Overrides:
        """Return these overrides and those in `words`."""
        return Overrides.parse([*self.words, *words])

    @property
    def words(self) -> list[str]:
        """The overrides as words of a command line."""
        return [self._words.get(key) or f"{key}={_to_yaml(value)}" for key, value in self.items()]

    def _add_word(self, word: str) -> None:
        key, equals, text = word.partition("=")
        where = _format_location(word)
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
            self.problems[key] = [Problem(where, "is not of the form key=value", "write e.g. train.learning_rate=3e-4")]
            return
        try:
            value, _, problems = read_yaml(text, where)
        except (yaml.YAMLError, ValueError, RecursionError):
            problems = [Problem(where, "its value is not valid YAML", f"quote it: '{key}=\"…\"'")]
        if problems:
            self.problems[key] = problems
            return
        self.pop(key, None)  # a later word for the same key is also applied later
        self[key] = value
        self._words[key] = word

    def apply_to(self, tree: dict[str, Any], lines: dict[Key, str]) -> dict[str, list[Problem]]:
        """Set the values in `tree` and their locations in `lines`. Return the problems by key."""
        problems = dict(self.problems)
        for (key, value), word in zip(self.items(), self.words, strict=True):
            where = _format_location(word)
            problem = _set_value(tree, lines, key, copy.deepcopy(value), where)
            if problem is not None:
                problems[key] = [problem]
        return problems


def _to_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()


def _format_location(word: str) -> str:
    return _PREFIX + (word if len(word) <= _MAX_WORD_CHARS else f"{word[:_MAX_WORD_CHARS]}…")


def _set_value(tree: dict[str, Any], lines: dict[Key, str], dotted: str, value: Any, where: str) -> Problem | None:
    """Set a value in `tree` and its location in `lines`. Return the problem if the key cannot be set."""
    parts: list[str | int] = [int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in dotted.split(".")]
    if value is not None and value is not False:
        _remove_exclusive_keys(tree, lines, tuple(parts[:2]))
    section: Any = tree
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        if isinstance(section, list):
            if not isinstance(part, int) or part > len(section):
                return Problem(where, f"{part} is not an index of a list of {len(section)}", "count from 0")
            if part == len(section):
                section.append({})
        elif isinstance(section, dict):
            if section.get(part) is None:
                section[part] = [] if not is_last and isinstance(parts[depth + 1], int) else {}
        else:
            return Problem(where, f"{'.'.join(map(str, parts[:depth]))} is a value, not a section", "check the key")
        if is_last:
            section[part] = value
        section = section[part]
    for key in [key for key in lines if key[: len(parts)] == tuple(parts)]:
        del lines[key]
    for depth in range(1, len(parts) + 1):
        lines.setdefault(tuple(parts[:depth]), where)
    return None


def _remove_exclusive_keys(tree: dict[str, Any], lines: dict[Key, str], key: Key) -> None:
    """Remove the keys from `tree` that cannot be combined with `key`, except other overrides."""
    dotted = ".".join(map(str, key))
    section = tree.get(str(key[0]))
    if len(key) != 2 or not isinstance(section, dict):
        return
    for group in _EXCLUSIVE_KEYS:
        for exclusive in group if dotted in group else ():
            name = exclusive.rpartition(".")[2]
            locations = [location for line_key, location in lines.items() if line_key[:2] == (key[0], name)]
            if exclusive != dotted and not any(location.startswith(_PREFIX) for location in locations):
                section.pop(name, None)
