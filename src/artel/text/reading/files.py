"""File names and suffixes, decompression, and detection of changes while a file is read."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import zstandard

from artel.errors import ArtelError, WorkError
from artel.text.reading.encodings import SAMPLE_BYTES
from artel.text.records import BadRecord

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
# Compressed bytes decompressed at once. zstd may turn them into 128 MB, and 64 KB into 2 GB, at most 10 % faster.
_COMPRESSED_BYTES = 1 << 12
DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""Raised by reading a compressed file that is truncated, damaged or in another format."""


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """Return the suffixes, alone and followed by each suffix of a compressed file."""
    return (*suffixes, *(suffix + compressed for suffix in suffixes for compressed in COMPRESSED_SUFFIXES))


def is_url(path: str) -> bool:
    """True for http:// and https:// addresses."""
    return path.lower().startswith(("http://", "https://"))


def file_name(origin: str) -> str:
    """Return the last part of a path or URL in lower case."""
    return (urlsplit(origin).path if is_url(origin) else origin).lower().rsplit("/", 1)[-1]


def uncompressed_name(origin: str) -> str:
    """Return `file_name` without the suffix of a compressed file: `a.csv` for `b/a.csv.gz`."""
    name = file_name(origin)
    return next((name.removesuffix(suffix) for suffix in COMPRESSED_SUFFIXES if name.endswith(suffix)), name)


def decompression_error(error: Exception) -> BadRecord:
    """Turn one of DECOMPRESSION_ERRORS into a BadRecord."""
    if "too much memory" in str(error):  # as zstd says
        detail = "is packed with a window of over 128 MB; pack it again with zstd --long=27 or without"
        return BadRecord("window", detail)
    return BadRecord("truncated", f"the compressed file is damaged here: {error}; download or pack it again")


def open_decompressed(file: Path, origin: str, buffer_bytes: int = SAMPLE_BYTES) -> io.BufferedReader:
    """Open a file, decompressed according to the suffix of `origin`. Reading may raise one of DECOMPRESSION_ERRORS."""
    name = file_name(origin)
    new_frame = next((new for suffix, new in _NEW_FRAME.items() if name.endswith(suffix)), None)
    raw = _DecompressedFile(file, new_frame) if new_frame else file.open("rb", buffering=0)
    return io.BufferedReader(raw, buffer_bytes)


class _Frame(Protocol):
    """A decompressor of one frame. At its end `eof` is true, and `unused_data` holds the bytes that follow."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_NEW_FRAME: dict[str, Callable[[], _Frame]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}


class _DecompressedFile(io.RawIOBase):
    """The content of a file of one or more compressed frames.

    The readers of the libraries report a truncated .zst file as complete, and ignore everything after the first frame
    of an .xz or .bz2 file, including a damaged second frame.
    """

    def __init__(self, file: Path, new_frame: Callable[[], _Frame]) -> None:
        self._file = file.open("rb", buffering=0)
        self._new_frame = new_frame
        self._frame = new_frame()
        self._output = memoryview(b"")
        self._input = b""
        self._has_started = False
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the whole buffer, for `peek`. Raise damage only after everything before it has been read."""
        if self._error is not None:
            raise self._error
        target = memoryview(buffer).cast("B")
        num_filled = 0
        try:
            while num_filled < len(target) and self._decompress():
                num_bytes = min(len(target) - num_filled, len(self._output))
                target[num_filled : num_filled + num_bytes] = self._output[:num_bytes]
                self._output = self._output[num_bytes:]
                num_filled += num_bytes
        except DECOMPRESSION_ERRORS as error:
            if num_filled == 0:
                raise
            self._error = error
        return num_filled

    def _decompress(self) -> bool:
        """Fill the output. False at the end of the file."""
        while not self._output:
            data = self._input or self._file.read(_COMPRESSED_BYTES)
            self._input = b""
            if not data:
                if self._has_started and not self._frame.eof:
                    raise EOFError("it is truncated")
                return False
            if self._frame.eof:
                data = data.lstrip(b"\0")  # zeros between frames are padding; no frame begins with one
                if not data:
                    continue
                self._frame = self._new_frame()
            self._has_started = True
            self._output = memoryview(self._frame.decompress(data))
            self._input = self._frame.unused_data
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class require_unchanged:
    """Context manager that raises WorkError if `file` changes inside the block, or changed since `version`.

    Compares size, inode, mtime and ctime in nanoseconds. (A program can reset mtime, but not ctime.) `version` is the
    mtime seen when the read was planned. An error that the change causes inside the block is reported as the change.
    """

    __slots__ = ("_file", "_initial_state", "_version")

    def __init__(self, file: Path, version: str = "") -> None:
        self._file, self._version = file, version

    def __enter__(self) -> None:
        self._initial_state = _file_state(self._file)
        if self._version and self._version != str(self._initial_state[1]):
            raise _change_error(self._file, self._initial_state[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, ArtelError | OSError):
            return
        state = _file_state(self._file)
        if state != self._initial_state or (isinstance(error, FileNotFoundError) and state[0] < 0):
            raise _change_error(self._file, self._initial_state[0]) from error


def _file_state(file: Path) -> tuple[int, int, int, int]:
    try:
        status = os.stat(file)  # noqa: PTH116 - called for every file, and Path.stat takes twice as long
    except OSError:
        return (-1, -1, -1, -1)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _change_error(file: Path, initial_bytes: int) -> WorkError:
    current_bytes = _file_state(file)[0]
    if current_bytes < 0:
        what = "was removed"
    elif current_bytes == initial_bytes:
        what = "changed (same size, but another modification time or another file)"
    else:
        what = f"changed from {initial_bytes:,} to {current_bytes:,} bytes"
    fix = "run again when no process writes to it, or use a copy"
    return WorkError.at(str(file), f"{what} while it was being read", fix)
