"""The table of a run of hostile.py."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

from hostile.runner import Verdict

_KINDS = {
    "tracebacks": ("traceback",),
    "hangs": ("hang",),
    "files lost": ("lost",),
    "wrong in silence": ("in silence",),
    "let in": ("let in",),
    "over their memory": ("memory",),
    "other exit status or words": ("status", "words"),
}


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """A line of all, and one of each family."""
    rows = ["| family | cases | right | skipped | " + " | ".join(_KINDS) + " |", "|---" * (4 + len(_KINDS)) + "|"]
    families = list(dict.fromkeys(verdict.family for verdict in verdicts))
    for name in [*families, "all"]:
        of = [verdict for verdict in verdicts if name in ("all", verdict.family)]
        right = sum(not verdict.faults and not verdict.skipped for verdict in of)
        counts = [sum(any(kind in kinds for kind, _ in verdict.faults) for verdict in of) for kinds in _KINDS.values()]
        row = [name, len(of), right, sum(bool(verdict.skipped) for verdict in of), *counts]
        rows.append("| " + " | ".join(map(str, row)) + " |")
    return rows


def table(verdicts: Sequence[Verdict], cases: int, command: str) -> str:
    """As Markdown."""
    day = datetime.date.today().strftime("%d.%m.%Y")
    lines = [
        "# Hostile inputs",
        "",
        f"`{command}`, {day}, on {os.cpu_count()} cores. What each case is: `hostile/`; what is judged, and by what:",
        "`hostile.py`. Seconds are of the whole case, memory of the largest moment of its processes.",
        *([] if len(verdicts) == cases else [f"**{len(verdicts)} of {cases} cases were run**, chosen by chance."]),
        "",
        *summary(verdicts),
        "",
        "| case | exit status | first line | seconds | memory, MB | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for each in verdicts:
        line = each.line.replace("|", "\\|").replace("`", "'")
        statuses = ", ".join(map(str, each.statuses))
        shown = f"`{line}`" if line else ""
        lines.append(
            f"| {each.case} | {statuses} | {shown} | {each.seconds:.1f} | {each.peak / 1e6:.0f} | {each.text} |"
        )
    return "\n".join(lines) + "\n"
