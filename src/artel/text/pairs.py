"""Pairs made of plain texts: what a model is to restore is taken out."""

from __future__ import annotations

import re

# A comma that ends a word. One inside a number or a name (3,5) is not punctuation that readers would restore. White
# space before it goes too, or a doubled space would give away where it stood.
_COMMA = re.compile(r"[^\S\n]*,(?=\s|$)")


def without_commas(text: str) -> str:
    """The text without the commas that stand before white space or at its end."""
    return _COMMA.sub("", text)
