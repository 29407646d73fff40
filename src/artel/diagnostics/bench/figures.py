"""A figure: a value, its unit, and one sentence that says how it was measured, so that it can be measured again."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from artel.diagnostics.doctor.software import installed_version
from artel.host import processor

MEGABYTE = 10**6
GIBIBYTE = 2**30

Tell = Callable[[str], None]

DEFINITIONS = {
    "MB": "10^6 bytes of text in UTF-8, line ends, field names and markup left out; of HTML and jsonl.zst the bytes of "
    "the pages and of the unpacked lines",
    "a core": "divided by the processor time, user and system, of the command and every process it starts; on one core "
    "that does nothing else, this equals the elapsed time",
    "elapsed": "by the clock, from the start of the command to its end, imports included",
    "start-up": "the same command on 200 documents: the time that does not depend on the size of the input",
    "value": "the median of the rounds; artel and a peer take turns, each in new processes with empty folders and "
    "caches of their own, the input in the page cache",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result; `value` is None where it could not be measured, and `why` says why."""

    name: str
    value: float | None
    unit: str
    definition: str
    target: str = ""
    """What this project aims at: `>= 8`."""
    why: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        optional = {name: text for name, text in (("target", self.target), ("why", self.why)) if text}
        return {"value": self.value, "unit": self.unit, "definition": self.definition, **optional, **self.more}


def about_machine(*packages: str) -> dict[str, Any]:
    """The processor, its cores, the versions of Python and of the packages (None: not installed), and the date."""
    versions = {package: installed_version(package) for package in packages}
    about = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    return {**about, **versions, "measured": time.strftime("%Y-%m-%d")}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def rate(amount: float, seconds: float) -> float | None:
    """The amount per second; None where the time is too short to be measured."""
    per_second = amount / seconds if seconds > 0 else math.inf
    return per_second if math.isfinite(per_second) else None


def table(figures: list[Figure]) -> str:
    """For people: a line for each figure, with its definition below."""
    width = max(len(figure.name) for figure in figures)
    lines = []
    for figure in figures:
        shown = f"{figure.value:,.4g} {figure.unit}" if figure.value is not None else f"not measured: {figure.why}"
        ratio = figure.more.get("ratio_to_peer")
        shown += f" · {ratio:.3g} times the peer" if ratio is not None else ""
        shown += f" (target {figure.target})" if figure.target else ""
        lines += [f"{figure.name:<{width}}  {shown}", f"{'':<{width}}  {figure.definition}"]
    return "\n".join(lines)
