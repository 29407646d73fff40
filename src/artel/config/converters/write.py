"""A run file as YAML, with comments where the user is to fill something in."""

from __future__ import annotations

from typing import Any

import yaml

from artel.config.yaml_lines import read_yaml

_WIDEST = 1_000_000  # no value is folded, so that each key has one line


def with_comments(run: dict[str, Any], comments: dict[str, str]) -> str:
    """The YAML of a run file; `comments` stand above the dotted keys that they belong to."""
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
