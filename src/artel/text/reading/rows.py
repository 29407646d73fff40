"""`rows` of a source: which records are taken, as a Python slice by numbers or by percent of all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from artel.config import SourceConfig
from artel.errors import InputError, Problem
from artel.text.reading.source_file import Items
from artel.text.records import Dropped

_BOUND = r"\s*(-?\d[\d_]*|-?\d+(?:\.\d+)?%)?\s*"
_SLICE = re.compile(rf"\[{_BOUND}:{_BOUND}\]")
_EXAMPLES = 'write rows: "[:1000]", "[10%:]", "[-500:]" or "[100:200]", in quotes: to YAML a bracket begins a list'


@dataclass(frozen=True, slots=True)
class _Bound:
    value: Fraction
    is_percent: bool

    def index(self, count: int) -> int:
        """The index of this bound among `count` records; percents are rounded down."""
        steps = int(abs(self.value) * count / 100) if self.is_percent else int(abs(self.value))
        return min(steps, count) if self.value >= 0 else max(count - steps, 0)


def check_rows(source: SourceConfig, key: str) -> list[Problem]:
    """What is wrong with `rows` of the source at `key` of the run file."""
    if not source.rows:
        return []
    if _SLICE.fullmatch(source.rows.strip()) is None:
        return [Problem(f"{key}.rows", f"{source.rows!r} is no slice of records", _EXAMPLES)]
    start, stop = _bounds(source.rows)
    if any(bound is not None and bound.is_percent and abs(bound.value) > 100 for bound in (start, stop)):
        return [Problem(f"{key}.rows", f"{source.rows!r} has more than 100%", _EXAMPLES)]
    if stop is not None:
        start = start or _Bound(Fraction(0), stop.is_percent)
        is_comparable = stop.is_percent == start.is_percent and (stop.value < 0) == (start.value < 0)
        if is_comparable and start.value >= stop.value:
            return [Problem(f"{key}.rows", f"{source.rows!r} takes no record", _EXAMPLES)]
    return []


def slice_rows(source: SourceConfig, key: str, count_by: Callable[[], Items], read: Callable[[], Items]) -> Items:
    """The records in the source's `rows`; good and bad records count alike.

    Percents and negative numbers need the number of records. A first pass, through `count_by`, counts them; this takes
    its time and no memory. Raises InputError if the source has no record in the slice.
    """
    start, stop = _bounds(source.rows)
    if any(bound is not None and (bound.is_percent or bound.value < 0) for bound in (start, stop)):
        count = sum(1 for item in count_by() if not isinstance(item, Dropped))
        first = start.index(count) if start else 0
        last: int | None = stop.index(count) if stop else count
    else:
        first, last = int(start.value) if start else 0, int(stop.value) if stop else None
    is_empty = True
    index = 0
    for item in read():
        if isinstance(item, Dropped):  # of a set that the source leaves out: not counted
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
        raise InputError.at(f"{key}.rows", f"{source.rows} takes no record of {name}", "write a wider slice")


def _bounds(rows: str) -> tuple[_Bound | None, _Bound | None]:
    match = _SLICE.fullmatch(rows.strip())
    if match is None:
        raise ValueError(f"{rows!r} was not checked")
    start, stop = (text and _Bound(Fraction(text.rstrip("%").replace("_", "")), "%" in text) for text in match.groups())
    return start or None, stop or None
