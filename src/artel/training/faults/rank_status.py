"""RUN/ranks: each process of a run says every few seconds that it lives, and where it stands; `artel report` and
`artel watch` read it, also on another host that shares the disk.

    ranks/rank-00000.json    rank, host, pid, device, step, memory_gib, state, message, time, every

A thread writes it, so that a long validation passes for no death. A process that is killed leaves a file that says
`running` and grows old.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from artel.errors import ArtelError, Interrupted
from artel.storage import disk_errors
from artel.training.memory.in_use import memory_in_use
from artel.training.run import Run

_SECONDS = 5.0
_RANKS = 64  # so many write as often; more of them write less often, or a shared disk has much to do
_LONGEST = 500  # characters of a message


@contextmanager
def rank_status(run: Run) -> Iterator[None]:
    """Within the block this process shows that it lives; at its end how it ended.

    Raises InputError where the disk refuses the folder. A file that cannot be written later is left as it is.
    """
    if run.world.first:
        with disk_errors(run.folder.path):
            run.folder.ranks.mkdir(exist_ok=True)
        _remove_others(run)
    run.world.barrier()
    status = _RankStatus(run)
    status.write("running")
    status.start()
    ended, message = "complete", ""
    try:
        yield
    except Interrupted:
        ended = "stopped"
        raise
    except BaseException as error:
        ended = "failed"
        message = error.in_a_line if isinstance(error, ArtelError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        status.stop()
        status.write(ended, message)


def _remove_others(run: Run) -> None:
    """Files of ranks that an earlier start had, and this one has not."""
    own = {_file(run.folder.ranks, rank) for rank in range(run.world.size)}
    for file in run.folder.ranks.glob("rank-*.json"):
        if file not in own:
            file.unlink(missing_ok=True)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


class _RankStatus(threading.Thread):
    """Writes the file of this process, again and again."""

    def __init__(self, run: Run) -> None:
        super().__init__(name="rank status", daemon=True)
        self._run, self._over = run, threading.Event()
        self._every = _SECONDS * max(1.0, run.world.size / _RANKS)

    def run(self) -> None:
        while not self._over.wait(self._every):
            self.write("running")

    def stop(self) -> None:
        self._over.set()
        self.join(_SECONDS)  # no longer: the disk may hang

    def write(self, state: str, message: str = "") -> None:
        """Write the file anew; nothing where the disk refuses, or the folder is another one by now."""
        run, world = self._run, self._run.world
        status = {
            "rank": world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(world.device),
            "step": run.step,
            "memory_gib": round(memory_in_use(world.device) / 2**30, 4),
            "state": state,
            "message": message[:_LONGEST],
            "time": time.time(),
            "every": self._every,
        }
        file = _file(run.folder.ranks, world.rank)
        with suppress(OSError, ArtelError):
            if run.folder_identity:
                run.folder.check_there(run.folder_identity)
            # Whole or absent; but not flushed to the disk, for which a training would have to wait.
            partial = file.with_name(f".{file.name}.partial")
            partial.write_bytes(orjson.dumps(status))
            partial.replace(file)
