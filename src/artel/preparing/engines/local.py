"""Run the tasks of a stage in processes of this machine.

The processes are forked: nothing is imported again, the tokenizer is shared, and no text passes between them. Each
reads the index of its next task from a shared open file. A process exits if its parent dies.

A process is forked even for a single worker: rensa keeps threads that do not survive a fork, so the children of a
process that has used it would wait for those threads forever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import IO, Literal

from artel.errors import ArtelError, WorkError
from artel.host import usable_cores
from artel.interrupts import delay_interrupts
from artel.preparing.tasks import Stage, Tasks
from artel.storage.panics import hide_panics
from artel.storage.unexpected_errors import worker_error
from artel.tokens.tokenizer.fast_encoder import encode_in_one_thread

_TASK_INDEX = struct.Struct("<i")


def run_locally(
    tasks: Tasks, stage: Stage, workers: int | Literal["auto"], progress: Callable[[int, int], None]
) -> None:
    """Run the unfinished tasks of a stage. Calls `progress` with (finished tasks, all tasks).

    Raise the errors of tasks, and WorkError if a process is killed.
    """
    unfinished = tasks.unfinished(stage)
    if not hasattr(os, "fork"):
        for done, task_index in enumerate(unfinished):
            progress(done, len(unfinished))
            tasks.run(stage, task_index)
        return
    num_processes = min(usable_cores() if workers == "auto" else workers, len(unfinished))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryFile(buffering=0, dir=tasks.workspace.path) as queue:  # forked processes share its position
        queue.write(b"".join(map(_TASK_INDEX.pack, unfinished)))
        queue.seek(0)
        arguments = (tasks, stage, queue, os.getpid())
        processes = [context.Process(target=_run_worker, args=arguments) for _ in range(num_processes)]
        try:
            _start_processes(processes)
            _wait_for_processes(processes, tasks, stage, len(unfinished), progress)
        finally:
            started = [process for process in processes if process.pid is not None]
            for process in started:
                process.kill()
            for process in started:
                process.join()


def _start_processes(processes: Sequence[BaseProcess]) -> None:
    """Start the processes. Delays Ctrl-C until all have started: an exception in a fork hook (of logging) is lost."""
    with delay_interrupts():
        for process in processes:
            process.start()


def _wait_for_processes(
    processes: Sequence[BaseProcess], tasks: Tasks, stage: Stage, num_tasks: int, progress: Callable[[int, int], None]
) -> None:
    """Wait until all processes have exited. Raise the error of the first that fails."""
    running = {process.sentinel: process for process in processes}
    while running:
        progress(num_tasks - len(tasks.unfinished(stage)), num_tasks)
        wait(list(running), timeout=0.5)
        for process in [process for process in running.values() if not process.is_alive()]:
            del running[process.sentinel]
            if process.exitcode:
                tasks.workspace.raise_errors()
                raise _exit_error(process.exitcode)


def _run_worker(tasks: Tasks, stage: Stage, queue: IO[bytes], parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and kills this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    encode_in_one_thread()  # other processes use the other cores
    threading.Thread(target=exit_with_parent, args=(parent_pid,), daemon=True).start()
    with hide_panics():  # once for all texts, because once per text would be slow
        status = _run_tasks(tasks, stage, queue)
    os._exit(status)


def _run_tasks(tasks: Tasks, stage: Stage, queue: IO[bytes]) -> int:
    """Run tasks until the queue is empty. Return the exit status."""
    while entry := queue.read(_TASK_INDEX.size):
        task_index = _TASK_INDEX.unpack(entry)[0]
        try:
            tasks.run(stage, task_index)
        except BaseException as raised:  # the parent reports unexpected errors, too
            error = worker_error(raised, f"stage {stage}, part {task_index}")
            try:
                tasks.workspace.write_error(f"{stage}-{task_index}", error)
            except ArtelError:  # the disk is full
                print(f"artel: {error.one_line}", file=sys.stderr, flush=True)
            return 1
    return 0


def exit_with_parent(parent_pid: int) -> None:
    """Exit when the parent process is gone. Runs in a thread."""
    while os.getppid() == parent_pid:
        time.sleep(0.2)
    os._exit(1)


def _exit_error(exit_code: int) -> WorkError:
    if exit_code < 0:
        what = f"a process that prepares text was killed by {signal.Signals(-exit_code).name}"
        fix = "if memory ran out, lower prepare.workers; the same command resumes from the finished parts"
    else:
        what, fix = f"a process that prepares text failed (exit status {exit_code})", "see what it printed above"
    return WorkError.at("prepare.workers", what, fix)
