"""Handle SIGBUS, the signal that ends a process if a memory-mapped file becomes shorter or its disk fails."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from artel.storage.panics import stderr_descriptor

_FIX = "restore the file and repeat the command; training resumes from the last checkpoint"


def _exit_on_bus_error(signum: int) -> None:
    """Print a message and exit. Runs in the thread that was reading, which may or may not hold the GIL."""
    what = "a file that was being read (a token store, a model's weights)"
    with suppress(Exception):
        what = ", ".join(shortened_files()) or what
    message = f"artel: {what} became shorter, or its disk failed\n    {_FIX}\n"
    os.write(stderr_descriptor(), message.encode(errors="surrogateescape"))
    os._exit(1)


def shortened_files() -> list[str]:
    """Return the memory-mapped files of this process that have become shorter than their mapping (Linux)."""
    return [name for name, end in _mapped_files().items() if Path(name).stat().st_size + mmap.PAGESIZE <= end]


def _mapped_files() -> dict[str, int]:
    """Return the memory-mapped files of this process, each with the file offset where its last mapping ends (Linux)."""
    ends: dict[str, int] = {}
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            # A library's last mapping may be longer than its file by design.
            if name and name[0].startswith("/") and ".so" not in Path(name[0]).suffixes and Path(name[0]).is_file():
                start, end = (int(address, 16) for address in addresses.split("-"))
                ends[name[0]] = max(ends.get(name[0], 0), int(offset, 16) + end - start)
    return ends


class MappedFiles:
    """The currently memory-mapped files (Linux), to detect later that one was overwritten: its pages change too."""

    def __init__(self) -> None:
        self._initial_stats: dict[str, os.stat_result] = {}
        with suppress(FileNotFoundError):  # another system
            self._initial_stats = {name: Path(name).stat() for name in _mapped_files()}

    def find_overwritten(self) -> list[str]:
        """Return the files whose content may have changed. A replaced file stays mapped as it was."""
        return [name for name, initial in self._initial_stats.items() if _is_overwritten(name, initial)]


def _is_overwritten(name: str, initial: os.stat_result) -> bool:
    try:
        current = Path(name).stat()
    except OSError:
        return False  # removed
    has_changed = current.st_size != initial.st_size or current.st_mtime_ns != initial.st_mtime_ns
    return os.path.samestat(current, initial) and current.st_size >= initial.st_size and has_changed


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_exit_on_bus_error)  # a global: C calls it


def report_bus_errors() -> None:
    """Install a handler: on SIGBUS the process prints a message and exits with status 1."""
    ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)  # a Python handler would run after the read, which never ends


@contextmanager
def bus_error_handler() -> Iterator[None]:
    """Report SIGBUS inside the block; restore the previous handler afterwards."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    initial = set_handler(signal.SIGBUS, ctypes.cast(_HANDLER, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, initial)
