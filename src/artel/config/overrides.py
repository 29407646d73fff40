"""Values given on the command line, `a.b.0.c=value`, laid over what a run file says."""

from __future__ import annotations

import re
from typing import Any

import yaml

from artel.config.yaml_lines import Key, read_yaml
from artel.errors import Problem

_OVERRIDE = "override "  # how the place of a key begins that the command line gives
_LONGEST_SHOWN = 200  # characters of an override in a message
# Of these only one can be given: one that is given as an override takes the place of the run file's.
_ONE_OF = (
    ("model.config", "model.from"), ("tokenizer.train", "tokenizer.from"),
    ("train.epochs", "train.steps", "train.tokens"),
)  # fmt: skip


def lay_over(tree: dict[str, Any], lines: dict[Key, str], override: str) -> list[Problem]:
    """Put `a.b.0.c=value` into the tree; what is wrong with it, if anything.

    `lines` says where each key stands, and is kept so. What cannot stand beside the key, and is the file's, goes:
    `model.from` takes the place of its `model.config`.
    """
    dotted, equals, text = override.partition("=")
    where = _OVERRIDE + (override if len(override) <= _LONGEST_SHOWN else f"{override[:_LONGEST_SHOWN]}…")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", dotted):
        return [Problem(where, "is not of the form key=value", "write train.learning_rate=3e-4")]
    try:
        value, _, problems = read_yaml(text, where)
    except (yaml.YAMLError, ValueError, RecursionError):
        return [Problem(where, "its value is not valid YAML", f"quote it: '{dotted}=\"…\"'")]
    if problems:
        return problems
    parts: list[str | int] = [int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in dotted.split(".")]
    if value is not None:
        _give_way(tree, lines, tuple(parts[:2]))
    here: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(here, list):
            if not isinstance(part, int) or part > len(here):
                return [Problem(where, f"{part} is not an index of a list of {len(here)}", "count from 0")]
            if part == len(here):
                here.append({})
        elif isinstance(here, dict):
            if here.get(part) is None:
                here[part] = [] if not last and isinstance(parts[depth + 1], int) else {}
        else:
            return [Problem(where, f"{'.'.join(map(str, parts[:depth]))} is a value, not a section", "check the key")]
        if last:
            here[part] = value
        here = here[part]
    for known in [known for known in lines if known[: len(parts)] == tuple(parts)]:
        del lines[known]
    for depth in range(1, len(parts) + 1):
        lines.setdefault(tuple(parts[:depth]), where)
    return []


def _give_way(tree: dict[str, Any], lines: dict[Key, str], key: Key) -> None:
    """Take out of the tree what cannot stand beside `key`, but for what is an override itself."""
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
