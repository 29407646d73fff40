"""Make untrusted text (names, keys, server responses, generated tokens) safe to print.

Escape sequences change the terminal, line breaks forge lines of output, and bidi overrides reverse the reading order.
Such control characters are printed as Python escapes: `\\x1b`, `\\n`, `\\u202e`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

# C0, DEL and C1, line and paragraph separators, bidi embeddings, overrides and isolates; and surrogates, which occur in
# file names and JSON escapes and cannot be encoded.
_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL_IN_LINE = re.compile(f"[{_CONTROL}]")
_CONTROL_IN_LINES = re.compile(f"(?![\n\t])[{_CONTROL}]")


def escape_line(text: str) -> str:
    """Escape every control character, so that the text fits in one line."""
    return _CONTROL_IN_LINE.sub(_escape, text)


def escape_lines(text: str) -> str:
    """Escape every control character except line breaks and tabs."""
    return _CONTROL_IN_LINES.sub(_escape, text)


def json_text(value: object, *, ascii_only: bool = False) -> str:
    """Return JSON in one line with control characters escaped, so that it parses to exactly `value`."""
    # json escapes C0 itself; other matches can occur only inside strings.
    return _CONTROL_IN_LINE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=ascii_only))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "backslashreplace").decode()


def shorten(text: str, max_characters: int = 40) -> str:
    """Shorten a text to `max_characters`, with an ellipsis."""
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def join_names(names: Iterable[str], max_names: int = 8) -> str:
    """Join the first `max_names` names with commas, followed by the total if there are more."""
    names = list(names)
    return ", ".join(names[:max_names]) + (f" … ({len(names)} in all)" if len(names) > max_names else "")


def format_bytes(byte_count: int) -> str:
    """Format a number of bytes: `3.1 MB`."""
    for scale, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if byte_count >= scale:
            return f"{byte_count / scale:.3g} {unit}"
    return f"{byte_count} bytes"
