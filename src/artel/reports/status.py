"""Whether a run is at work, has ended, or died: told from what its processes write into RUN/ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["not begun", "running", "complete", "stopped", "failed", "dead", "unknown"]

_SLACK = 5.0
"""Seconds that a sign may come late on a busy machine, beside three intervals."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a process of the run wrote last about itself."""

    rank: int
    host: str
    pid: int
    device: str
    step: int
    memory_gib: float
    """Held by its accelerator's allocator, or its resident size on a CPU."""
    state: str
    """running, complete, stopped or failed."""
    message: str
    """Why it failed."""
    time: float
    """When it wrote this, in seconds since 1970 by its host's clock."""
    every: float
    """How often it writes, in seconds."""

    @classmethod
    def read(cls, line: dict[str, Any]) -> RankStatus:
        """Raises KeyError, TypeError or ValueError where it is none."""
        return cls(
            int(line["rank"]),
            str(line["host"]),
            int(line["pid"]),
            str(line["device"]),
            int(line["step"]),
            float(line["memory_gib"]),
            str(line["state"]),
            str(line.get("message", "")),
            float(line["time"]),
            float(line["every"]),
        )


@dataclass(frozen=True, slots=True)
class Status:
    """How it stands with a run."""

    state: State
    step: int = 0
    message: str = ""
    """Why it failed."""
    silent: float = 0.0
    """Seconds since the last sign of life of a run that is dead."""
    silent_ranks: tuple[int, ...] = ()
    """Ranks of a running run that give no sign of life."""


class SignsOfLife:
    """Judges when processes last gave a sign; kept while a run is followed, it needs no clock of theirs to be right."""

    def __init__(self, now: Callable[[], float] = time.time, watch: Callable[[], float] = time.monotonic) -> None:
        self._now, self._watch = now, watch
        self._seen: dict[int, tuple[float, float, bool]] = {}  # rank -> (its time, when it was seen, whether it moved)

    def silence(self, rank: RankStatus) -> float:
        """Seconds since its last sign: since it was seen to change, else by the clocks of both hosts."""
        watch = self._watch()
        before = self._seen.get(rank.rank)
        if before is None or before[0] != rank.time:
            before = self._seen[rank.rank] = (rank.time, watch, before is not None)
        _, seen, moved = before
        by_clock = max(0.0, self._now() - rank.time)
        return watch - seen if moved else max(by_clock, watch - seen)

    def is_dead(self, rank: RankStatus) -> bool:
        """True where it gave no sign for three intervals; for seconds, where its process is gone from this host."""
        silence = self.silence(rank)
        gone = rank.host == socket.gethostname() and not _is_there(rank.pid)
        return silence > (min(rank.every, _SLACK) + 1 if gone else 3 * rank.every + _SLACK)


def status_of(ranks: list[RankStatus], signs: SignsOfLife, *, complete: bool, step: int, begun: bool) -> Status:
    """How it stands with a run whose newest logged step is `step`; `complete` if its result and model are there."""
    if not ranks or ranks[0].rank != 0:
        state: State = "complete" if complete else "unknown" if begun else "not begun"
        return Status(state, step)
    first = ranks[0]
    step = max(step, first.step)
    if first.state == "running":
        if signs.is_dead(first):
            return Status("dead", step, silent=signs.silence(first))
        silent = tuple(rank.rank for rank in ranks if rank.state == "running" and signs.is_dead(rank))
        return Status("running", step, silent_ranks=silent)
    if complete:
        return Status("complete", step)
    return Status("failed" if first.state == "failed" else "stopped", step, first.message)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
