"""Sets inside a source, like those of The Pile: which one a record belongs to, and which are read."""

from __future__ import annotations

from functools import cache
from typing import Any

from artel.config import SourceConfig
from artel.errors import Problem
from artel.text.reading.rows import Items
from artel.text.records import Dropped, Record, Rejected

_PILE = "meta.pile_set_name"


def set_of(entry: dict[str, Any], source: SourceConfig, where: str, otherwise: str) -> str | Rejected:
    """The set that the fields of a record name by the source's `set_field`; `otherwise` where they need not name one.

    A named field that is not there, or is no text, makes the record a bad one: it would be counted in the wrong set.
    """
    if not source.set_field:
        return otherwise
    found: Any = entry
    for name in _path(source.set_field):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, str) and found:
        return found
    if source.set_field == "auto":
        return otherwise
    detail = f"has no text in the field {source.set_field!r} that names its set; write set_field: NAME or auto"
    return Rejected(where, "no_set", detail, otherwise)


def column_of_sets(source: SourceConfig) -> str:
    """The outermost field or column that `set_field` looks into; empty when it looks into none."""
    return _path(source.set_field)[0]


@cache
def _path(set_field: str) -> tuple[str, ...]:
    """Names of fields, each in the one before."""
    return tuple((_PILE if set_field == "auto" else set_field).split("."))


def of_sets(items: Items, source: SourceConfig) -> Items:
    """The items; in place of records of sets that the source does not `include`, or does `exclude`, that they are out.

    What could not be read passes.
    """
    for item in items:
        excluded = item.set_name in source.exclude or (source.include and item.set_name not in source.include)
        yield Dropped("excluded_set", item.set_name) if excluded and isinstance(item, Record) else item


def check_sets(source: SourceConfig, where: str, seen: set[str]) -> list[Problem]:
    """What is wrong with the sets that a source names, when those it has were `seen`.

    A misspelled name would let in what was to be left out, or weigh nothing. A file of validation texts need not have
    them all.
    """
    if where == "data.validation":
        return []
    weighed = source.weight if isinstance(source.weight, dict) else {}
    problems = []
    for key, names in (("include", source.include), ("exclude", source.exclude), ("weight", list(weighed))):
        missing = [name for name in names if name not in seen]
        if missing:
            have = ", ".join(sorted(seen)[:40]) or "none"
            what = f"no record is of the set{'s' * (len(missing) > 1)} {', '.join(missing)} (there are: {have})"
            problems.append(Problem(f"{where}.{key}", what, "write the names as they stand in the data, or leave out"))
    return problems
