"""Compares planned values with measured ones, in messages and in RUN/choice.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from artel.config import RunConfig
from artel.storage import write_file
from artel.training.run_folder import RunFolder

_UNITS = {
    "bits_per_byte": ("bits per byte of validation", 3),
    "tokens_per_second": ("tokens/s", 0),
    "per_rank_gib": ("GiB of a rank", 1),
    "host_gib": ("GiB of all processes", 1),
    "minutes": ("min", 1),
}
"""Unit and number of decimals of each value."""

EXPECTED = ("bits_per_byte", "tokens_per_second", "minutes")
"""Names of the values in RUN/choice.json."""

BITS_ERROR = 0.1
"""Relative error of the expected bits per byte of a chosen model. On two novels that were not used for the fits the
error was between -0.4 % and 9 % (benchmarks/NOTES.md)."""


def expected_range(bits_per_byte: float) -> tuple[float, float]:
    """Return the expected bits per byte of a chosen model as a range: (lowest, highest)."""
    return bits_per_byte * (1 - BITS_ERROR), bits_per_byte * (1 + BITS_ERROR)


def comparison_line(planned: Mapping[str, float | None], measured: Mapping[str, float | None]) -> str:
    """Return a line with each measured value, the planned one, and their difference."""
    entries = []
    for name, value in measured.items():
        if value is None:
            continue
        unit, digits = _UNITS[name]
        entry = f"{value:,.{digits}f} {unit}"
        expected = planned.get(name)
        if expected and name == "bits_per_byte":
            lowest, highest = expected_range(expected)
            entry += f", expected {lowest:.2f} to {highest:.2f}"
        elif expected:
            entry += f", planned {expected:,.{digits}f} ({value / expected - 1:+.0%})"
        entries.append(entry)
    return "; ".join(entries)


def record_results(folder: RunFolder, config: RunConfig, result: Mapping[str, Any]) -> str | None:
    """Write the results of a run with `model.auto` into RUN/choice.json, next to the expected values.

    `result`: the content of result.json. If the budget has changed since the choice, the expected bits per byte are
    dropped. Return the comparison as a line, or None if the model was not chosen automatically.
    """
    budget = config.train.budget
    choice = read_choice(folder)
    if choice is None or choice.get("model") != config.model.config:
        return None
    expected = choice_values(choice, "expected")
    if budget is not None and budget / 60 != expected["minutes"]:
        expected = {"tokens_per_second": expected["tokens_per_second"], "minutes": budget / 60}
    choice["expected"] = expected
    choice["reached"] = {
        "bits_per_byte": (result["validation"] or {}).get("bits_per_byte"),
        "tokens_per_second": result["tokens_per_second"],
        "minutes": result["wall_seconds"] / 60,
    }
    write_file(folder.choice, orjson.dumps(choice, option=orjson.OPT_INDENT_2))
    return choice_comparison(choice)


def choice_comparison(choice: Mapping[str, Any]) -> str | None:
    """Return the comparison in RUN/choice.json as a line, or None if the run is not finished."""
    measured = choice_values(choice, "reached")
    return f"reached: {comparison_line(choice_values(choice, 'expected'), measured)}" if measured else None


def choice_values(choice: Mapping[str, Any], group: str) -> dict[str, float]:
    """Return the known values of RUN/choice.json in `group`: expected or reached."""
    values = choice.get(group)
    if not isinstance(values, dict):
        return {}
    return {name: values[name] for name in EXPECTED if isinstance(values.get(name), int | float)}


def read_choice(folder: RunFolder) -> dict[str, Any] | None:
    """Return RUN/choice.json, or None if it is missing or damaged."""
    try:
        choice = orjson.loads(folder.choice.read_bytes())
    except (OSError, ValueError):
        return None
    is_valid = isinstance(choice, dict) and {"tokens_per_second", "minutes"} <= choice_values(choice, "expected").keys()
    return choice if is_valid else None
