"""Jupyter: detect a notebook, and format tables for it."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence


def in_notebook() -> bool:
    """True if the output of this process is shown by Jupyter or a similar notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def html_table(rows: Iterable[Sequence[object]], header: Sequence[object] = (), caption: str = "") -> str:
    """Return an HTML table. The first column names the rows. All text is escaped."""
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="text-align: left">{html.escape(caption)}</caption>')
    if header:
        cells = "".join(f"<th>{html.escape(str(title))}</th>" for title in header)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for name, *values in rows:
        cells = "".join(f"<td>{html.escape(str(value))}</td>" for value in values)
        lines.append(f'<tr><th style="text-align: left">{html.escape(str(name))}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody></table>"])
