"""Run a command with all the processes it starts, and measure its time, its processor time and its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from artel.errors import WorkError

_SAMPLE = 0.1  # seconds between two readings; a shorter peak is not seen


@dataclass(frozen=True, slots=True)
class Finished:
    """The time and memory of a command."""

    elapsed: float
    """Seconds by the clock, from start to end."""
    processor: float
    """Seconds of processor time, user and system, of the process and all it started."""
    memory: int | None
    """Peak of the sum of PSS over the process and all it started, in bytes: a page that n of them share counts once,
    and pages of mapped files count. None where it was not requested, or there is no /proc (only Linux has it)."""
    resident: int | None
    """The same for RSS: a page that n of them share counts n times. Never below `memory`."""


def run(command: list[str], environment: dict[str, str], *, memory: bool = False) -> Finished:
    """Run a command to its end; `environment` is added to that of this process. Raises WorkError when it fails.

    Interrupting this process kills the command and all it started.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    tree = _Tree(process.pid, memory)
    ended = threading.Event()
    watcher = threading.Thread(target=tree.watch, args=(ended,), daemon=True)
    before = os.times()
    try:
        watcher.start()
        _, errors = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        ended.set()
        watcher.join()
    elapsed = time.perf_counter() - start
    after = os.times()
    if process.returncode != 0:
        last = errors.strip().splitlines()[-5:] or [f"exit status {process.returncode}"]
        fix = "run it by hand to see more"
        raise WorkError.at(" ".join(command[:6]), "failed", fix, tuple(line.strip() for line in last))
    # The system's count leaves out processes that the command did not wait for; the samples have them.
    waited = after.children_user + after.children_system - before.children_user - before.children_system
    return Finished(elapsed, max(waited, tree.processor), tree.memory or None, tree.resident or None)


@dataclass(slots=True)
class _Tree:
    """A process and all it started, sampled while they run."""

    root: int
    measure: bool
    """Read the memory too: some milliseconds each time for a process of 4 GB."""
    memory: int = 0
    resident: int = 0
    _times: dict[int, float] = field(default_factory=dict)

    @property
    def processor(self) -> float:
        return sum(self._times.values())

    def watch(self, ended: threading.Event) -> None:
        if not sys.platform.startswith("linux"):
            return
        while not ended.wait(_SAMPLE):
            alive = self._alive()
            if self.measure:
                sizes = [_memory(pid) for pid in alive]
                self.memory = max(self.memory, sum(pss for pss, _ in sizes))
                self.resident = max(self.resident, sum(rss for _, rss in sizes))

    def _alive(self) -> list[int]:
        """The processes that run now; records the processor time of each."""
        alive, waiting = [], [self.root]
        while waiting:
            pid = waiting.pop()
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (thread / "children").read_text().split())
            except (OSError, ValueError):
                continue  # it has just ended
            self._times[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            alive.append(pid)
        return alive


def _memory(pid: int) -> tuple[int, int]:
    """(PSS, RSS) of a process in bytes; (0, 0) when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes.get("Pss", 0), sizes.get("Rss", 0)
