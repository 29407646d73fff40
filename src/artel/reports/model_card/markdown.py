"""Markdown for the model card, without paths of this machine."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from artel.printable import escape_line, escape_lines

_OUTSIDE_PATH = re.compile(r"~|/|\.\./|file:|.*/\.\.(?:/|$)")


def hide_paths(value: Any) -> Any:
    """Shorten paths outside the working folder to their last component (`…/a.txt`), also inside lists and dicts.

    URLs and paths below the working folder reveal nothing about the machine and stay.
    """
    if isinstance(value, str):
        return f"…/{PurePosixPath(value).name}" if _OUTSIDE_PATH.match(value) or value == ".." else value
    if isinstance(value, dict):
        return {key: hide_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_paths(item) for item in value]
    return value


def code(text: str) -> str:
    """Format as inline code, also inside a table cell. Empty for an empty text."""
    text = escape_line(text).replace("|", "\\|")
    if not text.strip():
        return ""
    ticks = "`" * (_longest_backtick_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def block(text: str, language: str = "") -> str:
    """Format any text as a fenced code block."""
    text = escape_lines(text.rstrip("\n"))
    fence = "`" * max(3, _longest_backtick_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(columns: list[str], rows: list[list[str]], numeric: set[int] | None = None) -> str:
    """Format a table with Markdown cells. Columns with an index in `numeric` are right-aligned."""
    marks = ["---:" if index in (numeric or set()) else "---" for index in range(len(columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, marks, *rows))


def _longest_backtick_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
