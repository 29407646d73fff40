"""Ends a process whose watchdog (watchdog.py) cannot run: a call that never returns holds Python's lock, the GIL.

A program of its own, on the standard library alone, started by the watchdog:

    python -I -S watchdog_process.py PROCESS RANK SECONDS TICK STACKS FOLDER

Each TICK seconds the watchdog writes a byte to its standard input. After SECONDS without one, during which both ran,
it sends SIGNAL: Python's faulthandler, which needs no lock, writes the stacks of all threads to the open file STACKS
(a number) and lets the process die of the signal. What was written is put into a file of FOLDER.

faulthandler.dump_traceback_later does the same within the process, but its clock goes on while the process is stopped:
a job that Slurm suspended for an hour, or a laptop's Ctrl-Z, would end at the moment it goes on.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

TICK = 1.0
"""Seconds between two looks, at most."""
LATEST = 5
"""A look may be so many ticks late on a busy machine; what is later does not count."""
SIGNAL = signal.SIGVTALRM
"""Of a timer that nobody uses; a process that does not expect it dies of it."""
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
"""They are meant for the process, with which the watchdog process ends."""
# A look at the thread comes after the thread's own of the same moment: it is given so many ticks to end by itself.
_LONGER = 3
_DIES_SECONDS = 10


def main(process: int, rank: int, seconds: float, tick: float, stacks: int, folder: Path) -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    silent, before = 0.0, time.monotonic()
    while silent <= seconds + _LONGER * tick:
        received = _read(tick)
        if received == b"" or os.getppid() != process:
            return
        now = time.monotonic()
        if received is not None:
            silent = 0.0
        elif not _is_stopped(process):
            silent += min(now - before, LATEST * tick)
        before = now
    os.kill(process, SIGNAL)
    if not _has_ended():
        os.kill(process, signal.SIGKILL)
    file = stacks_file(folder, rank)
    line = headline(rank, f"got no further for {silent:,.0f} s, in a call that held Python's lock")
    write(file, line, stacks)
    tell(line, file)


def stacks_file(folder: Path, rank: int) -> Path:
    """Where the stacks of a process that hangs are written."""
    return folder / f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-process-{rank}.txt"


def headline(rank: int, what: str) -> str:
    """What happened, in a line."""
    return f"process {rank} on {socket.gethostname()}: {what}"


def write(file: Path, line: str, stacks: int) -> None:
    """Put the headline, the time and what the open file `stacks` holds into `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    head = f"{line}\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}\n\n"
    file.write_bytes(head.encode() + os.pread(stacks, os.fstat(stacks).st_size, 0))


def tell(line: str, file: Path) -> None:
    """Say the headline, and where the stacks are, on standard error."""
    where = str(file).encode("unicode_escape").decode() if not str(file).isprintable() else file
    print(f"artel: {line}\n    where its threads stood: {where}", file=sys.stderr, flush=True)


def _read(limit: float) -> bytes | None:
    """What the watchdog has written: nothing, b"", when its process has ended; None when it has not for `limit`."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], limit)
    return os.read(sys.stdin.fileno(), 4096) if ready else None


def _has_ended() -> bool:
    """Whether the process ends within _DIES_SECONDS."""
    end = time.monotonic() + _DIES_SECONDS
    while time.monotonic() < end:
        if _read(end - time.monotonic()) == b"":
            return True
    return False


def _is_stopped(process: int) -> bool:
    """Whether it is stopped, by a signal or a debugger."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in ("T", "t")
    return False


if __name__ == "__main__":
    _, number, its_rank, limit, look, file_number, place = sys.argv
    main(int(number), int(its_rank), float(limit), float(look), int(file_number), Path(place))
