"""The tasks of a stage on this machine, by processes of their own.

Processes are forked: nothing is imported again, the tokenizer is shared, and no text passes between them. Which task
each takes next comes from a pipe. A process whose starter died ends at once.

One process is forked too, where one is wanted: rensa keeps threads that do not survive a fork, and one that has used it
can never have children that do (they would wait for those threads for ever).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Literal

from artel.errors import ArtelError, WorkError
from artel.interrupts import interrupted_after
from artel.preparing.tasks import Stage, Tasks
from artel.storage.panics import hide_panics
from artel.storage.unexpected_errors import worker_error
from artel.tokens.tokenizer.fast_encoder import encode_in_one_thread

_NUMBER = struct.Struct("<i")
# Numbers of tasks that lie in the pipe at a time: few, so that they are not all taken when one of them fails.
_AHEAD = 64


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_here(tasks: Tasks, stage: Stage, workers: int | Literal["auto"], progress: Callable[[int, int], None]) -> None:
    """Do the stage's tasks that are left; `progress` is told how many of how many are done.

    Raises what a task raises, and WorkError when a process is killed.
    """
    left = tasks.left(stage)
    if not hasattr(os, "fork"):
        for done, number in enumerate(left):
            progress(done, len(left))
            tasks.do(stage, number)
        return
    count = min(cores() if workers == "auto" else workers, len(left))
    numbers, feed = os.pipe()
    os.set_blocking(feed, False)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_work, args=(tasks, stage, numbers, feed, os.getpid())) for _ in range(count)]
    try:
        _start(processes)
        os.close(numbers)
        numbers = -1
        _feed(processes, feed, tasks, stage, left, progress)
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for number in (numbers, feed):
            if number >= 0:
                os.close(number)


def _start(processes: Sequence[BaseProcess]) -> None:
    """Start them; Ctrl-C waits until all are there: what is raised in a hook of a fork (logging has some) is lost."""
    with interrupted_after():
        for process in processes:
            process.start()


def _feed(
    processes: Sequence[BaseProcess], feed: int, tasks: Tasks, stage: Stage, left: list[int],
    progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Hand out the numbers until all processes have ended; the first that fails ends the work."""
    given = 0
    running = {process.sentinel: process for process in processes}
    while running:
        done = len(left) - len(tasks.left(stage))
        progress(done, len(left))
        while given < len(left) and given - done < _AHEAD:
            os.write(feed, _NUMBER.pack(left[given]))
            given += 1
        if given == len(left) and feed >= 0:
            for _ in processes:
                os.write(feed, _NUMBER.pack(-1))
            given += 1
        wait(list(running), timeout=0.5)
        for process in [process for process in running.values() if not process.is_alive()]:
            del running[process.sentinel]
            if process.exitcode:
                tasks.workspace.raise_errors()
                raise _killed(process.exitcode or 0)


def _work(tasks: Tasks, stage: Stage, numbers: int, feed: int, starter: int) -> None:
    os.close(feed)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    encode_in_one_thread()  # each process is one of several
    threading.Thread(target=end_with, args=(starter,), daemon=True).start()
    with hide_panics():  # here for all texts: for each it would take too long
        status = _work_off(tasks, stage, numbers)
    os._exit(status)


def _work_off(tasks: Tasks, stage: Stage, numbers: int) -> int:
    """Do the tasks whose numbers come; the exit status."""
    while len(written := os.read(numbers, _NUMBER.size)) == _NUMBER.size:  # else the starter was interrupted
        number = _NUMBER.unpack(written)[0]
        if number < 0:
            break
        try:
            tasks.do(stage, number)
        except BaseException as error:  # those of the machine and faults of ours too: who waits for this process tells
            known = worker_error(error, f"stage {stage}, part {number}")
            try:
                tasks.workspace.note_error(f"{stage}-{number}", known)
            except ArtelError:  # the disk is full: it is said here
                print(f"artel: {known.in_a_line}", file=sys.stderr, flush=True)
            return 1
    return 0


def end_with(starter: int) -> None:
    """End this process when the one that started it is gone; for a thread of its own."""
    while os.getppid() == starter:
        time.sleep(0.2)
    os._exit(1)


def _killed(code: int) -> WorkError:
    if code < 0:
        what = f"a process that prepares text was ended by {signal.Signals(-code).name}"
        fix = "if memory ran out, write fewer prepare.workers; the same command goes on from the finished parts"
    else:
        what, fix = f"a process that prepares text failed (exit status {code})", "see what it printed above"
    return WorkError.at("prepare.workers", what, fix)
