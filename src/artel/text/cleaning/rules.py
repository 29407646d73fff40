"""Cleaning rules: each on or off, each the same when applied twice."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from artel.config import CleanConfig
from artel.errors import missing_extra
from artel.text.cleaning.language import share_of_languages

# Everything below space but line feed and tab, delete, the C1 block, and the byte order mark wherever it strayed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
# What shows nothing in any script: soft hyphen, Mongolian vowel separator, zero-width space, direction marks, word
# joiner and invisible operators. Not the two joiners U+200C and U+200D: Persian, the scripts of India and emoji need
# them.
_INVISIBLE = re.compile("[\u00ad\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]")
_BLANK_LINES = re.compile(r"\n{4,}")
# The same in UTF-8, looked for first, at 1 GB/s: the expression above goes over a text at 50 MB/s, and few texts have
# one.
_CONTROL_BYTES = bytes([*range(9), *range(0x0B, 0x20), 0x7F])
_C1_BYTES, _MARK_BYTES = re.compile(rb"\xc2[\x80-\x9f]"), "\ufeff".encode()
# Halves of UTF-16 pairs, as broken JSON has them: no character, and UTF-8 cannot write them.
_SURROGATES = re.compile("[\ud800-\udfff]")
# What a rule removes may bring mojibake together that was apart: the rules go round until nothing changes. Real texts
# need two rounds; the bound is for texts made up to need many.
_ROUNDS = 10


def check_packages(rules: CleanConfig) -> None:
    """Raise InputError for rules whose package is not installed, or knows no such language, before any text is read."""
    if rules.mojibake:
        _without_mojibake("")
    if rules.languages:
        share_of_languages("", tuple(rules.languages))


def clean(text: str, rules: CleanConfig, counted: Counter[str] | None = None) -> str:
    """The text by the rules for characters and white space.

    Adds one to `counted["mojibake_repaired"]` where mojibake was repaired. Raises InputError where `rules.mojibake` is
    on and ftfy is not installed.
    """
    if not rules.mojibake:
        return _tidied(text, rules)
    text = _SURROGATES.sub("\ufffd", text)
    repaired = False
    for _ in range(_ROUNDS):
        mended = _without_mojibake(text)
        repaired = repaired or mended != text
        text = _tidied(mended, rules)
        if text == mended:
            break
    if repaired and counted is not None:
        counted["mojibake_repaired"] += 1
    return text


def without_lines(text: str, rules: CleanConfig, counted: Counter[str]) -> str:
    """The text without the lines in which an expression of `rules.drop_lines` is found.

    An expression sees a line without the white space at its ends. Adds the number of lines to
    `counted["lines_dropped"]`.
    """
    if not (text and rules.drop_lines):
        return text
    found = [re.compile(pattern).search for pattern in rules.drop_lines]
    lines = text.split("\n")
    kept = [line for line in lines if not any(search(line.strip()) for search in found)]
    if len(kept) == len(lines):
        return text
    counted["lines_dropped"] += len(lines) - len(kept)
    return without_spare_space("\n".join(kept)) if rules.whitespace else "\n".join(kept)


def without_spare_space(text: str) -> str:
    """No white space at the ends of lines and of the text, and at most two blank lines in a row."""
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    return (_BLANK_LINES.sub("\n\n\n", text) if "\n\n\n\n" in text else text).strip()


def _tidied(text: str, rules: CleanConfig) -> str:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        text = _SURROGATES.sub("\ufffd", text)
        data = text.encode()
    if rules.whitespace:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if rules.control and _has_control(data):
        text = _CONTROL.sub("", text)
    if rules.invisible:
        text = _INVISIBLE.sub("", text)
    if rules.unicode != "none":
        text = unicodedata.normalize(rules.unicode, text)
    return without_spare_space(text) if rules.whitespace else text


def _has_control(data: bytes) -> bool:
    some = len(data.translate(None, _CONTROL_BYTES)) < len(data)
    return some or _MARK_BYTES in data or _C1_BYTES.search(data) is not None


def _without_mojibake(text: str) -> str:
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError:
        raise missing_extra("ftfy", "mojibake", "data.clean.mojibake") from None
    if text.isascii() or not is_bad(text):
        return text
    # By lines: one line in the right encoding would keep the others from being decoded.
    return "\n".join(map(fix_encoding, text.split("\n")))
