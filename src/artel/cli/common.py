"""Arguments shared by the commands, and their output: messages on standard error, JSON on standard output."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from artel.cli.streams import print_status, write_stdout
from artel.errors import ArtelError
from artel.printable import json_text

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run file, a recipe name or a run folder.")]
OverrideWords = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. train.learning_rate=3e-4.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]

__all__ = ["AsJson", "OverrideWords", "RunName", "print_error", "print_json", "print_status"]


def print_error(error: ArtelError, prefix: str = "") -> None:
    """Print an error that does not end the command, each problem after `prefix`."""
    for problem in error.problems:
        first_line, *more_lines = problem.lines
        print_status(f"{prefix}{first_line}", *more_lines)


def print_json(result: dict[str, Any]) -> None:
    """Print one JSON document on standard output, from rank 0 only. Raise WorkError if it cannot be written."""
    if os.environ.get("RANK", "0") == "0":
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        write_stdout(json_text(result, ascii_only=not is_utf8) + "\n")
