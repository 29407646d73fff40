"""Limits of time and memory for chat templates: they are programs, and come with other people's models.

A template first runs in a process of its own with limited time and memory, which finds templates that never end and
templates with endless output. Where only a certain conversation makes it endless, an exception ends it after a while.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from artel.errors import InputError

_MEMORY = 2**30
"""Bytes that a trial may use in addition to this process's memory."""
_TEXT = 2**24
"""Characters of output for a few short messages."""
_LONGEST_RESULT = 1000
"""Bytes of what a child reports."""
TRIAL_SECONDS = 5
"""Seconds of CPU time."""
_BUSY = 20
"""Times as many of wall-clock time: a busy machine gives a trial a small part of its processors."""
_SECONDS = 60.0
"""For one conversation; the longest take milliseconds."""
_FIX = "mend it, or write chat.template: chatml"


class EndlessTemplate(Exception):
    """Raised within a template that takes too long."""


def try_template(write: Callable[[], str], where: str, name: str, seconds: int = TRIAL_SECONDS) -> None:
    """Run `write`, which renders a template, in its own process.

    Raises InputError where it exceeds its limits: `seconds` of CPU time, and memory. An error of the template itself is
    ignored here.
    """
    said = in_child(lambda: "text" if len(write()) > _TEXT else "fine", seconds)
    if said != "fine":
        what = {
            "memory": f"takes more than {_MEMORY // 2**30} GiB of memory for a few words",
            "text": f"makes more than {_TEXT:,} characters of a few words",
            "recursion": "calls itself without end",
        }.get(said, f"does not end within {seconds} s for a few words")
        raise InputError.at(where, f"{name} {what}", _FIX)


def in_child(work: Callable[[], str], seconds: int, *, otherwise: str = "fine") -> str:
    """Run `work` in a child process and return its short result.

    Returns "memory", "recursion" or "end" if it exceeds its limits: memory, depth, `seconds` of CPU time. Returns
    `otherwise` if it raises anything else.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child needs no threads
        child = os.fork()
    if child == 0:
        os.close(reading)
        _tried(work, writing, seconds, otherwise)
    os.close(writing)
    try:
        ended, _, _ = select.select([reading], [], [], _BUSY * seconds)
        said = os.read(reading, _LONGEST_RESULT).decode(errors="replace") if ended else "end"
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return said or "end"


def _tried(work: Callable[[], str], writing: int, seconds: int, said: str) -> None:
    """In the child: set the limits, work, report the result and exit. The limit of time ends it without a report.

    `said` is reported if the work raises anything but an excess of its limits.
    """
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY)
        _lower(resource.RLIMIT_CPU, seconds + int(time.process_time()) + 1)
        said = work()
    except MemoryError:
        said = "memory"
    except RecursionError:
        said = "recursion"
    except BaseException:  # reported where the template is used
        pass
    finally:
        os.write(writing, said.encode()[:_LONGEST_RESULT])
        os._exit(0)


def _lower(limit: int, value: int) -> None:
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))


_running: dict[int, float] = {}
"""Threads that render a template, and their deadlines."""
_watch: threading.Thread | None = None


def in_time(write: Callable[[], str], seconds: float = _SECONDS) -> str:
    """The result of `write`. Raises EndlessTemplate within it when it takes too long."""
    global _watch
    if _watch is None or not _watch.is_alive():  # also after a fork, which does not copy threads
        _watch = threading.Thread(target=_watching, name="chat templates", daemon=True)
        _watch.start()
    thread = threading.get_ident()
    _running[thread] = time.monotonic() + seconds
    try:
        return write()
    finally:
        if _running.pop(thread, None) is None:  # wait for the exception, so that it is raised here and nowhere later
            for _ in range(500):
                time.sleep(0.01)


def _watching() -> None:
    while True:
        time.sleep(1)
        now = time.monotonic()
        for thread in [thread for thread, until in list(_running.items()) if until < now]:
            if _running.pop(thread, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(EndlessTemplate))
