"""Lines of a file of any size, one at a time: plain, .gz, .zst, .xz or .bz2, in any encoding."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import zstandard

from artel.errors import InputError
from artel.text.reading.encodings import (
    BLOCK,
    SAMPLE,
    NotText,
    decode,
    detect_encoding,
    foreign_lines,
    is_table,
    not_of,
    one_line_end,
)
from artel.text.reading.file_names import PACKED, file_name

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no text, and why."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of a plain file that begin at one of the bytes from `start` up to, not including, `stop`."""

    start: int
    stop: int


Note = Callable[[str, str], object]
"""Called with a source's name and the encoding that is guessed of one of its files."""


# Compressed bytes undone at once: zstd may make 128 MB of them, where 64 KB would be 2 GB and no faster by a tenth.
_PIECE = 1 << 12
# Unpacked bytes read ahead of lines: a megabyte would not stay in a core's cache until it is read.
_AHEAD = 1 << 17
DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""What reading a compressed file raises where it is cut off or no such file."""


def damaged(error: Exception) -> BadLine:
    if "too much memory" in str(error):  # zstd's words
        return BadLine("window", "is packed with a window of over 128 MB; pack it anew with zstd --long=27 or without")
    return BadLine("truncated", f"the compressed file is damaged here: {error}; fetch or pack it anew")


def read_lines(
    file: Path, origin: str, encoding: str, largest: int, span: Span | None = None
) -> Iterator[tuple[int, str | BadLine]]:
    """(line number from 1, the line without its end, or what is wrong with it); of a span, counted in it.

    The encoding is judged by the first megabyte of the file. Raises NotText for binary data, InputError for a line over
    `largest` bytes; a compressed file that ends too early gives a last bad line. Only a file that `can_be_divided` has
    spans.
    """
    name = line_encoding(file, origin, encoding)
    if not _ends_lines_in_bytes(name):
        if span is not None:
            raise ValueError(f"{origin} in {name} cannot be divided")
        yield from _wide_lines(file, origin, name, largest)
        return
    lines = read_byte_lines(file, origin, largest, span)
    if is_table(name):
        yield from _lines_of_table(lines, name)
    else:
        for number, line in lines:
            yield number, line if isinstance(line, BadLine) else _decoded(line, name)


def _decoded(line: bytes, name: str) -> str | BadLine:
    try:
        return decode(line.rstrip(b"\r\n"), name)
    except NotText as error:
        return BadLine(error.reason, error.detail)


def _lines_of_table(lines: Iterator[tuple[int, bytes | BadLine]], name: str) -> Iterator[tuple[int, str | BadLine]]:
    """The lines in an encoding of one byte, decoded a block at a time; those in another encoding are bad."""
    for block in _blocks(lines):
        content = b"".join(line for _, line in block if isinstance(line, bytes))
        foreign = foreign_lines(content, name)
        texts: list[str] = []
        if not foreign and b"\r" not in content and not isinstance(block[-1][1], BadLine):
            with suppress(UnicodeDecodeError):  # told of its line below
                texts = content.decode(name).split("\n")
        if texts:
            yield from zip((number for number, _ in block), texts, strict=False)
            continue
        for at, (number, line) in enumerate(block):
            if at in foreign:
                yield number, BadLine("other_encoding", not_of(name, foreign[at]))
            else:
                yield number, line if isinstance(line, BadLine) else _decoded(line, name)


def _blocks(lines: Iterator[tuple[int, bytes | BadLine]]) -> Iterator[list[tuple[int, bytes | BadLine]]]:
    """The lines in blocks of some size; what reading raises comes after the lines before it."""
    block: list[tuple[int, bytes | BadLine]] = []
    size = 0
    try:
        for each in lines:
            block.append(each)
            size += len(each[1]) if isinstance(each[1], bytes) else 0
            if size >= BLOCK:
                yield block
                block, size = [], 0
    except InputError:
        if block:
            yield block
        raise
    if block:
        yield block


def read_byte_lines(
    file: Path, origin: str, largest: int, span: Span | None = None
) -> Iterator[tuple[int, bytes | BadLine]]:
    """The same with line ends and not decoded, for those who do so faster; the file is in an encoding like ASCII."""
    with unpacked(file, origin, _AHEAD) as stream:
        at = _first_line(stream, span.start) if span else 0
        stop = span.stop if span else sys.maxsize
        number = 0
        while at < stop:
            number += 1
            try:
                line = stream.readline(largest + 1)
            except DAMAGED as error:
                yield number, damaged(error)
                return
            if not line:
                return
            if len(line) > largest:
                before = count_lines(file, Span(0, span.start)) if span else 0
                raise _too_long(origin, before + number, largest)
            at += len(line)
            yield number, line


def line_encoding(file: Path, origin: str, encoding: str) -> str:
    """The encoding that is given, or when it is auto the one found by the first megabyte. Raises NotText for binary
    data."""
    if encoding != "auto":
        return encoding
    with unpacked(file, origin) as stream:
        try:
            # What is shown may end anywhere: the sample always counts as cut.
            return detect_encoding(stream.peek(SAMPLE)[:SAMPLE], cut=True)
        except DAMAGED:
            return "utf-8"  # nothing can be read of it, as those who read it will be told


def can_be_divided(file: Path, origin: str, encoding: str) -> bool:
    """Whether a file has lines that can be found from its middle: it is not packed, binary, in UTF-16 or -32, and no
    JSON array."""
    if file_name(origin).endswith(PACKED):
        return False
    try:
        name = line_encoding(file, origin, encoding)
    except NotText:
        return False
    if not _ends_lines_in_bytes(name):
        return False
    if not file_name(origin).endswith(".json"):
        return True
    with file.open("rb") as stream:
        while line := stream.readline(SAMPLE):
            begin = one_line_end(line.decode(name, "replace")).strip()  # as those judge who read the file as a whole
            if begin:
                return not begin.startswith("[")
    return False


def count_lines(file: Path, span: Span) -> int:
    """How many lines of a plain file begin in the span."""
    with file.open("rb", buffering=0) as stream:
        stop = min(span.stop, stream.seek(0, io.SEEK_END))
        if stop <= span.start:
            return 0
        # A line begins behind each line feed, and at the beginning of the file.
        count = 1 if span.start == 0 else 0
        at = stream.seek(max(span.start - 1, 0))
        while at < stop - 1 and (piece := stream.read(min(SAMPLE, stop - 1 - at))):
            count += piece.count(b"\n")
            at += len(piece)
    return count


def _first_line(stream: io.BufferedReader, start: int) -> int:
    """Go to the first line that begins at `start` or behind it; returns the byte at which it does."""
    if start == 0:
        return 0
    at = stream.seek(start - 1)
    while piece := stream.readline(SAMPLE):
        at += len(piece)
        if piece.endswith(b"\n"):
            break
    return at


def _ends_lines_in_bytes(name: str) -> bool:
    """Whether a line feed is a byte of its own; in UTF-16 and UTF-32 it is not."""
    try:
        return b"\n\n".decode(name) == "\n\n"
    except UnicodeError:
        return False


def _wide_lines(file: Path, origin: str, name: str, largest: int) -> Iterator[tuple[int, str | BadLine]]:
    """Lines of an encoding in which characters are several bytes. They end at what cannot be read: it stands for
    the 8 KB that were decoded with it."""
    number = 0
    with unpacked(file, origin) as stream, io.TextIOWrapper(stream, name, newline="\n") as text:
        while True:
            number += 1
            try:
                line = text.readline(largest + 1)
            except DAMAGED as error:
                yield number, damaged(error)
                return
            except UnicodeError as error:
                yield number, BadLine("unreadable", f"is not {name} from here on: {error}")
                return
            if not line:
                return
            if len(line) > largest:
                raise _too_long(origin, number, largest)
            yield number, one_line_end(line.rstrip("\r\n"))


def _too_long(origin: str, number: int, largest: int) -> InputError:
    what = f"the line is over {largest:,} bytes (data.max_document)"
    return InputError.at(f"{origin}:{number}", what, "write a larger data.max_document")


def read_whole(file: Path, origin: str, largest: int) -> bytes:
    """The content of a file that is one document, unpacked.

    Raises NotText where it is damaged, InputError when it is over `largest` bytes: those that are read, which may be
    more than the file says it has.
    """
    packed = file_name(origin).endswith(PACKED)
    with unpacked(file, origin) if packed else file.open("rb", buffering=0) as stream:
        size = -1 if packed else os.fstat(stream.fileno()).st_size
        if size > largest:
            raise too_large(origin, f"{size:,} bytes are", largest)
        pieces: list[bytes] = []
        read = 0
        try:
            while piece := stream.read(max(size + 1 - read, 0) or SAMPLE):
                pieces.append(piece)
                read += len(piece)
                if read > largest:
                    raise too_large(origin, "the bytes it unpacks to are" if packed else "its bytes are", largest)
        except DAMAGED as error:
            if not packed:
                raise
            bad = damaged(error)
            raise NotText(bad.reason, bad.detail) from None
    return b"".join(pieces)


def too_large(origin: str, size: str, largest: int) -> InputError:
    fix = "write a larger data.max_document, or cut it up (document: line or paragraph)"
    what = f"{size} more than data.max_document ({largest:,}) allows in one document"
    return InputError.at(origin, what, fix)


def unpacked(file: Path, origin: str, ahead: int = SAMPLE) -> io.BufferedReader:
    """The content of a file, by the suffix of its origin, `ahead` bytes at a time; reading may raise one of DAMAGED."""
    name = file_name(origin)
    new_frame = next((new for suffix, new in _FRAMES.items() if name.endswith(suffix)), None)
    raw = _Frames(file, new_frame) if new_frame else file.open("rb", buffering=0)
    return io.BufferedReader(raw, ahead)


class _Frame(Protocol):
    """What undoes one frame of a compressed file: `eof` after its end, with what stands behind it in `unused_data`."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_FRAMES: dict[str, Callable[[], _Frame]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}


