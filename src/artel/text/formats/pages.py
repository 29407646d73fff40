"""Web pages: .html files, and crawled pages in WARC and WET archives.

WARC: https://iipc.github.io/warc-specifications/specifications/warc-format/warc-1.1/
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress

from artel.text.cleaning.html import encoding_in_header, html_to_text, main_text, page_source
from artel.text.formats.format import Format
from artel.text.reading.encodings import decode, is_text_encoding
from artel.text.reading.files import DECOMPRESSION_ERRORS, decompression_error, open_decompressed, with_compressed
from artel.text.reading.lines import read_full
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import BadRecord, DroppedRecord, Record

# Maximum bytes of the headers of a record or response. Crawlers allow 32 or 64 KB.
_MAX_HEADER_BYTES = 1 << 18
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})\b")
_HEADER_END = re.compile(rb"\r?\n\r?\n")
# The length of a chunk, after the line end of the chunk before it.
_CHUNK_SIZE = re.compile(rb"(?:\r?\n)?[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_PAGE_TYPES = ("text/html", "application/xhtml+xml")


def read_html(file: SourceFile) -> Items:
    yield from read_page_records(
        read_full(file.path, file.origin, file.max_bytes), file.content_type, file.origin, file
    )


def read_page_records(page: bytes, content_type: str, origin: str, file: SourceFile) -> Items:
    """Yield the records of a page; a DroppedRecord if it has no main text (`extract: main`).

    Raise BadRecord for a bad page.
    """
    source = file.source
    if source.extract == "main":
        text = main_text(page_source(page, content_type, source.profile, source.encoding), origin)
        if not text:
            yield DroppedRecord("no_main_text", file.set_name)
            return
    else:
        text = html_to_text(page, content_type, source.profile, source.encoding)
    yield from split_text_records(text, origin, file)


def split_text_records(text: str, origin: str, file: SourceFile) -> Items:
    """Yield the text as one record, or one per line: its lines are the paragraphs of the page."""
    if file.source.document in ("auto", "file"):
        yield Record(text, origin, file.set_name)
        return
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Record(line, f"{origin}:{line_number}", file.set_name)


def read_warc(file: SourceFile) -> Items:
    """Yield a record per page. Its origin is `file[index] address`, with the index of the WARC record, from 0.

    A page is HTML or plain text from a response with status 200, or from a conversion or resource record. Requests,
    metadata, images and others are not documents, and are not counted. Pages of over data.max_document bytes are
    rejected. If the archive is damaged, the last item reports it.
    """
    origin = file.origin
    with open_decompressed(file.path, file.origin) as stream:
        try:
            for index, entry in enumerate(_read_entries(stream)):
                address = entry.headers.get("warc-target-uri", "").strip("<>")
                origin = f"{file.origin}[{index}] {address}".rstrip()
                try:
                    page = _read_page(entry, file.max_bytes)
                    if page is None:
                        continue
                    content_type, content = page
                    if _media_type(content_type) in _PAGE_TYPES:
                        yield from read_page_records(content, content_type, origin, file)
                    else:
                        text = _decode_text(content, content_type, file.source.encoding)
                        yield from split_text_records(text, origin, file)
                except BadRecord as error:
                    yield file.reject(origin, error)
        except DECOMPRESSION_ERRORS as error:
            detail = f"{decompression_error(error).detail} (in this record or after it)"
            yield file.reject(origin, BadRecord("truncated", detail))
        except _BadArchive as error:
            detail = f"the archive is damaged in this record or after it: {error}; download it again"
            yield file.reject(origin, BadRecord(error.reason, detail))


class _BadArchive(Exception):
    """Damage to an archive: nothing after it can be read."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Entry:
    """A WARC record: its headers, by lower-case names, and its block, which may not fit in memory."""

    def __init__(self, headers: dict[str, str], stream: io.BufferedReader, length: int) -> None:
        self.headers = headers
        self._stream = stream
        self.remaining_bytes = length

    def read(self, num_bytes: int) -> bytes:
        num_bytes = min(num_bytes, self.remaining_bytes)
        data = self._stream.read(num_bytes)
        if len(data) < num_bytes:
            raise _BadArchive("truncated", f"it ends {self.remaining_bytes - len(data):,} bytes before the record does")
        self.remaining_bytes -= num_bytes
        return data


def _read_entries(stream: io.BufferedReader) -> Iterator[_Entry]:
    """Yield the records of an archive, skipping unread bytes of the previous record."""
    while True:
        line = stream.readline(_MAX_HEADER_BYTES)
        while line and not line.strip():  # two line ends follow a record
            line = stream.readline(_MAX_HEADER_BYTES)
        if not line:
            return
        if not line.startswith(b"WARC/"):
            if b"WARC/".startswith(line):
                raise _BadArchive("truncated", "it ends in a header")
            raise _BadArchive("bad_warc", "a record does not begin with WARC/ and a version")
        header = bytearray()
        while (line := stream.readline(_MAX_HEADER_BYTES)) not in (b"\r\n", b"\n"):
            header += line
            if not line.endswith(b"\n") and len(line) < _MAX_HEADER_BYTES:
                raise _BadArchive("truncated", "it ends in a header")
            if len(header) > _MAX_HEADER_BYTES:
                raise _BadArchive("bad_warc", f"a header has over {_MAX_HEADER_BYTES:,} bytes")
        headers = _parse_headers(bytes(header))
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise _BadArchive("bad_warc", "a record does not say its length (Content-Length)")
        entry = _Entry(headers, stream, int(length))
        yield entry
        while entry.remaining_bytes:
            entry.read(1 << 20)


