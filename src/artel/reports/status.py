"""Status of a run (running, ended or dead), from the files that its processes write into RUN/ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from artel.host import process_exists

State = Literal["not begun", "running", "complete", "stopped", "failed", "dead", "unknown"]

_SLACK_SECONDS = 5.0
"""Seconds that a sign of life may be late on a busy machine, in addition to three intervals."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The newest status file of one process of the run."""

    rank: int
    host: str
    pid: int
    device: str
    step: int
    memory_gib: float
    """Memory held by the accelerator's allocator; on a CPU the resident size."""
    state: str
    """running, complete, stopped or failed."""
    message: str
    """Reason of a failure."""
    time: float
    """Time of writing, in seconds since 1970 by the host's clock."""
    interval: float
    """Interval between writes, in seconds."""
    doing: str = ""
    """Work between two steps, such as `writing answers`; empty while it learns."""

    @classmethod
    def read(cls, line: dict[str, Any]) -> RankStatus:
        """Parse a status file. Raise KeyError, TypeError or ValueError if it is damaged."""
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
            str(line.get("doing", "")),
        )


@dataclass(frozen=True, slots=True)
class Status:
    """State of a run and its newest step."""

    state: State
    step: int = 0
    message: str = ""
    """Reason of a failure."""
    silent_seconds: float = 0.0
    """Seconds since the last sign of life of a dead run."""
    silent_ranks: tuple[int, ...] = ()
    """Ranks of a running run that no longer give signs of life."""
    doing: str = ""
    """Last known work between two steps; empty if the run was learning, or is complete."""


class SignsOfLife:
    """Tracks when each process last gave a sign of life. Needs no synchronized clocks while it follows a run."""

    def __init__(self, now: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now, self._monotonic = now, monotonic
        # rank -> (time in its file, when that time was first read, True if it has changed since then)
        self._observations: dict[int, tuple[float, float, bool]] = {}

    def silence(self, rank: RankStatus) -> float:
        """Return the seconds since the last sign of life, by its file's last change or the clocks of both hosts."""
        now = self._monotonic()
        observation = self._observations.get(rank.rank)
        if observation is None or observation[0] != rank.time:
            observation = self._observations[rank.rank] = (rank.time, now, observation is not None)
        _, seen_at, has_changed = observation
        return now - seen_at if has_changed else max(self._now() - rank.time, now - seen_at)

    def is_dead(self, rank: RankStatus) -> bool:
        """True if there was no sign for three intervals, or for a few seconds if the process is gone from this host."""
        silence = self.silence(rank)
        is_gone = rank.host == socket.gethostname() and not process_exists(rank.pid)
        return silence > (min(rank.interval, _SLACK_SECONDS) + 1 if is_gone else 3 * rank.interval + _SLACK_SECONDS)


def determine_status(
    ranks: list[RankStatus], signs: SignsOfLife, *, complete: bool, step: int, has_started: bool
) -> Status:
    """Return the status of a run with newest logged step `step`. `complete`: its result and model exist."""
    if not ranks or ranks[0].rank != 0:
        state: State = "complete" if complete else "unknown" if has_started else "not begun"
        return Status(state, step)
    first = ranks[0]
    step = max(step, first.step)
    if first.state == "running":
        if signs.is_dead(first):
            return Status("dead", step, silent_seconds=signs.silence(first), doing=first.doing)
        silent = tuple(rank.rank for rank in ranks if rank.state == "running" and signs.is_dead(rank))
        return Status("running", step, silent_ranks=silent, doing=first.doing)
    if complete:
        return Status("complete", step)
    return Status("failed" if first.state == "failed" else "stopped", step, first.message, doing=first.doing)
