"""Lines of a file of any size, one at a time: plain, .gz or .zst, in any encoding."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import zstandard

from artel.errors import InputError, Problem
from artel.text.encodings import SAMPLE, NotText, decode, detect_encoding
from artel.text.sources.find import file_name

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no text, and why."""

    reason: str
    detail: str


_PIECE = 1 << 14  # compressed bytes undone at once; what comes out may be thousands of times larger
_DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError)


def _damaged(error: Exception) -> BadLine:
    return BadLine("truncated", f"the compressed file is damaged here: {error}")


def read_lines(file: Path, origin: str, encoding: str, largest: int) -> Iterator[tuple[int, str | BadLine]]:
    """(line number from 1, the line without its end, or what is wrong with it).

    The encoding is judged by the first megabyte. Raises NotText for binary data, InputError for a line over `largest`
    bytes; a compressed file that ends too early gives a last bad line.
    """
    with _open(file, origin) as stream:
        try:
            head = stream.peek(SAMPLE)[:SAMPLE]
        except _DAMAGED as error:
            yield 1, _damaged(error)
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
            except _DAMAGED as error:
                yield number, _damaged(error)
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


def _open(file: Path, origin: str) -> io.BufferedReader:
    name = file_name(origin)
    if name.endswith(".gz"):
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file, "rb")), SAMPLE)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstandard(file), SAMPLE)
    return io.BufferedReader(file.open("rb", buffering=0), SAMPLE)


class _Zstandard(io.RawIOBase):
    """The content of a .zst file. The library's own reader takes a file that was cut off for one that ends there."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("rb", buffering=0)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._ready:
            piece = self._frame.unused_data or self._file.read(_PIECE)
            if not piece:
                if self._begun and not self._frame.eof:
                    raise EOFError("it is cut off")
                return 0
            if self._frame.eof:  # a file may hold several frames, one after another
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(piece))
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
