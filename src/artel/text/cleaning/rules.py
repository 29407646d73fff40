"""Cleaning rules. Each can be switched on and off, and applied twice gives the same as once."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from artel.config import CleanConfig
from artel.errors import missing_extra
from artel.text.cleaning.language import share_of_languages
from artel.text.cleaning.pii import check_pii

# Everything below space except line feed and tab, delete, the C1 block, and a byte order mark anywhere.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
# Characters that are invisible in every script: soft hyphen, Mongolian vowel separator, zero-width space, direction
# marks, word joiner and invisible operators. Not the joiners U+200C and U+200D: Persian, Indian scripts and emoji need
# them.
_INVISIBLE = re.compile("[\u00ad\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]")
_BLANK_LINES = re.compile(r"\n{4,}")
# Control characters in UTF-8, searched first, at 1 GB/s: the expression above takes 50 MB/s, and few texts have any.
_CONTROL_BYTES = bytes([*range(9), *range(0x0B, 0x20), 0x7F])
_C1_BYTES, _MARK_BYTES = re.compile(rb"\xc2[\x80-\x9f]"), "\ufeff".encode()
# Halves of UTF-16 pairs, as in broken JSON: they are no characters, and UTF-8 cannot encode them.
_SURROGATES = re.compile("[\ud800-\udfff]")
# A removed character may have separated mojibake, so that the rules repeat until nothing changes. Real texts need two
# rounds; the bound is for texts made up to need many.
_MAX_ROUNDS = 10


def check_packages(rules: CleanConfig) -> None:
    """Raise InputError for rules whose package is missing or knows no such language, before any text is read."""
    if rules.mojibake:
        _without_mojibake("")
    if rules.pii is not None:
        check_pii(rules.pii)
    if rules.languages:
        share_of_languages("", tuple(rules.languages))


def clean(text: str, rules: CleanConfig, changed: Counter[str] | None = None) -> str:
    """Apply the rules for characters and white space.

    Adds 1 to `changed["mojibake_repaired"]` if mojibake was repaired. Raises InputError if `rules.mojibake` is on and
    ftfy is not installed.
    """
    if not rules.mojibake:
        return _apply(text, rules)
    text = _SURROGATES.sub("\ufffd", text)
    is_repaired = False
    for _ in range(_MAX_ROUNDS):
        repaired = _without_mojibake(text)
        is_repaired = is_repaired or repaired != text
        text = _apply(repaired, rules)
        if text == repaired:
            break
    if is_repaired and changed is not None:
        changed["mojibake_repaired"] += 1
    return text


def without_lines(text: str, rules: CleanConfig, changed: Counter[str]) -> str:
    """The text without the lines that an expression of `rules.drop_lines` matches.

    White space at the ends of a line is not matched. Adds the number of lines to `changed["lines_dropped"]`.
    """
    if not (text and rules.drop_lines):
        return text
    searches = [re.compile(pattern).search for pattern in rules.drop_lines]
    lines = text.split("\n")
    kept = [line for line in lines if not any(search(line.strip()) for search in searches)]
    if len(kept) == len(lines):
        return text
    changed["lines_dropped"] += len(lines) - len(kept)
    text = without_spare_space("\n".join(kept)) if rules.whitespace else "\n".join(kept)
    if not rules.mojibake:
        return text
    # ftfy judges a text as a whole: without the dropped lines it may see mojibake in what is left.
    again: Counter[str] = Counter()
    text = clean(text, rules, again)
    if again and not changed["mojibake_repaired"]:
        changed += again
    return without_lines(text, rules, changed)


def without_spare_space(text: str) -> str:
    """The text without white space at the ends of lines and of the text, with at most two blank lines in a row."""
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    return (_BLANK_LINES.sub("\n\n\n", text) if "\n\n\n\n" in text else text).strip()


def _apply(text: str, rules: CleanConfig) -> str:
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
    has_ascii_control = len(data.translate(None, _CONTROL_BYTES)) < len(data)
    return has_ascii_control or _MARK_BYTES in data or _C1_BYTES.search(data) is not None


def _without_mojibake(text: str) -> str:
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError:
        raise missing_extra("ftfy", "mojibake", "data.clean.mojibake") from None
    if text.isascii() or not is_bad(text):
        return text
    # Line by line: one line in the right encoding would keep the others from being repaired.
    return "\n".join(map(fix_encoding, text.split("\n")))
