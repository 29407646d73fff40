"""Lines of a file of any size, one at a time: plain, .gz, .zst, .xz or .bz2, in any encoding."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from artel.errors import InputError
from artel.text.reading.encodings import (
    BLOCK_BYTES,
    SAMPLE_BYTES,
    decode,
    describe_other_encoding,
    detect_stream_encoding,
    detect_wide_encoding,
    find_lines_in_other_encoding,
    is_single_byte,
    normalize_line_ends,
)
from artel.text.reading.files import (
    COMPRESSED_SUFFIXES,
    DECOMPRESSION_ERRORS,
    decompression_error,
    file_name,
    open_decompressed,
)
from artel.text.records import BadRecord

# Decompressed bytes buffered ahead of lines. A megabyte would leave the cache of a core before it is read.
_READ_AHEAD_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of an uncompressed file whose first byte is in [start, stop)."""

    start: int
    stop: int


def read_lines(
    file: Path, origin: str, encoding: str, max_bytes: int, span: Span | None = None
) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield (line number, the line without its end, or a BadRecord). Numbers begin at 1, in a span too.

    With `encoding` "auto" the lines that are not ASCII decide. A truncated compressed file yields a last bad line. Only
    a file that `can_be_divided` has spans. Raise BadRecord for binary data, InputError for a longer line.
    """
    encoding_name = line_encoding(file, origin, encoding)
    if not _has_line_feed_byte(encoding_name):
        if span is not None:
            raise ValueError(f"{origin} in {encoding_name} cannot be divided")
        yield from _read_multibyte_lines(file, origin, encoding_name, max_bytes)
        return
    lines = read_byte_lines(file, origin, max_bytes, span)
    if is_single_byte(encoding_name):
        yield from _decode_single_byte(lines, encoding_name)
    else:
        for line_number, line in lines:
            yield line_number, line if isinstance(line, BadRecord) else _decode_line(line, encoding_name)


def _decode_line(line: bytes, encoding: str) -> str | BadRecord:
    try:
        return decode(line.rstrip(b"\r\n"), encoding)
    except BadRecord as error:
        return error


def _decode_single_byte(
    lines: Iterator[tuple[int, bytes | BadRecord]], encoding: str
) -> Iterator[tuple[int, str | BadRecord]]:
    """Decode lines of a single-byte encoding, a block at a time. Lines in another encoding are bad."""
    for block in _group_blocks(lines):
        content = b"".join(line for _, line in block if isinstance(line, bytes))
        others = find_lines_in_other_encoding(content, encoding)
        texts: list[str] = []
        if not others and b"\r" not in content and not isinstance(block[-1][1], BadRecord):
            with suppress(UnicodeDecodeError):  # the loop below finds the bad line
                texts = content.decode(encoding).split("\n")
        if texts:
            yield from zip((line_number for line_number, _ in block), texts, strict=False)
            continue
        for index, (line_number, line) in enumerate(block):
            if index in others:
                yield line_number, BadRecord("other_encoding", describe_other_encoding(encoding, others[index]))
            else:
                yield line_number, line if isinstance(line, BadRecord) else _decode_line(line, encoding)


def _group_blocks(lines: Iterator[tuple[int, bytes | BadRecord]]) -> Iterator[list[tuple[int, bytes | BadRecord]]]:
    """Group lines into blocks of about BLOCK_BYTES. Raise an error of `lines` after yielding the lines before it."""
    block: list[tuple[int, bytes | BadRecord]] = []
    num_bytes = 0
    try:
        for line_number, line in lines:
            block.append((line_number, line))
            num_bytes += len(line) if isinstance(line, bytes) else 0
            if num_bytes >= BLOCK_BYTES:
                yield block
                block, num_bytes = [], 0
    except InputError:
        if block:
            yield block
        raise
    if block:
        yield block


def read_byte_lines(
    file: Path, origin: str, max_bytes: int, span: Span | None = None
) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Like `read_lines`, but undecoded and with line ends, for parsers that read UTF-8 faster themselves."""
    with open_decompressed(file, origin, _READ_AHEAD_BYTES) as stream:
        position = _seek_line(stream, span.start) if span else 0
        stop = span.stop if span else sys.maxsize
        line_number = 0
        while position < stop:
            line_number += 1
            try:
                line = stream.readline(max_bytes + 1)
            except DECOMPRESSION_ERRORS as error:
                yield line_number, decompression_error(error)
                return
            if not line:
                return
            if len(line) > max_bytes:
                lines_before = count_lines(file, Span(0, span.start)) if span else 0
                raise _long_line_error(origin, lines_before + line_number, max_bytes)
            position += len(line)
            yield line_number, line


def line_encoding(file: Path, origin: str, encoding: str) -> str:
    """Return `encoding`, or the detected one if it is "auto". Raise BadRecord for binary data."""
    if encoding != "auto":
        return encoding
    status = file.stat()
    if status.st_size <= SAMPLE_BYTES:
        return _detect_encoding(file, origin)
    return _detect_large_encoding(file, origin, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)  # called for each span of a large file
