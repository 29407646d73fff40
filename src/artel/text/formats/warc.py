"""Crawled pages: the web pages and plain texts in a WARC archive, or the texts in a WET one."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.cleaning.html import named_encoding
from artel.text.formats.html import records_of_page, records_of_text
from artel.text.reading.encodings import NotText, decode, is_text_encoding
from artel.text.reading.lines import DAMAGED, damaged, unpacked
from artel.text.reading.rows import Items
from artel.text.records import Rejected

# Bytes of the headers of a record, or of an answer, that are read at most; crawlers allow 32 or 64 KB.
_LONGEST_HEAD = 1 << 18
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})\b")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
# The length of a chunk; before it the line end of the one before.
_CHUNK = re.compile(rb"(?:\r?\n)?[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_PAGES = ("text/html", "application/xhtml+xml")


def read_warc(file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig) -> Items:
    """A record a page, its origin `file[number] address`, by the number of the WARC record from 0.

    Pages are HTML and plain text that a server answered with status 200, or that the archive holds converted or as they
    are. Requests, notes, images and the rest are no documents and are not counted. A page of more than
    data.max_document bytes is rejected; where the archive is damaged the last item tells so.
    """
    where = origin
    with unpacked(file, origin) as stream:
        try:
            for number, entry in enumerate(_entries(stream)):
                where = f"{origin}[{number}] {entry.address}".rstrip()
                try:
                    page = _page(entry, data.max_document)
                    if page is None:
                        continue
                    content_type, content = page
                    if _media_type(content_type) in _PAGES:
                        yield from records_of_page(content, content_type, where, set_name, source)
                    else:
                        text = _plain_text(content, content_type, source.encoding)
                        yield from records_of_text(text, where, set_name, source)
                except NotText as error:
                    yield Rejected(where, error.reason, error.detail, set_name)
        except DAMAGED as error:
            yield Rejected(where, "truncated", f"{damaged(error).detail} (in this record or behind it)", set_name)
        except _BadArchive as error:
            detail = f"the archive is damaged in this record or behind it: {error}; fetch it anew"
            yield Rejected(where, error.reason, detail, set_name)


class _BadArchive(Exception):
    """What follows cannot be read: the reason and a sentence."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Entry:
    """A WARC record: its headers, by names in small letters, and its block, to be read before the next record."""

    headers: dict[str, str]
    block: _Block

    @property
    def address(self) -> str:
        return self.headers.get("warc-target-uri", "").strip("<>")


class _Block:
    """The bytes of a record, which may be more than memory holds."""

    def __init__(self, stream: io.BufferedReader, length: int) -> None:
        self._stream = stream
        self.left = length

    def read(self, count: int) -> bytes:
        piece = self._stream.read(min(count, self.left))
        if len(piece) < min(count, self.left):
            raise _BadArchive("truncated", f"it ends {self.left - len(piece):,} bytes before the record does")
        self.left -= len(piece)
        return piece

    def skip(self) -> None:
        while self.left:
            self.read(1 << 20)


def _entries(stream: io.BufferedReader) -> Iterator[_Entry]:
    """The records of an archive; what is not read of one is skipped."""
    while True:
        line = stream.readline(_LONGEST_HEAD)
        while line and not line.strip():  # two line ends stand behind a record
            line = stream.readline(_LONGEST_HEAD)
        if not line:
            return
        if not line.startswith(b"WARC/"):
            if b"WARC/".startswith(line):
                raise _BadArchive("truncated", "it ends in a header")
            raise _BadArchive("bad_warc", "a record does not begin with WARC/ and a version")
        head = bytearray()
        while (line := stream.readline(_LONGEST_HEAD)) not in (b"\r\n", b"\n"):
            head += line
            if not line.endswith(b"\n") and len(line) < _LONGEST_HEAD:
                raise _BadArchive("truncated", "it ends in a header")
            if len(head) > _LONGEST_HEAD:
                raise _BadArchive("bad_warc", f"a header has over {_LONGEST_HEAD:,} bytes")
        headers = _headers(bytes(head))
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise _BadArchive("bad_warc", "a record does not say its length (Content-Length)")
        block = _Block(stream, int(length))
        yield _Entry(headers, block)
        block.skip()


