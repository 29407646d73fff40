"""Errors that nobody expected: told as words where the machine is to blame, else written down with their traceback.

CACHE/faults/TIME-process-ID.txt     what was done, by which versions, and the traceback; secrets are hidden
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import artel
from artel.errors import ArtelError, WorkError
from artel.secrets import hide_secrets
from artel.storage.locations import DISK_ERRORS, cache_folder, disk_error

FAULT = 70
"""EX_SOFTWARE of sysexits.h; only between a process of a run and its launcher, which ends with 1."""

_NO_MEMORY = ("allocate memory", "can't start new thread", "out of memory",
              "failed to map segment")  # fmt: skip


def machine_error(error: BaseException) -> ArtelError | None:
    """What the machine refused (memory, a disk), as words; None where the error is a fault of artel."""
    if isinstance(error, ArtelError):
        return error
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in _NO_MEMORY))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    ):
        first = " ".join(str(error).split())[:200]
        what = "the system gives no more" + (f": {first}" if first else "")
        fix = "lift the limit on this process (ulimit -v, the container's or the job's), or take less: a smaller " \
              "model, data.block or train.micro_batch, fewer prepare.workers"  # fmt: skip
        return WorkError.at("memory", what, fix)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS - {errno.ENOENT}:
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
        return disk_error(error, place, "cannot be read or written")
    return None


def write_fault(error: BaseException, doing: str) -> str:
    """Write an unexpected error down; the file, or where the error arose when no file can be written."""
    text = "".join(traceback.format_exception(error))
    about = f"artel {artel.__version__}, Python {platform.python_version()}, {platform.platform()}"
    command = " ".join(["artel", *sys.argv[1:]])
    content = hide_secrets(f"{command}\n{about}\nwhile it did: {doing}\n\n{text}")
    name = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-process-{os.getpid()}.txt"
    for folder in (_faults, lambda: Path(tempfile.gettempdir())):
        try:
            file = folder() / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8", errors="backslashreplace") as stream:  # no link of another's
                stream.write(content)
        except (OSError, ArtelError):  # no home, a full disk, no folder for what is temporary
            continue
        return str(file)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return " ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in last) or "nowhere"


def fault_lines(error: BaseException, doing: str) -> list[str]:
    """Three lines for people: what artel was doing, that this is its own fault, where the traceback is."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return [
        f"{doing}: failed with {said}",
        "this is a fault of artel, not of what you gave it; please report it with its traceback",
        f"the traceback: {write_fault(error, doing)}",
    ]


def told_of_worker(error: BaseException, doing: str) -> ArtelError:
    """An error of a process that another waits for, as that one tells it."""
    if (known := machine_error(error)) is not None:
        return known
    first, fault, file = fault_lines(error, doing)
    return WorkError.at("", f"{first} ({fault})", file)


def fault_of_process(number: int) -> str | None:
    """The newest file that a process of this machine wrote its error into."""
    for folder in (_faults, lambda: Path(tempfile.gettempdir())):
        with suppress(OSError, ArtelError):  # as in `write_fault`
            if found := sorted(folder().glob(f"*-process-{number}.txt")):
                return str(found[-1])
    return None


def _faults() -> Path:
    return cache_folder() / "faults"
