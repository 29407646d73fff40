"""Writes docs/run-file.md from the program's own help: `make docs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "run-file.md"


def run_file_page() -> str:
    """The page: every key of the run file with its default and its line of help."""
    command = [sys.executable, "-m", "artel", "config", "explain"]
    keys = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"# Every key of the run file\n\nMade by `make docs` from `artel config explain`.\n\n```text\n{keys}```\n"


if __name__ == "__main__":
    TARGET.write_text(run_file_page(), encoding="utf-8")
