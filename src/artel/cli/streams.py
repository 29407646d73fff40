"""Standard input, output and error in any state: closed, ASCII only, a full disk, a pipe that nobody reads."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from artel.elapsed import printing
from artel.errors import WorkError
from artel.printable import in_a_line, in_lines
from artel.secrets import hide_secrets

_last = ""


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
    global _last
    _last = ""
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
        sys.stdin.reconfigure(errors="surrogateescape")  # whoever reads a byte that is not UTF-8 reports it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(*lines: str) -> None:
    """For people: lines on standard error, from rank 0 only; secrets are hidden, control characters escaped."""
    global _last
    if os.environ.get("RANK", "0") == "0":
        _last = lines[0] if lines and lines[0] else _last
        write_lines(lines)


def last_message() -> str:
    """The last line of `tell` in this process: what it was about to do."""
    return _last


def write_lines(lines: tuple[str, ...] | list[str]) -> None:
    """Lines on standard error from any process. An error of writing is ignored: it could not be reported."""
    shown = [in_a_line(hide_secrets(line)) for line in lines]
    with suppress(OSError), printing(shown[0] if shown else ""):
        print("\n".join(shown), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """A result on standard output; line breaks and tabs stay, other control characters are escaped.

    Raises WorkError where it cannot be written.
    """
    write_out(in_lines(text) + end)


def write_out(text: str, stream: TextIO | None = None) -> None:
    """The text unchanged, on standard output or another stream. Raises WorkError where it cannot be written.

    Raises BrokenPipeError where its reader (head, less) has ended.
    """
    stream = stream or sys.stdout
    try:
        with printing(ends_line=text.endswith("\n")):
            stream.write(text)
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        leave_out()
        name = "standard error" if stream is sys.stderr else "standard output"
        raise WorkError.at(name, f"cannot be written: {error.strerror}") from None


def leave_out() -> None:
    """Discard standard output from here on: Python would try to write it again at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
