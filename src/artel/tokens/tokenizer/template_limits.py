"""Limits of time and memory for chat templates, which are programs from other people's models.

A template first runs in its own process with limited time and memory, which catches endless templates and endless
output. If only some conversation makes it endless, an exception stops it after a while.
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

_MAX_MEMORY_BYTES = 2**30
"""Bytes that a trial may allocate in addition to this process's memory."""
_MAX_CHARACTERS = 2**24
"""Characters of output for a few short messages."""
_MAX_RESULT_BYTES = 1000
"""Bytes of a child's result."""
TRIAL_SECONDS = 5
"""Seconds of CPU time."""
_MAX_SLOWDOWN = 20
"""Wall-clock time over CPU time: on a busy machine a trial gets a small share of the cores."""
_RENDER_SECONDS = 60.0
"""Time limit of one conversation; the longest take milliseconds."""
_FIX = "fix it, or write chat.template: chatml"


class TemplateTimeout(Exception):
    """A template takes too long. Raised inside its rendering."""


def check_limits(write: Callable[[], str], where: str, name: str, seconds: int = TRIAL_SECONDS) -> None:
    """Run `write`, which renders a template, in its own process. Raise InputError if it exceeds its limits."""
    result = run_in_child(lambda: "text" if len(write()) > _MAX_CHARACTERS else "fine", seconds)
    if result != "fine":
        what = {
            "memory": f"takes more than {_MAX_MEMORY_BYTES // 2**30} GiB of memory for a few words",
            "text": f"makes more than {_MAX_CHARACTERS:,} characters of a few words",
            "recursion": "calls itself without end",
        }.get(result, f"does not end within {seconds} s for a few words")
        raise InputError.at(where, f"{name} {what}", _FIX)


def run_in_child(work: Callable[[], str], seconds: int, *, otherwise: str = "fine") -> str:
    """Run `work` in a child process and return its short result, `otherwise` if it raises.

    Return "memory", "recursion" or "end" if it exceeds its memory, its depth, or `seconds` of CPU time.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child needs no threads
        child = os.fork()
    if child == 0:
        os.close(read_end)
        _run_child(work, write_end, seconds, otherwise)
    os.close(write_end)
    try:
        is_ready, _, _ = select.select([read_end], [], [], _MAX_SLOWDOWN * seconds)
        result = os.read(read_end, _MAX_RESULT_BYTES).decode(errors="replace") if is_ready else "end"
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return result or "end"


def _run_child(work: Callable[[], str], write_end: int, seconds: int, result: str) -> None:
    """Set the limits in the child, run `work`, report its result (`result` if it fails) and exit."""
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + _MAX_MEMORY_BYTES)
        _lower_limit(resource.RLIMIT_CPU, seconds + int(time.process_time()) + 1)
        result = work()
    except MemoryError:
        result = "memory"
    except RecursionError:
        result = "recursion"
    except BaseException:  # it will be reported when the template is used
        pass
    finally:
        os.write(write_end, result.encode()[:_MAX_RESULT_BYTES])
        os._exit(0)


def _lower_limit(limit: int, value: int) -> None:
    _, hard_limit = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit), hard_limit))


_running: dict[int, float] = {}
"""Threads that render a template, and their deadlines."""
_watchdog: threading.Thread | None = None


def run_with_deadline(write: Callable[[], str], seconds: float = _RENDER_SECONDS) -> str:
    """Return the result of `write`. Raise TemplateTimeout inside it if it takes too long."""
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # also after a fork, which does not copy threads
        _watchdog = threading.Thread(target=_enforce_deadlines, name="chat templates", daemon=True)
        _watchdog.start()
    thread = threading.get_ident()
    _running[thread] = time.monotonic() + seconds
    try:
        return write()
    finally:
        if _running.pop(thread, None) is None:  # wait for the exception, so that it is not raised later
            for _ in range(500):
                time.sleep(0.01)


def _enforce_deadlines() -> None:
    while True:
        time.sleep(1)
        now = time.monotonic()
        for thread in [thread for thread, deadline in list(_running.items()) if deadline < now]:
            if _running.pop(thread, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TemplateTimeout))