def _read_page(entry: _Entry, max_bytes: int) -> tuple[str, bytes] | None:
    """Return (content type, content) of a record that is a page, else None. Raise BadRecord and _BadArchive."""
    kind = entry.headers.get("warc-type", "").lower()
    if kind in ("conversion", "resource"):
        content_type = entry.headers.get("content-type", "text/plain" if kind == "conversion" else "")
        return (content_type, _read_body(entry, b"", max_bytes)) if _is_text(content_type) else None
    if kind != "response" or not entry.headers.get("content-type", "").lower().startswith("application/http"):
        return None
    head = entry.read(_MAX_HEADER_BYTES)
    status, end = _STATUS.match(head), _HEADER_END.search(head)
    if status is None or end is None:
        raise BadRecord("bad_http", "is not an HTTP response with a status line and headers")
    headers = _parse_headers(head[: end.start()])
    content_type = headers.get("content-type", entry.headers.get("warc-identified-payload-type", ""))
    if status[1] != b"200" or not _is_text(content_type):
        return None
    body = _read_body(entry, head[end.end() :], max_bytes)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _join_chunks(body)
    return content_type, _decode_body(body, headers.get("content-encoding", "").strip().lower(), max_bytes)


def _read_body(entry: _Entry, head: bytes, max_bytes: int) -> bytes:
    body_bytes = len(head) + entry.remaining_bytes
    if body_bytes > max_bytes:
        raise _size_error(f"{body_bytes:,}", max_bytes)
    return head + entry.read(entry.remaining_bytes)


def _size_error(description: str, max_bytes: int) -> BadRecord:
    detail = f"has {description} bytes, more than data.max_document ({max_bytes:,}) allows in one document"
    return BadRecord("too_large", detail)


def _parse_headers(header: bytes) -> dict[str, str]:
    """Parse lines `Name: value`. The first line of a name counts. Other lines, such as the status, are ignored."""
    headers: dict[str, str] = {}
    for line in header.decode("utf-8", "replace").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return headers


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_text(content_type: str) -> bool:
    return _media_type(content_type) in (*_PAGE_TYPES, "text/plain")


def _join_chunks(body: bytes) -> bytes:
    """Join a chunked body. Many crawlers store it already joined, but keep the header."""
    chunks: list[bytes] = []
    position = 0
    while header := _CHUNK_SIZE.match(body, position):
        length = int(header[1], 16)
        if length == 0:
            return b"".join(chunks)
        position = header.end() + length
        chunks.append(body[header.end() : position])
    if chunks:
        raise BadRecord("truncated", "is cut off, or its chunks are inconsistent; remove it")
    return body


def _decode_body(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Decode the Content-Encoding of a body. Many crawlers store it already decoded, but keep the header."""
    try:
        if coding in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
            content = _inflate(body, zlib.MAX_WBITS | 16, max_bytes)
        elif coding == "deflate" and not body.lstrip().startswith(b"<"):
            # With a zlib header, as in the standard, or without, as some servers send it.
            content = _inflate(body, zlib.MAX_WBITS if body[:1] == b"\x78" else -zlib.MAX_WBITS, max_bytes)
        elif coding in ("br", "zstd") and not body.lstrip().startswith(b"<"):
            raise BadRecord("unreadable", f"is compressed with {coding}, which is not supported; remove it")
        else:
            return body
    except zlib.error as error:
        raise BadRecord("unreadable", f"is not {coding}, contrary to its header: {error}") from None
    if len(content) > max_bytes:
        raise _size_error(f"over {max_bytes:,}", max_bytes)
    return content


def _inflate(body: bytes, window_bits: int, max_bytes: int) -> bytes:
    inflate = zlib.decompressobj(window_bits)
    content = inflate.decompress(body, max_bytes + 1)
    if not inflate.eof and len(content) <= max_bytes:
        raise BadRecord("truncated", "is compressed and incomplete; remove it")
    return content


def _decode_text(content: bytes, content_type: str, encoding: str) -> str:
    """Decode a text with the encoding of the source, else of the header, else the detected one."""
    if encoding == "auto":
        name = encoding_in_header(content_type)
        with suppress(BadRecord):
            return decode(content, name if is_text_encoding(name) else "auto")
    return decode(content, encoding)


HTML = Format(read=read_html, suffixes=(".html", ".htm", ".xhtml", ".shtml"), is_detected=True, is_pages=True)
WARC = Format(read=read_warc, suffixes=with_compressed(".warc", ".warc.wet"), is_detected=True, is_pages=True)
