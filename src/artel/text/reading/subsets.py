"""Selection of the records of a source: a slice of its rows (`rows`), and sets (`include`, `exclude`).

Sets are divisions inside a source, such as those of The Pile. `set_field` names the field that holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from artel.config import SourceConfig
from artel.errors import InputError, Problem
from artel.text.reading.source_file import Items
from artel.text.records import BadRecord, DroppedRecord, Record

_BOUND_PATTERN = r"\s*(-?\d[\d_]*|-?\d+(?:\.\d+)?%)?\s*"
_SLICE_PATTERN = re.compile(rf"\[{_BOUND_PATTERN}:{_BOUND_PATTERN}\]")
_FIX_ROWS = 'write rows: "[:1000]", "[10%:]", "[-500:]" or "[100:200]", in quotes: to YAML a bracket begins a list'
_PILE_SET_FIELD = "meta.pile_set_name"


@dataclass(frozen=True, slots=True)
class _Bound:
    value: Fraction
    is_percent: bool

    def index(self, count: int) -> int:
        """Return the index of this bound among `count` records. Percents are rounded down."""
        steps = int(abs(self.value) * count / 100) if self.is_percent else int(abs(self.value))
        return min(steps, count) if self.value >= 0 else max(count - steps, 0)


def check_rows(source: SourceConfig, key: str) -> list[Problem]:
    """Return the problems of `rows` of the source at `key` of the run file."""
    if not source.rows:
        return []
    if _SLICE_PATTERN.fullmatch(source.rows.strip()) is None:
        return [Problem(f"{key}.rows", f"{source.rows!r} is not a slice of records", _FIX_ROWS)]
    start, stop = _parse_bounds(source.rows)
    if any(bound is not None and bound.is_percent and abs(bound.value) > 100 for bound in (start, stop)):
        return [Problem(f"{key}.rows", f"{source.rows!r} has more than 100%", _FIX_ROWS)]
    if stop is not None:
        start = start or _Bound(Fraction(0), stop.is_percent)
        is_comparable = stop.is_percent == start.is_percent and (stop.value < 0) == (start.value < 0)
        if is_comparable and start.value >= stop.value:
            return [Problem(f"{key}.rows", f"{source.rows!r} selects no record", _FIX_ROWS)]
    return []


def slice_rows(source: SourceConfig, key: str, count_pass: Callable[[], Items], read: Callable[[], Items]) -> Items:
    """Yield the records in the `rows` of the source. Bad records count too.

    Percents and negative numbers need the number of records. A first pass, `count_pass`, counts them without keeping
    them in memory. Raise InputError if the source has no record in the slice.
    """
    start, stop = _parse_bounds(source.rows)
    if any(bound is not None and (bound.is_percent or bound.value < 0) for bound in (start, stop)):
        count = sum(1 for item in count_pass() if not isinstance(item, DroppedRecord))
        first = start.index(count) if start else 0
        last: int | None = stop.index(count) if stop else count
    else:
        first, last = int(start.value) if start else 0, int(stop.value) if stop else None
    is_empty = True
    index = 0
    for item in read():
        if isinstance(item, DroppedRecord):  # its set is excluded: not counted
            yield item
            continue
        if last is not None and index >= last:
            break
        if index >= first:
            is_empty = False
            yield item
        index += 1
    if is_empty:
        name = source.name or " ".join(source.path)
        raise InputError.at(f"{key}.rows", f"{source.rows} selects no record of {name}", "write a wider slice")


def _parse_bounds(rows: str) -> tuple[_Bound | None, _Bound | None]:
    match = _SLICE_PATTERN.fullmatch(rows.strip())
    if match is None:
        raise ValueError(f"{rows!r} did not pass check_rows")
    start, stop = (text and _Bound(Fraction(text.rstrip("%").replace("_", "")), "%" in text) for text in match.groups())
    return start or None, stop or None


def read_set_name(fields: dict[str, Any], source: SourceConfig, default: str) -> str:
    """Return the set of a record, from its field `set_field`. Raise BadRecord if the required field is missing."""
    if not source.set_field:
        return default
    value: Any = fields
    for name in _field_path(source.set_field):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str) and value:
        return value
    if source.set_field == "auto":
        return default
    detail = f"has no text in the field {source.set_field!r} that names its set; write set_field: NAME or auto"
    raise BadRecord("no_set", detail)


def set_column(source: SourceConfig) -> str:
    """Return the outermost field or column of `set_field`; empty if there is no `set_field`."""
    return _field_path(source.set_field)[0]


@cache
def _field_path(set_field: str) -> tuple[str, ...]:
    """Return the names of nested fields, outermost first."""
    return tuple((_PILE_SET_FIELD if set_field == "auto" else set_field).split("."))


def filter_sets(items: Items, source: SourceConfig) -> Items:
    """Yield the items, replacing records of excluded sets by DroppedRecord."""
    for item in items:
        is_excluded = item.set_name in source.exclude or (source.include and item.set_name not in source.include)
        yield DroppedRecord("excluded_set", item.set_name) if is_excluded and isinstance(item, Record) else item


def check_sets(source: SourceConfig, key: str, seen: set[str]) -> list[Problem]:
    """Return a problem for each key with set names not in `seen`: a misspelled name would exclude or weigh nothing."""
    if key == "data.validation":
        return []
    weights = source.weight if isinstance(source.weight, dict) else {}
    problems = []
    for name, sets in (("include", source.include), ("exclude", source.exclude), ("weight", list(weights))):
        missing = [set_name for set_name in sets if set_name not in seen]
        if missing:
            known = ", ".join(sorted(seen)[:40]) or "none"
            what = f"no record has the set{'s' * (len(missing) > 1)} {', '.join(missing)} (the sets are: {known})"
            problems.append(Problem(f"{key}.{name}", what, "use set names of the data, or remove the key"))
    return problems
