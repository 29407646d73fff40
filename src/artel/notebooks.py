"""Jupyter: whether this process is a notebook's, and tables as it shows them."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence


def in_notebook() -> bool:
    """Whether Jupyter, or what is like it, shows what this process writes."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def html_table(rows: Iterable[Sequence[object]], header: Sequence[object] = (), caption: str = "") -> str:
    """An HTML table; the first column names the row, numbers stand on the right. All text is escaped."""
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
