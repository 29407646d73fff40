"""RUN/ranks: a status file for each process. `artel report` and `artel watch` read it, also on another host.

    ranks/rank-00000.json    rank, host, pid, device, step, memory_gib, doing, state, message, time, every

Each training process writes its file every few seconds (`faults/rank_status.py`). Before that, the process that starts
the run writes the first rank's file once: that process lives until the run ends, and an earlier start may have left a
file with state died or failed. Only the host of that process can see that it was killed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from artel.errors import ArtelError, InputError, Interrupted
from artel.host import process_memory
from artel.plugins import describe_exception
from artel.training.run_folder import RunFolder

_A_DAY = 86_400.0
"""Seconds until the next write of a process that starts a run: preparing text or waiting for hosts may take hours."""
_MAX_MESSAGE_CHARACTERS = 500


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def write_rank(
    folder: RunFolder,
    rank: int,
    measurements: dict[str, Any],
    state: str,
    message: str = "",
    *,
    every: float,
    identity: str,
) -> None:
    """Replace a process's file. `measurements`: its device, step, memory_gib and work (doing).

    `every`: seconds between writes.
    Does nothing if the disk refuses, or if the folder no longer has this `identity`.
    """
    status = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **measurements,
        "state": state,
        "message": message[:_MAX_MESSAGE_CHARACTERS],
        "time": time.time(),
        "every": every,
    }
    file = rank_file(folder.ranks, rank)
    with suppress(OSError, ArtelError):
        if identity:
            folder.check_not_moved(identity)
        # Replace the file as a whole, but without fsync, since training would wait for it.
        partial = file.with_name(f".{file.name}.partial")
        partial.write_bytes(orjson.dumps(status))
        partial.replace(file)


def final_state(error: BaseException) -> tuple[str, str]:
    """Return (state, message) of a process that ends with an error: stopped or failed."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "stopped", ""
    return "failed", error.one_line if isinstance(error, ArtelError) else describe_exception(error)


def mark_start(folder: RunFolder, state: str = "running", message: str = "") -> None:
    """Write that this process is starting the run, or the final state of the start. Remove files of other ranks."""
    with suppress(OSError):
        folder.ranks.mkdir(exist_ok=True)
        for file in folder.ranks.glob("rank-*.json"):
            if file != rank_file(folder.ranks, 0):
                file.unlink(missing_ok=True)
    measurements = {"device": "cpu", "step": 0, "memory_gib": round(process_memory("VmRSS") / 2**30, 4), "doing": ""}
    write_rank(folder, 0, measurements, state, message, every=_A_DAY, identity="")


@contextmanager
def start_status(folder: RunFolder) -> Iterator[None]:
    """Mark a run as running while it is checked, prepared and launched, in its first rank's file.

    Training processes overwrite the file. The file of a complete run stays until `mark_start` says that the run
    continues. An error is written if no process has taken over. If the run is refused, the old file is restored.
    """
    file = rank_file(folder.ranks, 0)
    old_content = file.read_bytes() if file.is_file() else None
    if not folder.is_complete:
        mark_start(folder)
    try:
        yield
    except InputError:
        if _is_from_this_process(folder):
            _restore(file, old_content)
        raise
    except BaseException as error:
        if _is_from_this_process(folder):
            mark_start(folder, *final_state(error))
        raise


def _restore(file: Path, content: bytes | None) -> None:
    with suppress(OSError):
        if content is not None:
            file.write_bytes(content)
            return
        file.unlink()
        file.parent.rmdir()  # if it is empty


def _is_from_this_process(folder: RunFolder) -> bool:
    try:
        status = orjson.loads(rank_file(folder.ranks, 0).read_bytes())
        return bool(status["pid"] == os.getpid() and status["every"] == _A_DAY)
    except (OSError, ValueError, KeyError, TypeError):
        return False
