"""RUN/ranks: the processes of a run say that they live, and where they stand; `artel report` and `artel watch` read it,
also on another host that shares the disk.

    ranks/rank-00000.json    rank, host, pid, device, step, memory_gib, state, message, time, every

Each process that trains writes its file every few seconds (`faults/rank_status.py`). Before that the process that
starts the run writes the first one's once: it lives until the run ends, and another start of the same run may have left
a file that says that the run died or failed. That such a start was killed its own host alone can tell.
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
from artel.plugins import raised
from artel.training.run_folder import RunFolder

_A_DAY = 86_400.0
"""Seconds in which a start need not write again: text may be prepared for hours, and hosts waited for."""
_LONGEST = 500  # characters of a message


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def write_rank(
    folder: RunFolder, rank: int, facts: dict[str, Any], state: str, message: str = "", *, every: float, identity: str
) -> None:
    """Write a process's file anew. `facts` are its device, step and memory_gib; `every`, how often it writes.

    Nothing is written where the disk refuses, or the folder is another one by now than that of `identity`.
    """
    status = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **facts,
        "state": state,
        "message": message[:_LONGEST],
        "time": time.time(),
        "every": every,
    }
    file = rank_file(folder.ranks, rank)
    with suppress(OSError, ArtelError):
        if identity:
            folder.check_there(identity)
        # Whole or absent; but not flushed to the disk, for which a training would have to wait.
        partial = file.with_name(f".{file.name}.partial")
        partial.write_bytes(orjson.dumps(status))
        partial.replace(file)


def how_it_ended(error: BaseException) -> tuple[str, str]:
    """(stopped or failed, the reason in a line), of a process that ends with an error."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "stopped", ""
    return "failed", error.in_a_line if isinstance(error, ArtelError) else raised(error)


def mark_start(folder: RunFolder, state: str = "running", message: str = "") -> None:
    """Say that the run is being started by this process, or how that ended; files of earlier ranks are removed."""
    with suppress(OSError):
        folder.ranks.mkdir(exist_ok=True)
        for file in folder.ranks.glob("rank-*.json"):
            if file != rank_file(folder.ranks, 0):
                file.unlink(missing_ok=True)
    facts = {"device": "cpu", "step": 0, "memory_gib": round(process_memory("VmRSS") / 2**30, 4)}
    write_rank(folder, 0, facts, state, message, every=_A_DAY, identity="")


@contextmanager
def start_status(folder: RunFolder) -> Iterator[None]:
    """While a run is checked, prepared and launched, its first rank's file says that it is at work.

    The processes that train write over it. A run that is complete is left as it is until it is known that it goes on,
    which `mark_start` then says. An error is written where no process has taken over; a run that is refused is left as
    it was.
    """
    file = rank_file(folder.ranks, 0)
    before = file.read_bytes() if file.is_file() else None
    if not folder.is_complete:
        mark_start(folder)
    try:
        yield
    except InputError:
        if _is_of_this_start(folder):
            _put_back(file, before)
        raise
    except BaseException as error:
        if _is_of_this_start(folder):
            mark_start(folder, *how_it_ended(error))
        raise


def _put_back(file: Path, content: bytes | None) -> None:
    with suppress(OSError):
        if content is not None:
            file.write_bytes(content)
            return
        file.unlink()
        file.parent.rmdir()  # unless there is more in it


def _is_of_this_start(folder: RunFolder) -> bool:
    try:
        status = orjson.loads(rank_file(folder.ranks, 0).read_bytes())
        return bool(status["pid"] == os.getpid() and status["every"] == _A_DAY)
    except (OSError, ValueError, KeyError, TypeError):
        return False
