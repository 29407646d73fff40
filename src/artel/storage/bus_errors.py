"""SIGBUS: the signal that ends a process if a memory-mapped file becomes shorter, or its disk fails."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from artel.storage.panics import stderr_descriptor

_FIX = "put the file back as it was, and give the command again; training resumes from the last checkpoint"


def _handle(number: int) -> None:
    """Runs in the thread that was reading, which holds Python's global lock or no lock at all."""
    what = "a file that was being read (a token store, a model's weights)"
    with suppress(Exception):
        what = ", ".join(shortened_files()) or what
    os.write(
        stderr_descriptor(),
        f"artel: {what} became shorter, or its disk failed\n    {_FIX}\n".encode(errors="surrogateescape"),
    )
    os._exit(1)


def shortened_files() -> list[str]:
    """Return the memory-mapped files of this process that have become shorter than their mapping (Linux)."""
    names: dict[str, None] = {}
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            # A library's last mapping may be longer than its file by design.
            if name and name[0].startswith("/") and ".so" not in Path(name[0]).suffixes and Path(name[0]).is_file():
                first, end = (int(address, 16) for address in addresses.split("-"))
                if Path(name[0]).stat().st_size + mmap.PAGESIZE <= int(offset, 16) + end - first:
                    names[name[0]] = None
    return [*names]


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_handle)  # a global: C calls it


def report_bus_errors() -> None:
    """Install a handler: on SIGBUS the process prints a message and exits with status 1."""
    ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)  # a Python handler would run after the read, which never ends


@contextmanager
def kept_bus_error_handler() -> Iterator[None]:
    """Within the block SIGBUS is reported; afterwards it is handled as before."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = set_handler(signal.SIGBUS, ctypes.cast(_HANDLER, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, before)
