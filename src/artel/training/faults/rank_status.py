"""Each process of a run that trains says every few seconds that it lives, and at which step it is (`rank_file.py`).

A thread writes it, so that a long validation passes for no death. A process that is killed leaves a file that says
`running` and grows old.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from artel.parallel import World
from artel.storage import disk_errors
from artel.training.memory.in_use import memory_in_use
from artel.training.rank_file import how_it_ended, rank_file, write_rank
from artel.training.run import Run
from artel.training.run_folder import RunFolder

_SECONDS = 5.0
_RANKS = 64  # so many write as often; more of them write less often, or a shared disk has much to do


class SignOfLife(threading.Thread):
    """Writes the file of this process, again and again; from when it follows the run, with its step."""

    def __init__(self, folder: RunFolder, world: World) -> None:
        super().__init__(name="sign of life", daemon=True)
        self._folder, self._world, self._identity = folder, world, folder.identity()
        self._every = _SECONDS * max(1.0, world.size / _RANKS)
        self._run: Run | None = None
        self._over = threading.Event()

    def follow(self, run: Run) -> None:
        self._run = run

    def run(self) -> None:
        while not self._over.wait(self._every):
            self.write("running")

    def stop(self) -> None:
        self._over.set()
        self.join(_SECONDS)  # no longer: the disk may hang

    def write(self, state: str, message: str = "") -> None:
        world = self._world
        memory = round(memory_in_use(world.device) / 2**30, 4)
        step = 0 if self._run is None else self._run.step
        facts = {"device": str(world.device), "step": step, "memory_gib": memory}
        write_rank(self._folder, world.rank, facts, state, message, every=self._every, identity=self._identity)


@contextmanager
def rank_status(folder: RunFolder, world: World) -> Iterator[SignOfLife]:
    """Within the block this process shows that it lives; at its end how it ended.

    The folder is there and claimed. Raises InputError where the disk refuses the folder of the files.
    """
    if world.first:
        with disk_errors(folder.path):
            folder.ranks.mkdir(exist_ok=True)
        _remove_others(folder, world)
    world.barrier()
    sign = SignOfLife(folder, world)
    sign.write("running")
    sign.start()
    ended, message = "complete", ""
    try:
        yield sign
    except BaseException as error:
        ended, message = how_it_ended(error)
        raise
    finally:
        sign.stop()
        sign.write(ended, message)


def _remove_others(folder: RunFolder, world: World) -> None:
    """Files of ranks that an earlier start had, and this one has not."""
    own = {rank_file(folder.ranks, rank) for rank in range(world.size)}
    for file in folder.ranks.glob("rank-*.json"):
        if file not in own:
            file.unlink(missing_ok=True)
