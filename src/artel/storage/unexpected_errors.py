"""Unexpected errors: a message if the machine is the cause, else a file with the traceback.

CACHE/faults/TIME-process-ID.txt     the command, the versions and the traceback; secrets are hidden
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
from artel.plugins import describe_exception, exception_message, user_code_error
from artel.secrets import hide_secrets
from artel.storage.locations import DISK_ERRORS, cache_folder, disk_error

FAULT_EXIT_STATUS = 70
"""Exit status of a process of a run (EX_SOFTWARE of sysexits.h). Its launcher exits with 1."""

_MEMORY_MESSAGES = ("allocate memory", "can't start new thread", "out of memory", "failed to map segment")


def machine_error(error: BaseException) -> ArtelError | None:
    """Convert an error of the machine (memory, a disk) or of a user's code; return None for a bug in artel."""
    if isinstance(error, ArtelError):
        return error
    text = exception_message(error)
    if isinstance(error, RuntimeError) and "CUDA" in text and "out of memory" in text:
        what = f"the GPU has no more: {' '.join(text.split())[:200]}"
        fix = "end other programs there, or use less memory: a smaller model, data.block, train.micro_batch, --requests"
        return WorkError.at("memory", what, fix)
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError | ImportError) and any(words in text for words in _MEMORY_MESSAGES))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    ):
        detail = " ".join(text.split())[:200]
        what = "the system has no more" + (f": {detail}" if detail else "")
        savings = "a smaller model, data.block or train.micro_batch, fewer prepare.workers"
        fix = f"lift the limit on this process (ulimit -v, the container's or the job's), or use less memory: {savings}"
        return WorkError.at("memory", what, fix)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS - {errno.ENOENT}:
        path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
        return disk_error(error, path, "cannot be read or written")
    return user_code_error(error)


def write_fault(error: BaseException, activity: str) -> str:
    """Write an unexpected error to a file; return the file, or the location of the error if no file can be written."""
    text = "".join(traceback.format_exception(error))
    versions = f"artel {artel.__version__}, Python {platform.python_version()}, {platform.platform()}"
    command = " ".join(["artel", *sys.argv[1:]])
    content = hide_secrets(f"{command}\n{versions}\nwhile it did: {activity}\n\n{text}")
    name = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-process-{os.getpid()}.txt"
    for folder in (_faults_folder, lambda: Path(tempfile.gettempdir())):
        try:
            file = folder() / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8", errors="backslashreplace") as stream:  # "x": follows no link
                stream.write(content)
        except (OSError, ArtelError):  # no home folder, a full disk, no temporary folder
            continue
        return str(file)
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return " ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames) or "nowhere"


def fault_lines(error: BaseException, activity: str) -> list[str]:
    """Return three lines for the user: what artel was doing, that it is a bug in artel, and the traceback's file."""
    message = " ".join(describe_exception(error).split())[:300]
    return [
        f"{activity}: failed with {message}",
        "this is a fault of artel, not of what you gave it; please report it with its traceback",
        f"the traceback: {write_fault(error, activity)}",
    ]


def worker_error(error: BaseException, activity: str) -> ArtelError:
    """Convert an error of a worker process to an error that the waiting process reports."""
    if (cause := machine_error(error)) is not None:
        return cause
    first, fault, file = fault_lines(error, activity)
    return WorkError.at("", f"{first} ({fault})", file)


def find_fault_file(process_id: int) -> str | None:
    """Return the newest file about an unexpected error that a process of this machine wrote, if any."""
    for folder in (_faults_folder, lambda: Path(tempfile.gettempdir())):
        with suppress(OSError, ArtelError):  # as in `write_fault`
            if files := sorted(folder().glob(f"*-process-{process_id}.txt")):
                return str(files[-1])
    return None


def _faults_folder() -> Path:
    return cache_folder() / "faults"
