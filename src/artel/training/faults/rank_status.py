"""Writes the status file of each training process every few seconds: a sign of life, the step, and the work
between two steps (`rank_file.py`).

A thread writes the file, so that a process in a long validation does not look dead. A killed process leaves a file with
state `running` and an old time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from artel.parallel import World
from artel.storage import disk_errors
from artel.training.memory import memory_in_use
from artel.training.rank_file import final_state, rank_file, write_rank
from artel.training.run import Run
from artel.training.run_folder import RunFolder

_INTERVAL_SECONDS = 5.0
_RANKS_AT_FULL_RATE = 64  # more ranks write less often, to spare a shared disk


class StatusWriter(threading.Thread):
    """Rewrites this process's file at intervals. Includes the run's step once it follows a run."""

    def __init__(self, folder: RunFolder, world: World) -> None:
        super().__init__(name="rank status", daemon=True)
        self._folder, self._world, self._identity = folder, world, folder.identity()
        self._every = _INTERVAL_SECONDS * max(1.0, world.size / _RANKS_AT_FULL_RATE)
        self._run: Run | None = None
        self._stop_event = threading.Event()

    def follow(self, run: Run) -> None:
        self._run = run

    def run(self) -> None:
        while not self._stop_event.wait(self._every):
            self.write("running")

    def stop(self) -> None:
        self._stop_event.set()
        self.join(_INTERVAL_SECONDS)  # with a timeout, since the disk may hang

    def write(self, state: str, message: str = "") -> None:
        world = self._world
        memory = round(memory_in_use(world.device) / 2**30, 4)
        run = self._run
        measurements = {
            "device": str(world.device),
            "step": 0 if run is None else run.step,
            "memory_gib": memory,
            "doing": "" if run is None else run.trackers.doing,
        }
        write_rank(self._folder, world.rank, measurements, state, message, every=self._every, identity=self._identity)


@contextmanager
def rank_status(folder: RunFolder, world: World) -> Iterator[StatusWriter]:
    """Write this process's status during the block, and its final state afterwards.

    The folder must exist and be claimed. Raise InputError if the folder of status files cannot be created.
    """
    if world.first:
        with disk_errors(folder.path):
            folder.ranks.mkdir(exist_ok=True)
        current_files = {rank_file(folder.ranks, rank) for rank in range(world.size)}
        for file in folder.ranks.glob("rank-*.json"):
            if file not in current_files:  # an earlier start had more ranks
                file.unlink(missing_ok=True)
    world.barrier()
    writer = StatusWriter(folder, world)
    writer.write("running")
    writer.start()
    state, message = "complete", ""
    try:
        yield writer
    except BaseException as error:
        state, message = final_state(error)
        raise
    finally:
        writer.stop()
        writer.write(state, message)
