"""Standard input, output and error in any state: closed, ASCII only, on a full disk, with a broken pipe."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

from artel.elapsed import printing
from artel.errors import WorkError
from artel.printable import escape_line, escape_lines
from artel.secrets import hide_secrets

_last_message = ""


def ensure_utf8_mode() -> None:
    """Restart this command in UTF-8 mode if Python decodes file names as ASCII, since run files name them in UTF-8.

    Under LC_ALL=C, Python enters UTF-8 mode automatically, unless PYTHONUTF8=0 is set.
    """
    if sys.getfilesystemencoding() == "ascii" and "utf8" not in sys._xoptions:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def open_streams() -> None:
    """Make sure that the three streams are open, and that any character can be written.

    The descriptor of a closed stream (`>&-`) would be reused for the next file, which would receive the output. Closed
    standard output is opened read-only, so that writing a result fails instead of losing it silently.
    """
    global _last_message
    _last_message = ""
    for descriptor, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # stays open until the process ends
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the reader reports bytes that are not UTF-8
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_status(*lines: str) -> None:
    """Print a message for people on standard error, from rank 0 only. Hide secrets, escape control characters."""
    global _last_message
    if os.environ.get("RANK", "0") == "0":
        _last_message = lines[0] if lines and lines[0] else _last_message
        write_stderr_lines(lines)


def print_record(record: logging.LogRecord) -> None:
    """Print a log record. Warnings are printed by every process, other messages by rank 0 only."""
    if record.levelno >= logging.WARNING:
        write_stderr_lines([record.getMessage()])
    else:
        print_status(record.getMessage())


def last_message() -> str:
    """Return the first line of the last message of `print_status`, which says what the process is working on."""
    return _last_message


def write_stderr_lines(lines: tuple[str, ...] | list[str]) -> None:
    """Print lines on standard error from any process. Ignore errors, because they could not be reported."""
    printable = [escape_line(hide_secrets(line)) for line in lines]
    with suppress(OSError), printing(printable[0] if printable else ""):
        print("\n".join(printable), file=sys.stderr, flush=True)


def print_result(text: str, end: str = "\n") -> None:
    """Print a result on standard output. Escape control characters except line breaks and tabs.

    Raise WorkError if it cannot be written.
    """
    write_stdout(escape_lines(text) + end)


def write_stdout(text: str) -> None:
    """Write text unchanged to standard output. Raise WorkError or BrokenPipeError as `write_to` does."""
    write_to(sys.stdout, text)


def write_to(stream: TextIO, text: str) -> None:
    """Write text unchanged to standard output or standard error. Raise WorkError if it cannot be written.

    Raise BrokenPipeError if the reader (head, less) has exited.
    """
    try:
        with printing(ends_line=text.endswith("\n")):
            stream.write(text)
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        name = "standard error" if stream is sys.stderr else "standard output"
        raise WorkError.at(name, f"cannot be written: {error.strerror}") from None


def discard_stdout() -> None:
    """Discard standard output from now on. Otherwise Python would try to write it again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