def _detect_large_encoding(file: Path, origin: str, num_bytes: int, mtime: int) -> str:
    return _detect_encoding(file, origin)


def _detect_encoding(file: Path, origin: str) -> str:
    with open_decompressed(file, origin) as stream:

        def read(num_bytes: int) -> bytes:
            try:
                return stream.read1(num_bytes)
            except DECOMPRESSION_ERRORS:
                return b""  # the text before the damage decides; reading the lines reports the damage

        return detect_stream_encoding(read)


def can_be_divided(file: Path, origin: str, encoding: str) -> bool:
    """True if reading can begin inside the file: not if it is compressed, binary, UTF-16, UTF-32 or a JSON array."""
    if file_name(origin).endswith(COMPRESSED_SUFFIXES):
        return False
    with file.open("rb") as stream:
        head = stream.read(SAMPLE_BYTES)
        encoding_name = detect_wide_encoding(head) if encoding == "auto" else encoding
        if (b"\0" in head and not encoding_name) or not _has_line_feed_byte(encoding_name or "utf-8"):
            return False
        if not file_name(origin).endswith(".json"):
            return True
        stream.seek(0)
        while line := stream.readline(SAMPLE_BYTES):
            # The same test as in `read_rows`: is the file an array?
            if text := normalize_line_ends(line.decode(encoding_name or "utf-8", "replace")).strip():
                return not text.startswith("[")
    return False


def count_lines(file: Path, span: Span) -> int:
    """Count the lines of an uncompressed file that begin in the span."""
    with file.open("rb", buffering=0) as stream:
        stop = min(span.stop, stream.seek(0, io.SEEK_END))
        if stop <= span.start:
            return 0
        # A line begins after each line feed, and at the beginning of the file.
        num_lines = 1 if span.start == 0 else 0
        position = stream.seek(max(span.start - 1, 0))
        while position < stop - 1 and (chunk := stream.read(min(SAMPLE_BYTES, stop - 1 - position))):
            num_lines += chunk.count(b"\n")
            position += len(chunk)
    return num_lines


def _seek_line(stream: io.BufferedReader, start: int) -> int:
    """Seek the first line that begins at or after byte `start`. Return the position of its first byte."""
    if start == 0:
        return 0
    position = stream.seek(start - 1)
    while chunk := stream.readline(SAMPLE_BYTES):
        position += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return position


def _has_line_feed_byte(encoding: str) -> bool:
    """True if a line feed is one byte. False for UTF-16 and UTF-32."""
    try:
        return b"\n\n".decode(encoding) == "\n\n"
    except UnicodeError:
        return False


def _read_multibyte_lines(
    file: Path, origin: str, encoding: str, max_bytes: int
) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield lines of UTF-16 or UTF-32. They end up to 8 KB before the first character that cannot be decoded."""
    line_number = 0
    with open_decompressed(file, origin) as stream, io.TextIOWrapper(stream, encoding, newline="\n") as text:
        while True:
            line_number += 1
            try:
                line = text.readline(max_bytes + 1)
            except DECOMPRESSION_ERRORS as error:
                yield line_number, decompression_error(error)
                return
            except UnicodeError as error:
                yield line_number, BadRecord("unreadable", f"is not {encoding} from here on: {error}")
                return
            if not line:
                return
            if len(line) > max_bytes:
                raise _long_line_error(origin, line_number, max_bytes)
            yield line_number, normalize_line_ends(line.rstrip("\r\n"))


def _long_line_error(origin: str, line_number: int, max_bytes: int) -> InputError:
    what = f"the line is over {max_bytes:,} bytes (data.max_document)"
    return InputError.at(f"{origin}:{line_number}", what, "write a larger data.max_document")


def read_full(file: Path, origin: str, max_bytes: int) -> bytes:
    """Return the decompressed content of a file that is one document.

    Raise BadRecord if it is damaged, InputError if it has more than `max_bytes` bytes, whatever size the file system
    reports.
    """
    is_compressed = file_name(origin).endswith(COMPRESSED_SUFFIXES)
    with open_decompressed(file, origin) if is_compressed else file.open("rb", buffering=0) as stream:
        file_bytes = -1 if is_compressed else os.fstat(stream.fileno()).st_size
        if file_bytes > max_bytes:
            raise _large_file_error(origin, f"{file_bytes:,} bytes are", max_bytes)
        chunks: list[bytes] = []
        bytes_read = 0
        try:
            while chunk := stream.read(max(file_bytes + 1 - bytes_read, 0) or SAMPLE_BYTES):
                chunks.append(chunk)
                bytes_read += len(chunk)
                if bytes_read > max_bytes:
                    what = "its unpacked bytes are" if is_compressed else "its bytes are"
                    raise _large_file_error(origin, what, max_bytes)
        except DECOMPRESSION_ERRORS as error:
            if not is_compressed:
                raise
            raise decompression_error(error) from None
    return b"".join(chunks)


def _large_file_error(origin: str, subject: str, max_bytes: int) -> InputError:
    fix = "write a larger data.max_document, or cut it up (document: line or paragraph)"
    return InputError.at(origin, f"{subject} more than data.max_document ({max_bytes:,}) allows in one document", fix)
