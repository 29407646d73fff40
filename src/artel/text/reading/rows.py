"""Which records of a source are taken: `rows` as a Python slice, by numbers or by percent of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from artel.config import SourceConfig
from artel.errors import InputError, Problem
from artel.text.records import Dropped, Record, Rejected

Items = Iterator[Record | Rejected | Dropped]

_BOUND = r"\s*(-?\d[\d_]*|-?\d+(?:\.\d+)?%)?\s*"
_SLICE = re.compile(rf"\[{_BOUND}:{_BOUND}\]")
_EXAMPLES = 'write rows: "[:1000]", "[10%:]", "[-500:]" or "[100:200]", in quotes: to YAML a bracket begins a list'


@dataclass(frozen=True, slots=True)
class _Bound:
    value: Fraction
    percent: bool

    def place(self, count: int) -> int:
        """The number of the record at which it stands, of `count`; percents are rounded down."""
        steps = int(abs(self.value) * count / 100) if self.percent else int(abs(self.value))
        return min(steps, count) if self.value >= 0 else max(count - steps, 0)


def check_rows(source: SourceConfig, where: str) -> list[Problem]:
    """What is wrong with `rows` of a source; `where` is the source's key in the run file."""
    if not source.rows:
        return []
    if _SLICE.fullmatch(source.rows.strip()) is None:
        return [Problem(f"{where}.rows", f"{source.rows!r} is no slice of records", _EXAMPLES)]
    start, stop = _bounds(source.rows)
    if any(bound is not None and bound.percent and abs(bound.value) > 100 for bound in (start, stop)):
        return [Problem(f"{where}.rows", f"{source.rows!r} has more than 100%", _EXAMPLES)]
    from_start = start or _Bound(Fraction(0), stop is not None and stop.percent)
    same_kind = stop is not None and stop.percent == from_start.percent
    same_end = stop is not None and (stop.value < 0) == (from_start.value < 0)
    if stop is not None and same_kind and same_end and from_start.value >= stop.value:
        return [Problem(f"{where}.rows", f"{source.rows!r} takes no record", _EXAMPLES)]
    return []


def taken(source: SourceConfig, where: str, count_by: Callable[[], Items], read: Callable[[], Items]) -> Items:
    """Those of the source's records that its `rows` takes; good and bad ones are counted alike.

    Percents and numbers from the end need to know how many there are: a first pass, through `count_by`, counts them,
    which costs its time and no memory. Raises InputError when the source has fewer records than the slice begins at.
    """
    start, stop = _bounds(source.rows)
    if any(bound is not None and (bound.percent or bound.value < 0) for bound in (start, stop)):
        count = sum(1 for item in count_by() if not isinstance(item, Dropped))
        first = start.place(count) if start else 0
        last: int | None = stop.place(count) if stop else count
    else:
        first, last = int(start.value) if start else 0, int(stop.value) if stop else None
    found = False
    place = 0
    for item in read():
        if isinstance(item, Dropped):  # of a set that the source leaves out: none of those that are counted here
            yield item
            continue
        if last is not None and place >= last:
            break
        if place >= first:
            found = True
            yield item
        place += 1
    if not found:
        name = source.name or " ".join(source.path)
        raise InputError.at(f"{where}.rows", f"{source.rows} takes no record of {name}", "write a wider slice")


def _bounds(rows: str) -> tuple[_Bound | None, _Bound | None]:
    found = _SLICE.fullmatch(rows.strip())
    if found is None:
        raise ValueError(f"{rows!r} was not checked")
    start, stop = (text and _Bound(Fraction(text.rstrip("%").replace("_", "")), "%" in text) for text in found.groups())
    return start or None, stop or None
