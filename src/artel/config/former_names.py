"""Keys of run files under their former names, which are still read."""

from __future__ import annotations

import logging
from typing import Any

from artel.config.yaml_lines import Key, line_of
from artel.errors import Problem

_FORMER = {("model", "quantise"): "quantize"}


def rename_former_keys(tree: dict[str, Any], lines: dict[Key, str]) -> list[Problem]:
    """Give keys under a former name their present one, and log that; what is wrong with them.

    The config.yaml in a run's folder was written by artel, and its former names are not logged.
    """
    problems = []
    for (section, former), name in _FORMER.items():
        values = tree.get(section)
        if not isinstance(values, dict) or former not in values:
            continue
        place, value = line_of((section, former), lines), values.pop(former)
        if name in values:
            what = f"is the former name of {section}.{name}, and both are there"
            problems.append(Problem(f"{place}: {section}.{former}", what, f"keep {section}.{name}"))
            continue
        values[name] = value
        if (section, former) in lines:
            lines[section, name] = lines.pop((section, former))
        _log(place, f"{section}.{former}", f"{section}.{name}")
    return problems


def present_name(dotted: str, place: str) -> str:
    """A dotted key under its present name."""
    section, _, name = dotted.partition(".")
    if (section, name) not in _FORMER:
        return dotted
    present = f"{section}.{_FORMER[section, name]}"
    _log(place, dotted, present)
    return present


def _log(place: str, former: str, present: str) -> None:
    if "config.yaml:" not in place:
        logging.getLogger("artel").warning("%s: %s is now %s", place, former, present)
