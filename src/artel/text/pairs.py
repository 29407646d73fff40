"""Pairs from plain texts: the input is the text without what the model is to restore."""

from __future__ import annotations

import re

# A comma at the end of a word; one inside a number or a name (3,5) is not punctuation that readers would restore. White
# space before it goes too: a double space would give away its position.
_COMMA = re.compile(r"[^\S\n]*,(?=\s|$)")


def without_commas(text: str) -> str:
    """The text without the commas before white space and at its end."""
    return _COMMA.sub("", text)
