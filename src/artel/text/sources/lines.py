"""Lines of a file of any size, one at a time: plain, .gz or .zst, in any encoding."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zstandard

from artel.errors import InputError, Problem
from artel.text.encodings import SAMPLE, NotText, decode, detect_encoding


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no text, and why."""

    reason: str
    detail: str


_DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError)


def _damaged(error: Exception) -> BadLine:
    return BadLine("truncated", f"the compressed file is damaged here: {error}")


def read_lines(file: Path, origin: str, encoding: str, largest: int) -> Iterator[tuple[int, str | BadLine]]:
    """(line number from 1, the line without its end, or what is wrong with it).

    The encoding is judged by the first megabyte. Raises NotText for binary data, InputError for a line over `largest`
    bytes; a compressed file that ends too early gives a last bad line.
    """
    with _open(file) as stream:
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


def _open(file: Path) -> io.BufferedReader:
    name = file.name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file, "rb")), SAMPLE)
    if name.endswith(".zst"):
        reader = zstandard.ZstdDecompressor().stream_reader(file.open("rb"), closefd=True, read_across_frames=True)
        return io.BufferedReader(cast(io.RawIOBase, reader), SAMPLE)
    return io.BufferedReader(file.open("rb", buffering=0), SAMPLE)
