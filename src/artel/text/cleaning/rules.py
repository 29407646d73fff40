"""Cleaning rules for characters and lines. Cleaning twice gives the same text as cleaning once."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from artel.config import CleanConfig
from artel.errors import missing_extra
from artel.text.cleaning.pii import check_pii
from artel.text.cleaning.quality import language_probability

# Everything below space except line feed and tab, delete, the C1 block, and a byte order mark anywhere.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
# Control characters that end a line: vertical tab (Word's line break), form feed (pdftotext's page break), NEL.
_BREAKS = re.compile("[\x0b\x0c\x85]")
# Characters that are invisible in every script: soft hyphen, Mongolian vowel separator, zero-width space, direction
# marks, word joiner and invisible operators. Not the joiners U+200C and U+200D: Persian, Indian scripts and emoji need
# them.
_INVISIBLE = re.compile("[\u00ad\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]")
# Control characters in UTF-8. Searching these bytes first runs at 1 GB/s (the expression above: 50 MB/s), and few texts
# have any.
_CONTROL_BYTES = bytes([*range(9), *range(0x0B, 0x20), 0x7F])
_C1_BYTES, _MARK_BYTES = re.compile(rb"\xc2[\x80-\x9f]"), "\ufeff".encode()
# Lone surrogates, as in broken JSON: UTF-8 cannot encode them.
_SURROGATES = re.compile("[\ud800-\udfff]")
# Removing a character may join mojibake, so the rules repeat until nothing changes. Real texts need two rounds; the
# limit stops adversarial texts.
_MAX_ROUNDS = 10


def check_packages(rules: CleanConfig) -> None:
    """Raise InputError if a package that the rules need is missing, or does not support one of the languages."""
    if rules.mojibake:
        _repair_mojibake("")
    if rules.pii is not None:
        check_pii(rules.pii)
    if rules.languages:
        language_probability("", tuple(rules.languages))


def clean(text: str, rules: CleanConfig, changes: Counter[str] | None = None) -> str:
    """Apply the rules for characters, line ends and trailing white space. Other characters are unchanged.

    Add 1 to `changes` under the name of each rule that changed the text, such as `mojibake_repaired`. Raise
    InputError if `rules.mojibake` is on and ftfy is not installed.
    """
    applied: set[str] = set()
    if not rules.mojibake:
        text = _apply_rules(text, rules, applied)
    else:
        text = _SURROGATES.sub("\ufffd", text)
        for _ in range(_MAX_ROUNDS):
            repaired = _repair_mojibake(text)
            if repaired != text:
                applied.add("mojibake_repaired")
            text = _apply_rules(repaired, rules, applied)
            if text == repaired:
                break
    if applied and changes is not None:
        changes.update(applied)
    return text


def drop_lines(text: str, rules: CleanConfig, changes: Counter[str]) -> str:
    """Remove the lines that, stripped, match an expression of `rules.drop_lines`. Count them in `changes`."""
    if not (text and rules.drop_lines):
        return text
    searches = [re.compile(pattern).search for pattern in rules.drop_lines]
    lines = text.split("\n")
    kept_lines = [line for line in lines if not any(search(line.strip()) for search in searches)]
    if len(kept_lines) == len(lines):
        return text
    changes["lines_dropped"] += len(lines) - len(kept_lines)
    text = "\n".join(kept_lines).rstrip()
    if not rules.mojibake:
        return text
    # ftfy judges the full text: without the dropped lines it may find mojibake in the rest.
    later_changes: Counter[str] = Counter()
    text = clean(text, rules, later_changes)
    if later_changes and not changes["mojibake_repaired"]:
        changes += later_changes
    return drop_lines(text, rules, changes)


def _apply_rules(text: str, rules: CleanConfig, applied: set[str]) -> str:
    """Apply all rules except mojibake. Add the names of rules that changed the text to `applied`."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        text = _SURROGATES.sub("\ufffd", text)
        data = text.encode()
        applied.add("surrogates_replaced")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        applied.add("line_ends_unified")
    if _has_control(data):
        text = _record_change(_CONTROL.sub("", _BREAKS.sub("\n", text)), text, "control_removed", applied)
    if rules.invisible:
        text = _record_change(_INVISIBLE.sub("", text), text, "invisible_removed", applied)
    if rules.unicode != "none":
        text = _record_change(unicodedata.normalize(rules.unicode, text), text, "unicode_normalized", applied)
    # Removing one line feed at the end does not count: nearly every file ends with one.
    return _record_change(text.rstrip(), text.removesuffix("\n"), "trailing_space_removed", applied)


def _record_change(new: str, old: str, name: str, applied: set[str]) -> str:
    if new != old:
        applied.add(name)
    return new


def _has_control(data: bytes) -> bool:
    has_ascii_control = len(data.translate(None, _CONTROL_BYTES)) < len(data)
    return has_ascii_control or _MARK_BYTES in data or _C1_BYTES.search(data) is not None


def _repair_mojibake(text: str) -> str:
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError:
        raise missing_extra("ftfy", "mojibake", "data.clean.mojibake") from None
    if text.isascii() or not is_bad(text):
        return text
    # Line by line: one line in the right encoding would keep ftfy from repairing the others.
    return "\n".join(map(fix_encoding, text.split("\n")))
