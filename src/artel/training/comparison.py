"""Figures that were planned beside those that were measured: in words, and in RUN/choice.json."""

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
"""Of a figure: its unit, and the decimals that are shown."""


EXPECTED = ("bits_per_byte", "tokens_per_second", "minutes")
"""The figures of RUN/choice.json."""


BITS_ERROR = 0.1
"""Error of the expected bits per byte of a chosen model, as a fraction. Two novels on which the fits were not
made ended between 0.4 % below and 9 % above (benchmarks/NOTES.md)."""


def expected_range(bits_per_byte: float) -> tuple[float, float]:
    """Lowest and highest bits per byte to expect of a chosen model."""
    return bits_per_byte * (1 - BITS_ERROR), bits_per_byte * (1 + BITS_ERROR)


def compared(planned: Mapping[str, float | None], measured: Mapping[str, float | None]) -> str:
    """Each measured figure beside the planned one of its name, with the difference."""
    parts = []
    for name, value in measured.items():
        if value is None:
            continue
        unit, digits = _UNITS[name]
        part = f"{value:,.{digits}f} {unit}"
        expected = planned.get(name)
        if expected and name == "bits_per_byte":
            low, high = expected_range(expected)
            part += f", expected {low:.2f} to {high:.2f}"
        elif expected:
            part += f", planned {expected:,.{digits}f} ({value / expected - 1:+.0%})"
        parts.append(part)
    return "; ".join(parts)


def note_reached(folder: RunFolder, run: RunConfig, result: Mapping[str, Any]) -> str | None:
    """Write what a run with `model.auto` reached into RUN/choice.json, beside what its choice expected.

    `result` is that of result.json. Under another budget than the one that was chosen for, no bits per byte were
    expected. Returns the comparison in a line; None where the model was not chosen.
    """
    choice, budget = read_choice(folder), run.train.budget
    if choice is None or choice.get("model") != run.model.config:
        return None
    expected = figures(choice, "expected")
    if budget is not None and budget / 60 != expected["minutes"]:
        expected = {"tokens_per_second": expected["tokens_per_second"], "minutes": budget / 60}
    choice["expected"] = expected
    choice["reached"] = {
        "bits_per_byte": (result["validation"] or {}).get("bits_per_byte"),
        "tokens_per_second": result["tokens_per_second"],
        "minutes": result["wall_seconds"] / 60,
    }
    write_file(folder.choice, orjson.dumps(choice, option=orjson.OPT_INDENT_2))
    return reached(choice)


def reached(choice: Mapping[str, Any]) -> str | None:
    """What the content of RUN/choice.json says of a run that is done, in a line; None of one that is not."""
    measured = figures(choice, "reached")
    return f"reached: {compared(figures(choice, 'expected'), measured)}" if measured else None


def figures(choice: Mapping[str, Any], group: str) -> dict[str, float]:
    """The known figures of RUN/choice.json that are `expected` or `reached`; whatever else stands there is left out."""
    values = choice.get(group)
    if not isinstance(values, dict):
        return {}
    return {name: values[name] for name in EXPECTED if isinstance(values.get(name), int | float)}


def read_choice(folder: RunFolder) -> dict[str, Any] | None:
    """RUN/choice.json; None where there is none, or it is damaged."""
    try:
        choice = orjson.loads(folder.choice.read_bytes())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(choice, dict) and {"tokens_per_second", "minutes"} <= figures(choice, "expected").keys()
    return choice if is_whole else None
