"""What goes into a batch script of Slurm: lines that stay one line, and values that stay one value."""

from __future__ import annotations

import re
import unicodedata

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_LINE_BREAKS_AND_THEIR_KIN = {"Cc", "Cs", "Zl", "Zp"}  # of Unicode: control characters, halves of characters, breaks


def one_line(text: str) -> str:
    """The text as it is. Raises ValueError where it would end its line, or cannot be written."""
    if any(unicodedata.category(letter) in _LINE_BREAKS_AND_THEIR_KIN for letter in text):
        raise ValueError(f"{text!r} has a line break or a control character; write it in one line of plain text")
    return text


def directive(name: str, value: object) -> str:
    """`name=value` as it stands behind `#SBATCH --`, quoted where need be. Raises ValueError where it cannot stand."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no option of sbatch; write letters, digits and hyphens, as in qos")
    return f"{name}={quoted(str(value))}"


def quoted(value: str) -> str:
    """A value that sbatch reads as one word: it splits lines at blanks and ends them at #. Raises ValueError."""
    if '"' in one_line(value) or "\\" in value:
        raise ValueError(f"{value!r} has a quote or a backslash, which sbatch would take away; leave it out")
    return value if not value or _PLAIN.fullmatch(value) else f'"{value}"'
