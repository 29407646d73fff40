"""Exceptions for invalid input and failed work. Each has a location, a problem and a fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from artel.printable import escape_line
from artel.secrets import hide_secrets

# Messages may quote user input. The longest list of names has 1,300 characters.
_MAX_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: where it is, what is wrong, and how to fix it.

    Messages may quote untrusted text, so secrets are hidden and control characters escaped.
    """

    where: str
    """A key (`data.block`), a location (`run.yaml:12`, `texts/a.txt:3`) or a command-line option."""
    what: str
    fix: str = ""
    quoted: tuple[str, ...] = ()
    """Output of another program, shown below the problem."""

    def __post_init__(self) -> None:
        for name in ("where", "what", "fix"):
            object.__setattr__(self, name, _make_printable(getattr(self, name)))
        object.__setattr__(self, "quoted", tuple(_make_printable(line) for line in self.quoted))

    @property
    def lines(self) -> list[str]:
        """The message as lines: location and problem, then the quoted lines and the fix, indented."""
        first = f"{self.where}: {self.what}" if self.where else self.what
        return [first, *(f"    | {line}" for line in self.quoted), *([f"    {self.fix}"] if self.fix else [])]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class ArtelError(Exception):
    """Base class of errors that are printed without a traceback."""

    exit_code = 1

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @property
    def one_line(self) -> str:
        """All problems as one line, to quote in another message."""
        return " · ".join("; ".join(line.strip() for line in problem.lines) for problem in self.problems)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter show instead of a traceback."""
        return [f"{type(self).__name__}:", *(line for problem in self.problems for line in problem.lines)]

    @classmethod
    def at(cls, where: str, what: str, fix: str = "", quoted: tuple[str, ...] = ()) -> Self:
        """Return an error with one problem: `raise InputError.at("data.block", "is 0", "write 1 or more")`."""
        return cls((Problem(where, what, fix, quoted),))


class InputError(ArtelError):
    """The run file, the data or the command line is invalid. Nothing has been started. Exit status 2."""

    exit_code = 2


class WorkError(ArtelError):
    """The work failed although the input was valid: disk full, NaN, connection lost. Exit status 1."""

    exit_code = 1


class OutOfMemory(WorkError):
    """One of several processes ran out of memory. It has recorded that the next start must use less.

    Exit status 76 tells a launcher to start again. This ends at some point, because each start uses less memory.
    """

    exit_code = 76


class Interrupted(ArtelError):
    """Stopped by a signal after everything was saved. The same command resumes. Exit status 130."""

    exit_code = 130


def _make_printable(text: str) -> str:
    """Hide secrets, escape control characters and shorten the text to `_MAX_CHARS`."""
    text = hide_secrets(text)
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]} … {text[-_MAX_CHARS // 2 :]}"
    return escape_line(text)


def missing_extra(package: str, extra: str, needed_for: str) -> InputError:
    """Return the error for an optional dependency that is not installed."""
    return InputError.at(
        needed_for, f"needs the package {package}, which is not installed", f"pip install 'artel-lm[{extra}]'"
    )
