"""Bytes to text: what a file says of itself, else UTF-8, else the Cyrillic encoding in which it reads as Russian."""

from __future__ import annotations

import codecs
import re

# A mark says more than any guess; UTF-32 before UTF-16, whose mark it begins with.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CYRILLIC = ("windows-1251", "koi8-r", "cp866")
# Control characters that no text holds. Form feed, tab, line feeds and escape do occur in real files.
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
SAMPLE = 1_000_000


class NotText(Exception):
    """The bytes are no text in the encoding given or found; the reason and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def marked_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark names."""
    return next((name for mark, name in _MARKS if data.startswith(mark)), None)


def detect_encoding(data: bytes, *, cut: bool = False) -> str:
    """The encoding of a text without a mark. `cut` says that data may end inside a character.

    Valid UTF-8 is UTF-8: other encodings practically never form it. Among the Cyrillic ones the text decides: in the
    wrong one Russian reads as rare letters, capitals inside words and box-drawing. Bytes over 127 that are few and lone
    (a Western text) read as windows-1252. Raises NotText for binary data.
    """
    marked = marked_encoding(data)
    if marked:
        return marked
    found = _BINARY.search(data)
    if found and (b"\0" in data or len(_BINARY.findall(data[:SAMPLE])) * 100 > len(data[:SAMPLE])):
        raise NotText("binary", f"holds binary data (byte {found[0][0]} at {found.start()}), not text")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
        return "utf-8"
    except UnicodeDecodeError:
        pass
    words = re.findall(rb"[\x80-\xff]+", data)
    lone = sum(len(word) == 1 for word in words)
    if lone * 2 > len(words):  # accents stand alone among Latin letters, Russian words do not
        return "windows-1252"
    return max(_CYRILLIC, key=lambda name: _russian(data[:SAMPLE].decode(name, "replace")))


# Letters of Russian text by frequency (National Corpus of the Russian language), the ten commonest and the rest.
_COMMON = re.compile("[оеаинтсрвл]")
_OTHER = re.compile("[а-яё]")
_WRONG = re.compile("[а-яё][А-ЯЁ]|[\u2500-\u259f\ufffd]|[^\\W\\d_а-яёА-ЯЁa-zA-Z]")


def _russian(text: str) -> float:
    """How much a text looks like Russian: common letters count for, capitals inside words and symbols against."""
    return 2 * len(_COMMON.findall(text)) + len(_OTHER.findall(text)) - 5 * len(_WRONG.findall(text))


def decode(data: bytes, encoding: str = "auto") -> str:
    """A whole text, its line ends made \\n. Raises NotText."""
    if encoding == "auto":
        encoding = detect_encoding(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "windows-1252":
            raise NotText("unreadable", f"is not {encoding}: byte {data[error.start]:#04x} at {error.start}") from None
        text = data.decode("latin-1")  # a few bytes have no meaning in windows-1252; latin-1 has one for each
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
