"""Each process of a run that trains says that it lives, and at which step it is (`training/rank_file.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from artel.parallel import World
from artel.storage import disk_errors
from artel.training.memory.in_use import memory_in_use
from artel.training.rank_file import SECONDS, RankFile, rank_file
from artel.training.run import Run
from artel.training.run_folder import RunFolder

_RANKS = 64  # so many write as often; more of them write less often, or a shared disk has much to do


class RankStatus:
    """What a process says of itself: from when its run is there, also the step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._run: Run | None = None

    def follow(self, run: Run) -> None:
        self._run = run

    def facts(self) -> dict[str, Any]:
        memory = round(memory_in_use(self._world.device) / 2**30, 4)
        step = 0 if self._run is None else self._run.step
        return {"device": str(self._world.device), "step": step, "memory_gib": memory}


@contextmanager
def rank_status(folder: RunFolder, world: World) -> Iterator[RankStatus]:
    """Within the block this process shows that it lives; at its end how it ended.

    The folder is there and claimed. Raises InputError where the disk refuses the folder of the files.
    """
    if world.first:
        with disk_errors(folder.path):
            folder.ranks.mkdir(exist_ok=True)
        _remove_others(folder, world)
    world.barrier()
    status = RankStatus(world)
    with RankFile(folder, world.rank, SECONDS * max(1.0, world.size / _RANKS), status.facts).written():
        yield status


def _remove_others(folder: RunFolder, world: World) -> None:
    """Files of ranks that an earlier start had, and this one has not."""
    own = {rank_file(folder.ranks, rank) for rank in range(world.size)}
    for file in folder.ranks.glob("rank-*.json"):
        if file not in own:
            file.unlink(missing_ok=True)
