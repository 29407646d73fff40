"""Ends a process whose watchdog (watchdog.py) cannot run because a call that never returns holds the GIL.

A separate program that needs only the standard library, started by the watchdog:

    python -I -S watchdog_process.py PROCESS RANK SECONDS TICK STACKS FOLDER

Every TICK seconds the watchdog writes a byte to this program's standard input. After SECONDS without a byte, counting
only time in which both ran, the program sends SIGNAL. Python's faulthandler, which needs no GIL, writes the stacks of
all threads to the open file STACKS (a descriptor) and lets the process die of the signal. The program then copies the
stacks into FOLDER.

faulthandler.dump_traceback_later does the same inside the process, but its clock keeps running while the process is
stopped: a job that Slurm suspended for an hour, or Ctrl-Z on a laptop, would end the run when it continues.
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
"""Maximum seconds between two checks."""
MAX_LATE_TICKS = 5
"""Ticks that a check may be late on a busy machine. Delay beyond that does not count."""
SIGNAL = signal.SIGVTALRM
"""Signal of a timer that artel does not use. By default it ends the process."""
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
"""Signals meant for the watched process. This program ends with it."""
# Extra ticks, so that the thread can end the process first.
_EXTRA_TICKS = 3
_EXIT_SECONDS = 10


def main(process: int, rank: int, seconds: float, tick: float, stacks: int, folder: Path) -> None:
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    silent_seconds, last_check = 0.0, time.monotonic()
    while silent_seconds <= seconds + _EXTRA_TICKS * tick:
        received = _read_ticks(tick)
        if received == b"" or os.getppid() != process:
            return
        now = time.monotonic()
        if received is not None:
            silent_seconds = 0.0
        elif not _is_stopped(process):
            silent_seconds += min(now - last_check, MAX_LATE_TICKS * tick)
        last_check = now
    os.kill(process, SIGNAL)
    if not _has_ended():
        os.kill(process, signal.SIGKILL)
    file = stacks_file(folder, rank)
    line = headline(rank, f"no progress for {silent_seconds:,.0f} s, in a call that held Python's lock")
    write(file, line, stacks)
    print_headline(line, file)


def stacks_file(folder: Path, rank: int) -> Path:
    """Return the file for the stacks of a hanging process."""
    return folder / f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-process-{rank}.txt"


def headline(rank: int, event: str) -> str:
    """Return the first line of the report."""
    return f"process {rank} on {socket.gethostname()}: {event}"


def write(file: Path, line: str, stacks: int) -> None:
    """Write the headline, the time and the content of the open file `stacks` into `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    head = f"{line}\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}\n\n"
    file.write_bytes(head.encode() + os.pread(stacks, os.fstat(stacks).st_size, 0))


def print_headline(line: str, file: Path) -> None:
    """Print the headline and the path of the stacks on standard error."""
    path = str(file).encode("unicode_escape").decode() if not str(file).isprintable() else file
    print(f"artel: {line}\n    stacks of its threads: {path}", file=sys.stderr, flush=True)


def _read_ticks(limit: float) -> bytes | None:
    """Return bytes from the watchdog, b"" if its process has ended, or None if nothing came for `limit` seconds."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], limit)
    return os.read(sys.stdin.fileno(), 4096) if ready else None


def _has_ended() -> bool:
    """True if the process ends within _EXIT_SECONDS."""
    end = time.monotonic() + _EXIT_SECONDS
    while time.monotonic() < end:
        if _read_ticks(end - time.monotonic()) == b"":
            return True
    return False


def _is_stopped(process: int) -> bool:
    """True if a signal or a debugger has stopped the process."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in ("T", "t")
    return False


if __name__ == "__main__":
    process_id, process_rank, limit, interval, descriptor, target = sys.argv[1:]
    main(int(process_id), int(process_rank), float(limit), float(interval), int(descriptor), Path(target))
