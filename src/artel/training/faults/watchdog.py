"""Ends a process that hangs, so that its launcher can start the run again. First writes the stacks of its threads.

Code that makes progress calls `heartbeat`, and a thread watches for it. The thread needs the GIL, which a hanging call
may hold. In that case a small program, watchdog_process.py, notices that the thread has stopped.

Time in which the watchdog itself did not run does not count. Otherwise a sleeping machine, a job suspended by Slurm or
a program in a debugger would look like a hang. The clock is monotonic. On Linux it stops while the machine sleeps. If
it does not stop (a paused virtual machine), the watchdog sees that it woke up late.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from artel.storage import report_bus_errors
from artel.training.faults.watchdog_process import (
    IGNORED_SIGNALS,
    MAX_LATE_TICKS,
    SIGNAL,
    TICK,
    headline,
    print_headline,
    stacks_file,
    write,
)
from artel.training.heartbeat import heartbeat_file, listen
from artel.training.run import Run

HUNG = 77  # exit status; EX_NOPERM in BSD's sysexits.h, which artel does not use otherwise
# Wait before exiting, so that other ranks can write their stacks before they lose this peer: their wait began later.
_PEER_SECONDS = 5.0
# The disk itself may hang: after this time, exit without a file.
_WRITE_SECONDS = 30.0
# Collectives time out this much later than the watchdog, whose report is more useful than their error.
_EXTRA_TIMEOUT = 300.0
_A_YEAR = 365 * 24 * 3600.0


@contextmanager
def watchdog(run: Run) -> Iterator[None]:
    """Exit with status HUNG after `train.hang_timeout` seconds without a `heartbeat` inside the block.

    The Python stacks of all threads are then in RUN/hangs/TIME-process-RANK.txt.
    """
    seconds = run.config.train.hang_timeout
    run.world.set_timeout(_A_YEAR if seconds is None else seconds + _EXTRA_TIMEOUT)
    if seconds is None:
        yield
        return
    if not faulthandler.is_enabled():
        faulthandler.enable()  # if NCCL's watchdog aborts the process, the stacks go to standard error
        report_bus_errors()
    thread = _Watchdog(run, seconds)
    listen(thread.on_heartbeat)
    try:
        yield
    finally:
        listen(None)
        thread.close()


class _Watchdog:
    """The watching thread, and the process that watches the thread."""

    def __init__(self, run: Run, seconds: float) -> None:
        self.newest = ("begin the loop",)
        """The newest heartbeat, as a new tuple each time."""
        self._run, self._seconds, self._tick = run, seconds, min(TICK, seconds / 10)
        self._rank, self._folder = run.world.rank, run.folder.hangs.absolute()
        self._process = _WatchdogProcess(self._rank, seconds, self._tick, self._folder)
        self._file = heartbeat_file()
        self._touch_file()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def on_heartbeat(self, finished: str) -> None:
        self.newest = (finished,)

    def close(self) -> None:
        self._stop_event.set()
        self._thread.join()
        self._process.close()
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()

    def _watch(self) -> None:
        last_seen, waited, last_check = self.newest, 0.0, time.monotonic()
        while not self._stop_event.wait(self._tick):
            now = time.monotonic()
            waited, last_check = waited + min(now - last_check, MAX_LATE_TICKS * self._tick), now
            self._process.tick()
            if self.newest is not last_seen:
                last_seen, waited = self.newest, 0.0
                self._touch_file()
            elif waited > self._seconds:
                self._end_process(waited)

    def _touch_file(self) -> None:
        """Tell a probe outside of progress. A disk that refuses does not end the run."""
        if self._file is not None:
            with suppress(OSError):
                self._file.touch()

    def _end_process(self, waited: float) -> None:
        """Write the stacks of all threads and exit."""
        timer = threading.Timer(_WRITE_SECONDS, os._exit, (HUNG,))
        timer.daemon = True
        timer.start()
        message = f"no progress for {waited:,.0f} s after step {self._run.step}; last finished: {self.newest[0]}"
        file, line = stacks_file(self._folder, self._rank), headline(self._rank, message)
        # In a separate thread: if nobody reads standard error, printing may hang.
        printing = threading.Thread(target=print_headline, args=(line, file), daemon=True)
        printing.start()
        with tempfile.TemporaryFile() as stacks, suppress(OSError):
            faulthandler.dump_traceback(stacks, all_threads=True)  # holds the GIL: not onto a disk that may hang
            write(file, line, stacks.fileno())
        printing.join(1)
        self._process.tick()  # otherwise the watchdog process would soon take this exit for another hang
        if self._run.world.size > 1:
            time.sleep(_PEER_SECONDS)
        os._exit(HUNG)


class _WatchdogProcess:
    """Runs watchdog_process.py, which ends this process with SIGNAL if the thread stops sending ticks."""

    def __init__(self, rank: int, seconds: float, tick: float, folder: Path) -> None:
        self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open while the process runs
        faulthandler.register(SIGNAL, self._stacks, all_threads=True, chain=True)
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog_process.py"))]
        arguments = [os.getpid(), rank, seconds, tick, self._stacks.fileno(), folder]
        # The child inherits the blocked signals until it ignores them. Otherwise Ctrl-C would end it during its
        # imports.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [*program, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[self._stacks.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        assert self._process.stdin is not None
        self._ticks = self._process.stdin.fileno()
        os.set_blocking(self._ticks, False)

    def tick(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # the process is stopped or has ended: continue without it
            os.write(self._ticks, b".")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        faulthandler.unregister(SIGNAL)
        self._stacks.close()
