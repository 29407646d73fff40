"""Sets inside a source, like those of The Pile: which set a record belongs to, and which sets are read."""

from __future__ import annotations

from functools import cache
from typing import Any

from artel.config import SourceConfig
from artel.errors import Problem
from artel.text.reading.source_file import Items
from artel.text.records import BadRecord, Dropped, Record

_PILE = "meta.pile_set_name"


def set_name_of(fields: dict[str, Any], source: SourceConfig, default: str) -> str:
    """The set that a record's field `set_field` names; `default` if it need not name one.

    Raises BadRecord if a named field is missing or is not text: the record would be counted in the wrong set.
    """
    if not source.set_field:
        return default
    value: Any = fields
    for name in _path(source.set_field):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str) and value:
        return value
    if source.set_field == "auto":
        return default
    detail = f"has no text in the field {source.set_field!r} that names its set; write set_field: NAME or auto"
    raise BadRecord("no_set", detail)


def set_column(source: SourceConfig) -> str:
    """The outermost field or column of `set_field`; empty if there is no `set_field`."""
    return _path(source.set_field)[0]


@cache
def _path(set_field: str) -> tuple[str, ...]:
    """The names of nested fields, outermost first."""
    return tuple((_PILE if set_field == "auto" else set_field).split("."))


def filter_sets(items: Items, source: SourceConfig) -> Items:
    """The items, with Dropped in place of each record whose set is not in `include` or is in `exclude`."""
    for item in items:
        is_excluded = item.set_name in source.exclude or (source.include and item.set_name not in source.include)
        yield Dropped("excluded_set", item.set_name) if is_excluded and isinstance(item, Record) else item


def check_sets(source: SourceConfig, key: str, seen: set[str]) -> list[Problem]:
    """Problems with set names in the run file that are not among the sets `seen` in the data.

    A misspelled name would let in what `exclude` names, or weigh nothing. A file of validation texts need not have
    every set.
    """
    if key == "data.validation":
        return []
    weights = source.weight if isinstance(source.weight, dict) else {}
    problems = []
    for name, sets in (("include", source.include), ("exclude", source.exclude), ("weight", list(weights))):
        missing = [set_name for set_name in sets if set_name not in seen]
        if missing:
            have = ", ".join(sorted(seen)[:40]) or "none"
            what = f"no record is of the set{'s' * (len(missing) > 1)} {', '.join(missing)} (there are: {have})"
            problems.append(Problem(f"{key}.{name}", what, "write the names as they stand in the data, or leave out"))
    return problems
