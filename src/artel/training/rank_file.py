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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from artel.errors import ArtelError, Interrupted
from artel.host import process_memory
from artel.training.run_folder import RunFolder

SECONDS = 5.0
_TAKEN_OVER = 60.0  # seconds within which the processes that train follow the one that started them
_LONGEST = 500  # characters of a message


class RankFile(threading.Thread):
    """Writes the file of one process, again and again; `facts` gives what changes (device, step, memory_gib)."""

    def __init__(self, folder: RunFolder, rank: int, every: float, facts: Callable[[], dict[str, Any]]) -> None:
        super().__init__(name="rank file", daemon=True)
        self._folder, self._rank, self._facts = folder, rank, facts
        self.every = every
        self.folder_identity = folder.identity()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self.every):
            self.write("running")

    def stop(self) -> None:
        self._over.set()
        self.join(SECONDS)  # no longer: the disk may hang

    @contextmanager
    def written(self, at_end: str = "complete") -> Iterator[None]:
        """Within the block the file says that the process lives; at the end how it ended: `at_end` if all went well.

        A file that cannot be written is left as it is.
        """
        self.write("running")
        self.start()
        ended, message = at_end, ""
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
            self.stop()
            self.write(ended, message)

    def write(self, state: str, message: str = "") -> None:
        """Write the file anew; nothing where the disk refuses, or the folder is another one by now."""
        status = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **self._facts(),
            "state": state,
            "message": message[:_LONGEST],
            "time": time.time(),
            "every": self.every,
        }
        file = rank_file(self._folder.ranks, self._rank)
        with suppress(OSError, ArtelError):
            if self.folder_identity:
                self._folder.check_there(self.folder_identity)
            # Whole or absent; but not flushed to the disk, for which a training would have to wait.
            partial = file.with_name(f".{file.name}.partial")
            partial.write_bytes(orjson.dumps(status))
            partial.replace(file)


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


@contextmanager
def start_status(folder: RunFolder) -> Iterator[None]:
    """While a run that is not complete is checked and its text prepared, its first rank's file says that it is at work.

    The process that trains takes the file over within a minute; without it a run that is started again would look
    dead, or as it ended before. Writes nothing where the disk refuses.
    """
    if folder.is_complete:
        yield
        return

    def facts() -> dict[str, Any]:
        with suppress(OSError):
            folder.ranks.mkdir(exist_ok=True)  # --restart empties the folder
        return {"device": "cpu", "step": 0, "memory_gib": round(process_memory("VmRSS") / 2**30, 4)}

    status = RankFile(folder, 0, SECONDS, facts)
    with status.written(at_end="running"):
        yield
        status.every = _TAKEN_OVER
