"""Quoting for a batch script of Slurm: a line stays one line, and a value one value."""

from __future__ import annotations

import re
import unicodedata

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_CONTROL_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}  # of Unicode: control characters, halves of characters, breaks


def one_line(text: str) -> str:
    """The text itself. Raises ValueError where it would end its line, or cannot be written."""
    if any(unicodedata.category(letter) in _CONTROL_CATEGORIES for letter in text):
        raise ValueError(f"{text!r} has a line break or a control character; write it in one line of plain text")
    return text


def directive(name: str, value: object) -> str:
    """`name=value` for `#SBATCH --`, quoted where necessary. Raises ValueError where sbatch could not read it."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no option of sbatch; write letters, digits and hyphens, as in qos")
    return f"{name}={quoted(str(value))}"


def quoted(value: str) -> str:
    """A value as one word for sbatch, which splits lines at blanks and ends them at #. Raises ValueError."""
    if '"' in one_line(value) or "\\" in value:
        raise ValueError(f"{value!r} has a quote or a backslash, which sbatch would take away; remove it")
    return value if not value or _PLAIN.fullmatch(value) else f'"{value}"'
