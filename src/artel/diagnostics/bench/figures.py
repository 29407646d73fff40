"""A figure: what was measured, and in one sentence how, so that it can be measured again and compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MEGABYTE = 10**6
GIBIBYTE = 2**30

Tell = Callable[[str], None]

DEFINITIONS = {
    "MB": "10^6 bytes of text in UTF-8, line ends, field names and markup left out; of HTML and jsonl.zst the bytes of "
    "the pages and of the unpacked lines",
    "a core": "divided by processor time, user and system, of the command and every process it starts, and not by the "
    "clock: on one core that does nothing else it is the same",
    "elapsed": "by the clock, from the start of the command to its end, imports included",
    "start-up": "the same command on 200 documents: what it takes whatever the size of its input",
    "value": "the median of the rounds; artel and its peer take turns, each in new processes with empty folders and "
    "caches of their own, the input in the page cache",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result; `value` is None where it could not be measured, and `why` says why."""

    name: str
    value: float | None
    unit: str
    definition: str
    wanted: str = ""
    """What this project asks of it: `>= 8`."""
    why: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"value": self.value, "unit": self.unit, "definition": self.definition}
        given = {name: said for name, said in (("wanted", self.wanted), ("why", self.why)) if said}
        return {**found, **given, **self.more}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def rate(amount: float, seconds: float) -> float | None:
    """Amount a second; None where no time passed that can be measured."""
    found = amount / seconds if seconds > 0 else math.inf
    return found if math.isfinite(found) else None


def table(figures: list[Figure]) -> str:
    """For people: a line a figure, and below it what it is."""
    width = max(len(figure.name) for figure in figures)
    lines = []
    for figure in figures:
        shown = f"{figure.value:,.4g} {figure.unit}" if figure.value is not None else f"not measured: {figure.why}"
        ratio = figure.more.get("ratio_to_peer")
        shown += f" · {ratio:.3g} times the peer" if ratio is not None else ""
        shown += f" (wanted {figure.wanted})" if figure.wanted else ""
        lines += [f"{figure.name:<{width}}  {shown}", f"{'':<{width}}  {figure.definition}"]
    return "\n".join(lines)
