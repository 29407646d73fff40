"""Cleaning rules: each on or off, each the same when applied twice."""

from __future__ import annotations

import re
import unicodedata

from artel.config import CleanConfig

# Everything below space but line feed and tab, delete, the C1 block, and the byte order mark wherever it strayed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
# Begins only where a run of spaces begins: a try at each space of a long run would take quadratic time.
_TRAILING = re.compile(r"(?<![^\S\n])[^\S\n]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")
# Halves of UTF-16 pairs, as broken JSON has them: no character, and UTF-8 cannot write them.
_SURROGATES = re.compile("[\ud800-\udfff]")


def clean(text: str, rules: CleanConfig) -> str:
    """The text by the rules."""
    text = _SURROGATES.sub("\ufffd", text)
    if rules.whitespace:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if rules.control:
        text = _CONTROL.sub("", text)
    if rules.unicode != "none":
        text = unicodedata.normalize(rules.unicode, text)
    if rules.whitespace:
        text = _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip()
    return text
