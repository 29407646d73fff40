"""Ctrl-C: answered at once, and held back at moments when it must wait.

Python runs the handler of a signal only when the main thread is back from C++, which may take many seconds: a backward
pass, a compilation. `answer_at_once` therefore starts a thread that learns of a signal from the interpreter's wakeup
file descriptor and prints the answer meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_QUIET = 0.5
"""Seconds in which a process that has nothing to finish ends, so that no answer is needed."""
SAME = 1.0
"""Seconds in which two signals are one: from the terminal, and passed on by a launcher."""

Answer = Callable[[], str]

_ENDING = "stopping; press Ctrl-C again to end at once"
_answers: list[Answer | None] = [lambda: _ENDING]
"""The innermost counts. None: nothing is printed, and a second Ctrl-C is left to Python's handler."""
_is_handled = threading.Event()


def in_main_thread() -> bool:
    """Whether this is the thread in which signals are handled; no other may set a handler."""
    return threading.current_thread() is threading.main_thread()


def answer_at_once() -> None:
    """From now on print an answer to each Ctrl-C of this process within a second, and end it on the second one.

    Called by the command line alone: in a notebook the wakeup file descriptor is the event loop's.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)  # else a signal to the child would be taken for one to this process
    threading.Thread(target=_listen, args=(reader,), name="answers to Ctrl-C", daemon=True).start()


@contextmanager
def answered_by(answer: Answer | None) -> Iterator[None]:
    """Answer Ctrl-C within the block with the line that `answer` returns; None: with nothing, others do."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()


def interrupt_is_handled() -> None:
    """Note that Ctrl-C has had its effect and the process continues: the next one is a first one again."""
    _is_handled.set()


def _forget() -> None:
    with suppress(ValueError):  # forked by a thread that is not the main one
        signal.set_wakeup_fd(-1)


def _listen(reader: int) -> None:
    """Answer the signals whose numbers come out of the pipe `reader`."""
    before = -SAME
    while True:
        numbers = os.read(reader, 64)
        now, answer = time.monotonic(), _answers[-1]
        if signal.SIGINT not in numbers or answer is None or 0 < now - before < SAME:
            continue
        if before > 0 and not _is_handled.is_set():
            _say("stopped at once")
            os._exit(130)
        before = now
        _is_handled.clear()
        if len(_answers) == 1 and _is_handled.wait(_QUIET):
            before = -SAME
            continue
        _say(answer())


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        panics = sys.modules.get("artel.storage.panics")  # which may buffer what is written to 2; not imported here
        with suppress(OSError):
            os.write(2 if panics is None else panics.stderr_descriptor(), f"artel: {line}\n".encode(errors="replace"))
            sys.stderr.flush()


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Ctrl-C that comes during the block takes effect at its end.

    The signal is handled, not masked: a process of several threads gets it by any that does not mask it.
    """
    if not in_main_thread():  # only there an interrupt is raised
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
