"""Quote values in Slurm batch scripts. A value that could become two words or lines is rejected."""

from __future__ import annotations

import re
import unicodedata

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_UNQUOTED = re.compile(r"[\w@%+=:,./-]+")
_CONTROL_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}  # Unicode: control characters, surrogates, line and paragraph separators


def check_one_line(text: str) -> str:
    """Return the text. Raise ValueError if it has a line break or a character that cannot be written."""
    if any(unicodedata.category(letter) in _CONTROL_CATEGORIES for letter in text):
        raise ValueError(f"{text!r} has a line break or a control character; write it in one line of plain text")
    return text


def format_directive(name: str, value: object) -> str:
    """Return `name=value` for `#SBATCH --`, quoted if necessary. Raise ValueError if sbatch could not read it."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not an option of sbatch; write letters, digits and hyphens, e.g. qos")
    return f"{name}={quote_value(str(value))}"


def quote_value(value: str) -> str:
    """Return a value as one word for sbatch, which splits lines at blanks and ends them at #.

    Raise ValueError if it has a quote, a backslash or a line break.
    """
    if '"' in check_one_line(value) or "\\" in value:
        raise ValueError(f"{value!r} has a quote or a backslash, which sbatch would remove; remove it")
    return value if not value or _UNQUOTED.fullmatch(value) else f'"{value}"'