def _page(entry: _Entry, largest: int) -> tuple[str, bytes] | None:
    """The content type and the content of a record that is a page; None for all that are not.

    Raises NotText when the content cannot be had, _BadArchive when the archive ends in it.
    """
    kind = entry.headers.get("warc-type", "").lower()
    if kind in ("conversion", "resource"):
        content_type = entry.headers.get("content-type", "text/plain" if kind == "conversion" else "")
        return (content_type, _bounded(entry.block, b"", largest)) if _is_read(content_type) else None
    if kind != "response" or not entry.headers.get("content-type", "").lower().startswith("application/http"):
        return None
    start = entry.block.read(min(entry.block.left, _LONGEST_HEAD))
    status, end = _STATUS.match(start), _HEAD_END.search(start)
    if status is None or end is None:
        raise NotText("bad_http", "holds no answer of a server, which begins with HTTP/, a status and headers")
    headers = _headers(start[: end.start()])
    content_type = headers.get("content-type", entry.headers.get("warc-identified-payload-type", ""))
    if status[1] != b"200" or not _is_read(content_type):
        return None
    body = _bounded(entry.block, start[end.end() :], largest)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _joined(body)
    return content_type, _unpacked(body, headers.get("content-encoding", "").strip().lower(), largest)


def _bounded(block: _Block, begun: bytes, largest: int) -> bytes:
    size = len(begun) + block.left
    if size > largest:
        raise _too_large(f"{size:,}", largest)
    return begun + block.read(block.left)


def _too_large(size: str, largest: int) -> NotText:
    return NotText("too_large", f"has {size} bytes, more than data.max_document ({largest:,}) allows in one document")


def _headers(head: bytes) -> dict[str, str]:
    """The lines `Name: value`, the first of a name counts; others, as the status line, are left out."""
    found: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_read(content_type: str) -> bool:
    return _media_type(content_type) in (*_PAGES, "text/plain")


def _joined(body: bytes) -> bytes:
    """The chunks of a body that was sent in such, joined; many crawlers keep it joined and the header as it was."""
    pieces: list[bytes] = []
    at = 0
    while size := _CHUNK.match(body, at):
        length = int(size[1], 16)
        if length == 0:
            return b"".join(pieces)
        at = size.end() + length
        pieces.append(body[size.end() : at])
    if pieces:
        raise NotText("truncated", "is cut off, or its chunks do not follow on one another; leave it out")
    return body


def _unpacked(body: bytes, coding: str, largest: int) -> bytes:
    """The body as the page was before the server packed it; many crawlers keep it so and the header as it was."""
    try:
        if coding in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
            content = _inflated(body, zlib.MAX_WBITS | 16, largest)
        elif coding == "deflate" and not body.lstrip().startswith(b"<"):
            # With its own header, as the standard says, or without, as some servers do.
            content = _inflated(body, zlib.MAX_WBITS if body[:1] == b"\x78" else -zlib.MAX_WBITS, largest)
        elif coding in ("br", "zstd") and not body.lstrip().startswith(b"<"):
            raise NotText("unreadable", f"is packed by {coding}, which is not read; leave it out")
        else:
            return body
    except zlib.error as error:
        raise NotText("unreadable", f"is no {coding}, as its header says: {error}") from None
    if len(content) > largest:
        raise _too_large(f"over {largest:,}", largest)
    return content


def _inflated(body: bytes, bits: int, largest: int) -> bytes:
    inflate = zlib.decompressobj(bits)
    content = inflate.decompress(body, largest + 1)
    if not inflate.eof and len(content) <= largest:
        raise NotText("truncated", "is packed, and cut off before its end; leave it out")
    return content


def _plain_text(content: bytes, content_type: str, encoding: str) -> str:
    """The text in the encoding given, else the one that the header names if it is one, else detected."""
    if encoding == "auto":
        name = named_encoding(content_type)
        with suppress(NotText):
            return decode(content, name if is_text_encoding(name) else "auto")
    return decode(content, encoding)
