"""What others wrote (names, keys, answers of servers, a model's tokens) as it may be shown: no character of it acts.

Escapes colour and rewrite a terminal; a line break forges a line of ours; bidi overrides turn around what is read.
Such characters are shown as Python writes them: `\\x1b`, `\\n`, `\\u202e`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

# C0, DEL and C1, line and paragraph separators, bidi embeddings, overrides and isolates; halves of characters, of names
# of files and of JSON's escapes, which cannot be printed or written at all.
_ACTING = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_LINE = re.compile(f"[{_ACTING}]")
_IN_LINES = re.compile(f"(?![\n\t])[{_ACTING}]")


def in_a_line(text: str) -> str:
    """The text as a part of one line: every acting character is escaped."""
    return _IN_A_LINE.sub(_escape, text)


def in_lines(text: str) -> str:
    """The text with its own line breaks and tabs; every other acting character is escaped."""
    return _IN_LINES.sub(_escape, text)


def json_text(value: object, *, ascii_only: bool = False) -> str:
    """JSON in one line that no terminal acts on; what a reader of JSON gets from it is exact."""
    # json itself escapes C0; what else is matched can stand only within strings.
    return _IN_A_LINE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=ascii_only))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "backslashreplace").decode()


def shortened(text: str, characters: int = 40) -> str:
    """The first characters of a long text, with an ellipsis; a short text unchanged."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first `most` names, separated by commas, and how many there are if that is not all."""
    names = list(names)
    return ", ".join(names[:most]) + (f" … ({len(names)} in all)" if len(names) > most else "")


def in_bytes(count: int) -> str:
    """A number of bytes for people: `3.1 MB`."""
    for scale, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"
