"""A process that gets no further writes down where it stands and ends, so that its launcher can start the run again.

Whoever gets further in the loop calls `heartbeat`. A thread watches that this goes on. It needs Python's lock (the
GIL), which a call that hangs may hold: for that case a small program, watchdog_process.py, watches the thread.

Time in which the watcher did not run does not count, or a machine that slept, a job that Slurm suspended, a program
in a debugger would pass for one that hangs. The clock is the monotonic one, which on Linux stands while the machine
sleeps; where it does not (a virtual machine that was paused), the watcher sees that it woke too late.
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
from artel.training.faults.watchdog_process import IGNORED, LATEST, SIGNAL, TICK, headline, stacks_file, tell, write
from artel.training.heartbeat import listen
from artel.training.run import Run

HUNG = 77  # exit status; of BSD's sysexits.h it is EX_NOPERM, which nothing here means
# Others that hang with this process began to wait at another moment, and lose their peer when it ends: so long it
# waits for their stacks to be written too.
_OTHERS_SECONDS = 5.0
# The disk itself may be what hangs: after so long the process ends without a file.
_WRITE_SECONDS = 30.0
# Collectives wait this much longer than the watchdog: it tells more than their own error.
_LONGER_SECONDS = 300.0
_A_YEAR = 365 * 24 * 3600.0


@contextmanager
def watchdog(run: Run) -> Iterator[None]:
    """Within the block this process ends with status HUNG after `train.hang_timeout` seconds without a `heartbeat`.

    The Python stacks of all its threads are then in RUN/hangs/TIME-process-RANK.txt.
    """
    seconds = run.config.train.hang_timeout
    run.world.set_timeout(_A_YEAR if seconds is None else seconds + _LONGER_SECONDS)
    if seconds is None:
        yield
        return
    if not faulthandler.is_enabled():
        faulthandler.enable()  # nccl's own watchdog aborts: then the stacks are on standard error at least
        report_bus_errors()
    thread = _Watchdog(run, seconds)
    listen(thread.hear)
    try:
        yield
    finally:
        listen(None)
        thread.close()


class _Watchdog:
    """The thread that watches, and the process that watches the thread."""

    def __init__(self, run: Run, seconds: float) -> None:
        self.newest = ("begin the loop",)
        """What was done last: another tuple at each heartbeat."""
        self._run, self._seconds, self._tick = run, seconds, min(TICK, seconds / 10)
        self._rank, self._folder = run.world.rank, run.folder.hangs.absolute()
        self._process = _WatchdogProcess(self._rank, seconds, self._tick, self._folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def hear(self, done: str) -> None:
        self.newest = (done,)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._process.close()

    def _watch(self) -> None:
        seen, waited, before = self.newest, 0.0, time.monotonic()
        while not self._over.wait(self._tick):
            now = time.monotonic()
            waited, before = waited + min(now - before, LATEST * self._tick), now
            self._process.tell()
            if self.newest is not seen:
                seen, waited = self.newest, 0.0
            elif waited > self._seconds:
                self._end(waited)

    def _end(self, waited: float) -> None:
        """Write the stacks of all threads, and end this process."""
        last = threading.Timer(_WRITE_SECONDS, os._exit, (HUNG,))
        last.daemon = True
        last.start()
        what = f"got no further for {waited:,.0f} s after step {self._run.step}; what it did last: {self.newest[0]}"
        file, line = stacks_file(self._folder, self._rank), headline(self._rank, what)
        # In a thread of its own: nobody may read what is told, which may even be what hangs.
        telling = threading.Thread(target=tell, args=(line, file), daemon=True)
        telling.start()
        with tempfile.TemporaryFile() as stacks, suppress(OSError):
            faulthandler.dump_traceback(stacks, all_threads=True)  # holds Python's lock: not onto a disk that may hang
            write(file, line, stacks.fileno())
        telling.join(1)
        self._process.tell()  # which would else soon take this end for another hang
        if self._run.world.size > 1:
            time.sleep(_OTHERS_SECONDS)
        os._exit(HUNG)


class _WatchdogProcess:
    """watchdog_process.py at work: it reads that the thread lives, and ends this process by SIGNAL when it does not."""

    def __init__(self, rank: int, seconds: float, tick: float, folder: Path) -> None:
        self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        faulthandler.register(SIGNAL, self._stacks, all_threads=True, chain=True)
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog_process.py"))]
        about = [os.getpid(), rank, seconds, tick, self._stacks.fileno(), folder]
        # It inherits what is held back here, until it ignores it: Ctrl-C would end it while it is being imported.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._process = subprocess.Popen(
                [*program, *map(str, about)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[self._stacks.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        self._ticks = self._process.stdin.fileno()
        os.set_blocking(self._ticks, False)

    def tell(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # it is stopped, or was ended: this process goes on without
            os.write(self._ticks, b".")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        faulthandler.unregister(SIGNAL)
        self._stacks.close()
