"""Ctrl-C: acknowledge it at once, and delay it where necessary.

Python runs a signal handler only when the main thread returns from C++, which may take many seconds (a backward pass, a
compilation). `answer_interrupts` therefore starts a thread that is notified through the interpreter's wakeup file
descriptor and prints the answer meanwhile.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_EXIT_SECONDS = 0.5
"""Time in which a process without unfinished work exits, so that no answer is needed."""
SAME_SIGNAL_SECONDS = 1.0
"""Two signals within this time count as one: the terminal's, and the same one forwarded by a launcher."""

Answer = Callable[[], str]

_STOPPING_MESSAGE = "stopping; press Ctrl-C again to end at once"
_answers: list[Answer | None] = [lambda: _STOPPING_MESSAGE]
"""The innermost answer counts. None: print nothing; a second Ctrl-C goes to Python's handler."""
_last_lines: list[Answer] = []
"""While not empty, a signal ends this process at once, after the line that the last entry returns."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that stop a run; SIGUSR1 is Slurm's warning that the time is nearly over."""
_is_handled = threading.Event()
_handled_at = -math.inf
"""Monotonic time of the last `mark_interrupt_handled`, in seconds."""


def in_main_thread() -> bool:
    """True in the main thread, the only one that handles signals and may set handlers."""
    return threading.current_thread() is threading.main_thread()


def answer_interrupts() -> None:
    """From now on, answer each Ctrl-C within a second, and end the process on the second one.

    Only for the command line: in a notebook the wakeup file descriptor belongs to the event loop.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_disable_in_child)  # the pipe is for signals of the parent only
    threading.Thread(target=_listen, args=(reader,), name="answers to Ctrl-C", daemon=True).start()


@contextmanager
def answer_interrupts_with(answer: Answer | None) -> Iterator[None]:
    """Answer Ctrl-C inside the block with the line that `answer` returns. None: print nothing."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()


@contextmanager
def exit_on_signal(last_line: Answer) -> Iterator[None]:
    """Inside the block, end the process at once on a stop signal, after printing the line that `last_line` returns.

    For work that cannot be interrupted and has nothing to save. Without `answer_interrupts` the block runs to its end.
    """
    _last_lines.append(last_line)
    try:
        yield
    finally:
        _last_lines.pop()


@contextmanager
def explain_interrupt(note: Callable[[], str]) -> Iterator[None]:
    """Add a note (what is kept, how to continue) to a Ctrl-C that ends the block. The innermost note counts."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not getattr(interrupt, "__notes__", None):
            interrupt.add_note(note())
        raise


def mark_interrupt_handled() -> None:
    """Record that Ctrl-C was handled and the process continues, so the next one counts as the first again."""
    global _handled_at
    _handled_at = time.monotonic()
    _is_handled.set()


def _disable_in_child() -> None:
    with suppress(ValueError):  # forked by a thread that is not the main one
        signal.set_wakeup_fd(-1)


def _listen(reader: int) -> None:
    """Answer the signals whose numbers arrive through the pipe `reader`."""
    last_signal = -SAME_SIGNAL_SECONDS
    while True:
        signal_numbers = os.read(reader, 64)
        if _last_lines and not {*_STOP_SIGNALS}.isdisjoint(signal_numbers):
            _print_line(_last_lines[-1]())
            os._exit(130)
        now = time.monotonic()
        answer = _answers[-1]
        if signal.SIGINT not in signal_numbers or answer is None or 0 < now - last_signal < SAME_SIGNAL_SECONDS:
            continue
        if now - _handled_at < _EXIT_SECONDS:  # the main thread was faster than this one
            last_signal = -SAME_SIGNAL_SECONDS
            continue
        if last_signal > 0 and not _is_handled.is_set():
            _print_line("stopped at once")
            os._exit(130)
        last_signal = now
        _is_handled.clear()
        if len(_answers) == 1 and _is_handled.wait(_EXIT_SECONDS):
            last_signal = -SAME_SIGNAL_SECONDS
            continue
        _print_line(answer())


def _print_line(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        panics = sys.modules.get("artel.storage.panics")  # may redirect descriptor 2; not imported here
        with suppress(OSError):
            os.write(2 if panics is None else panics.stderr_descriptor(), f"artel: {line}\n".encode(errors="replace"))
            sys.stderr.flush()


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, and signals handled like it, until the end of the block.

    They are caught rather than masked: any thread that does not mask a signal can receive it.
    """
    if not in_main_thread():  # only the main thread is interrupted
        yield
        return
    interrupts: list[int] = []
    handlers = {signum: handler for signum in _STOP_SIGNALS if callable(handler := signal.getsignal(signum))}
    for signum in handlers:
        signal.signal(signum, lambda signum, frame: interrupts.append(signum))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if interrupts:
            signal.raise_signal(interrupts[0])
