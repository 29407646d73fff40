"""Overrides: values for dotted keys of a run file, `{"train.steps": 300}`, or `train.steps=300` on a command line."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from artel.config.yaml_lines import Key, read_yaml
from artel.errors import Problem

_OVERRIDE = "override "  # the place of an overridden key begins with it
_LONGEST_SHOWN = 200  # characters of an override in a message
# Only one key of each group can be set: an override of one removes the others that the run file sets.
_ONE_OF = (
    ("model.config", "model.from", "model.auto"),
    ("tokenizer.train", "tokenizer.from"),
    ("train.epochs", "train.steps", "train.tokens", "train.budget"),
)


class Overrides(dict[str, Any]):
    """Dotted keys with the values that replace those of a run file; numbers index lists (`data.sources.0.path`)."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self._words: dict[str, str] = {}
        self.problems: dict[str, list[Problem]] = {}
        """Problems in words of the command line, by the key at their beginning."""

    @classmethod
    def parse(cls, words: Sequence[str] | None) -> Overrides:
        """From words `a.b.0.c=value`, each value read as YAML; of two words for a key the last one counts."""
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
                overrides._add(word)
                continue
            fix = f"no spaces around =: write {shlex.join([''.join(parts)])}"
            overrides.problems[word] = [Problem(_where(" ".join(parts)), "is not of the form key=value", fix)]
        return overrides

    def adding(self, words: Sequence[str]) -> Overrides:
        """These overrides and those of `words`."""
        return Overrides.parse([*self.words, *words])

    @property
    def words(self) -> list[str]:
        """As on a command line."""
        return [self._words.get(key) or f"{key}={_as_yaml(value)}" for key, value in self.items()]

    def _add(self, word: str) -> None:
        key, equals, text = word.partition("=")
        where = _where(word)
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
            self.problems[key] = [Problem(where, "is not of the form key=value", "write train.learning_rate=3e-4")]
            return
        try:
            value, _, problems = read_yaml(text, where)
        except (yaml.YAMLError, ValueError, RecursionError):
            problems = [Problem(where, "its value is not valid YAML", f"quote it: '{key}=\"…\"'")]
        if problems:
            self.problems[key] = problems
            return
        self.pop(key, None)  # a later word of the same key is also laid over later
        self[key] = value
        self._words[key] = word

    def lay_over(self, tree: dict[str, Any], lines: dict[Key, str]) -> dict[str, list[Problem]]:
        """Put the values into `tree`, and their places into `lines`; what is wrong, by key."""
        problems = dict(self.problems)
        for (key, value), word in zip(self.items(), self.words, strict=True):
            where = _where(word)
            problem = _lay_over(tree, lines, key, copy.deepcopy(value), where)
            if problem is not None:
                problems[key] = [problem]
        return problems


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()


def _where(word: str) -> str:
    return _OVERRIDE + (word if len(word) <= _LONGEST_SHOWN else f"{word[:_LONGEST_SHOWN]}…")


def _lay_over(tree: dict[str, Any], lines: dict[Key, str], dotted: str, value: Any, where: str) -> Problem | None:
    parts: list[str | int] = [int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in dotted.split(".")]
    if value is not None and value is not False:
        _remove_others(tree, lines, tuple(parts[:2]))
    section: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(section, list):
            if not isinstance(part, int) or part > len(section):
                return Problem(where, f"{part} is not an index of a list of {len(section)}", "count from 0")
            if part == len(section):
                section.append({})
        elif isinstance(section, dict):
            if section.get(part) is None:
                section[part] = [] if not last and isinstance(parts[depth + 1], int) else {}
        else:
            return Problem(where, f"{'.'.join(map(str, parts[:depth]))} is a value, not a section", "check the key")
        if last:
            section[part] = value
        section = section[part]
    for key in [key for key in lines if key[: len(parts)] == tuple(parts)]:
        del lines[key]
    for depth in range(1, len(parts) + 1):
        lines.setdefault(tuple(parts[:depth]), where)
    return None


def _remove_others(tree: dict[str, Any], lines: dict[Key, str], key: Key) -> None:
    """Remove from the tree what cannot be set together with `key`, except other overrides."""
    dotted = ".".join(map(str, key))
    section = tree.get(str(key[0]))
    if len(key) != 2 or not isinstance(section, dict):
        return
    for group in _ONE_OF:
        for other in group if dotted in group else ():
            name = other.rpartition(".")[2]
            below = [place for known, place in lines.items() if known[:2] == (key[0], name)]
            if other != dotted and not any(place.startswith(_OVERRIDE) for place in below):
                section.pop(name, None)
