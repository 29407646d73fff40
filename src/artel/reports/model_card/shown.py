"""What a public page may show of a run, and how it stands in Markdown."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from artel.printable import in_a_line, in_lines

_ELSEWHERE = re.compile(r"~|/|\.\./|file:|.*/\.\.(?:/|$)")


def without_place(value: Any) -> Any:
    """A text, or texts in lists and mappings, where a path outside the working folder is only its last part: `…/a.txt`.

    Addresses, and paths below the folder that the run was started in, say nothing of the machine, and stay.
    """
    if isinstance(value, str):
        return f"…/{PurePosixPath(value).name}" if _ELSEWHERE.match(value) or value == ".." else value
    if isinstance(value, dict):
        return {key: without_place(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_place(each) for each in value]
    return value


def code(text: str) -> str:
    """A text as code within a line or a cell of a table; nothing where there is no text."""
    text = in_a_line(text).replace("|", "\\|")
    if not text.strip():
        return ""
    ticks = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def block(text: str, language: str = "") -> str:
    """A text as a block of code, whatever stands in it."""
    text = in_lines(text.rstrip("\n"))
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(columns: list[str], rows: list[list[str]], numbers: set[int] | None = None) -> str:
    """A table whose cells are Markdown; the columns in `numbers` stand on the right."""
    marks = ["---:" if number in (numbers or set()) else "---" for number in range(len(columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, marks, *rows))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
