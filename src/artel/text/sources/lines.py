"""Lines of a file of any size, one at a time: plain, .gz, .zst, .xz or .bz2, in any encoding."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import zstandard

from artel.errors import InputError, Problem
from artel.text.encodings import SAMPLE, NotText, decode, detect_encoding
from artel.text.sources.names import PACKED, file_name

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no text, and why."""

    reason: str
    detail: str


_PIECE = 1 << 14  # compressed bytes undone at once; what comes out may be thousands of times larger
DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""What reading a compressed file raises where it is cut off or no such file."""


def damaged(error: Exception) -> BadLine:
    return BadLine("truncated", f"the compressed file is damaged here: {error}; fetch or pack it anew")


def read_lines(file: Path, origin: str, encoding: str, largest: int) -> Iterator[tuple[int, str | BadLine]]:
    """(line number from 1, the line without its end, or what is wrong with it).

    The encoding is judged by the first megabyte. Raises NotText for binary data, InputError for a line over `largest`
    bytes; a compressed file that ends too early gives a last bad line.
    """
    with unpacked(file, origin) as stream:
        try:
            head = stream.peek(SAMPLE)[:SAMPLE]
        except DAMAGED as error:
            yield 1, damaged(error)
            return
        # A compressed stream may show less than its whole: the sample always counts as cut.
        name = detect_encoding(head, cut=True) if encoding == "auto" else encoding
        if name.startswith(("utf-16", "utf-32")):  # their line feeds are not bytes of their own
            yield from enumerate(decode(stream.read(), name).split("\n"), 1)
            return
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(largest + 1)
            except DAMAGED as error:
                yield number, damaged(error)
                return
            if not line:
                return
            if len(line) > largest:
                fix = "write a larger data.max_document"
                what = f"the line is over {largest:,} bytes (data.max_document)"
                raise InputError([Problem(f"{origin}:{number}", what, fix)])
            try:
                yield number, decode(line.rstrip(b"\r\n"), name)
            except NotText as error:
                yield number, BadLine(error.reason, error.detail)


def read_whole(file: Path, origin: str, largest: int) -> bytes:
    """The content of a file that is one document, unpacked.

    Raises NotText where it is damaged, InputError when it is over `largest` bytes.
    """
    if not file_name(origin).endswith(PACKED):
        size = file.stat().st_size
        if size > largest:
            raise too_large(origin, f"{size:,} bytes are", largest)
        return file.read_bytes()
    with unpacked(file, origin) as stream:
        content = bytearray()
        try:
            while piece := stream.read(SAMPLE):
                content += piece
                if len(content) > largest:
                    raise too_large(origin, "the bytes it unpacks to are", largest)
        except DAMAGED as error:
            bad = damaged(error)
            raise NotText(bad.reason, bad.detail) from None
    return bytes(content)


def too_large(origin: str, size: str, largest: int) -> InputError:
    fix = "write a larger data.max_document, or cut it up (document: line or paragraph)"
    what = f"{size} more than data.max_document ({largest:,}) allows in one document"
    return InputError([Problem(origin, what, fix)])


def unpacked(file: Path, origin: str) -> io.BufferedReader:
    """The content of a file, by the suffix of its origin; reading it may raise one of DAMAGED."""
    name = file_name(origin)
    if name.endswith(".gz"):
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file, "rb")), SAMPLE)
    new_frame = next((new for suffix, new in _FRAMES.items() if name.endswith(suffix)), None)
    raw = _Frames(file, new_frame) if new_frame else file.open("rb", buffering=0)
    return io.BufferedReader(raw, SAMPLE)


class _Frame(Protocol):
    """What undoes one frame of a compressed file: `eof` after its end, with what stands behind it in `unused_data`."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_FRAMES: dict[str, Callable[[], _Frame]] = {
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

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._ready:
            piece = self._behind or self._file.read(_PIECE)
            self._behind = b""
            if not piece:
                if self._begun and not self._frame.eof:
                    raise EOFError("it is cut off")
                return 0
            if self._frame.eof:
                piece = piece.lstrip(b"\0")  # zeros between frames are padding; no frame begins with one
                if not piece:
                    continue
                self._frame = self._new_frame()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(piece))
            self._behind = self._frame.unused_data
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
