"""Standard input, output and error as they are found: closed, of ASCII alone, a full disk, a pipe nobody reads."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from artel.errors import WorkError
from artel.printable import in_a_line, in_lines
from artel.secrets import hide_secrets

_newest = ""


def be_utf8() -> None:
    """Start this command again in UTF-8 mode where Python takes names of files for ASCII: they are UTF-8 in run files.

    Python goes over to it by itself under LC_ALL=C, unless PYTHONUTF8=0 stands in the environment.
    """
    if sys.getfilesystemencoding() == "ascii" and "utf8" not in sys._xoptions:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def open_streams() -> None:
    """Give the three streams an open file each, and let no character fail to be written.

    One that was closed (`>&-`) would be the next file that is opened, and what is printed would go into that. Closed
    standard output stays one that cannot be written: a result that was asked for is not lost in silence.
    """
    global _newest
    _newest = ""
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a byte that is no UTF-8 is told by who reads it, not raised
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(*lines: str) -> None:
    """For people: lines on standard error, from the first process only; secrets are hidden, what acts is escaped."""
    global _newest
    if os.environ.get("RANK", "0") == "0":
        _newest = lines[0] if lines and lines[0] else _newest
        write_lines(lines)


def newest_told() -> str:
    """The newest line that this process told: what it was about to do."""
    return _newest


def write_lines(lines: tuple[str, ...] | list[str]) -> None:
    """Lines on standard error from any process. Where it cannot be written, nobody is there to be told so."""
    with suppress(OSError):
        print("\n".join(in_a_line(hide_secrets(line)) for line in lines), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """A text that was asked for, on standard output; its line breaks and tabs stay, what else acts is escaped.

    Raises WorkError where it cannot be written.
    """
    write_out(in_lines(text) + end)


def write_out(text: str, stream: TextIO | None = None) -> None:
    """The text as it is, on standard output or another stream. Raises WorkError where it cannot be written.

    Raises BrokenPipeError where its reader (head, less) went away.
    """
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        leave_out()
        name = "standard error" if stream is sys.stderr else "standard output"
        raise WorkError.at(name, f"cannot be written: {error.strerror}") from None


def leave_out() -> None:
    """Standard output goes nowhere from here on: Python's end would try to write again what could not be written."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