class _Frames(io.RawIOBase):
    """The content of a file of frames, one after another.

    The libraries' own readers take a .zst file that was cut off for one that ends there, and whatever stands behind
    the first frame of an .xz or .bz2 file, a damaged second one too, for nothing.
    """

    def __init__(self, file: Path, new_frame: Callable[[], _Frame]) -> None:
        self._file = file.open("rb", buffering=0)
        self._new_frame = new_frame
        self._frame = new_frame()
        self._ready = memoryview(b"")
        self._behind = b""
        self._begun = False
        self._damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer, so that whoever peeks sees much of it; damage is told when what stands before it is read."""
        if self._damage is not None:
            raise self._damage
        target = memoryview(buffer).cast("B")
        filled = 0
        try:
            while filled < len(target) and self._undo():
                count = min(len(target) - filled, len(self._ready))
                target[filled : filled + count] = self._ready[:count]
                self._ready = self._ready[count:]
                filled += count
        except DAMAGED as error:
            if filled == 0:
                raise
            self._damage = error
        return filled

    def _undo(self) -> bool:
        """Have bytes ready; False at the end of the file."""
        while not self._ready:
            piece = self._behind or self._file.read(_PIECE)
            self._behind = b""
            if not piece:
                if self._begun and not self._frame.eof:
                    raise EOFError("it is cut off")
                return False
            if self._frame.eof:
                piece = piece.lstrip(b"\0")  # zeros between frames are padding; no frame begins with one
                if not piece:
                    continue
                self._frame = self._new_frame()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(piece))
            self._behind = self._frame.unused_data
        return True

    def close(self) -> None:
        self._file.close()
        super().close()
