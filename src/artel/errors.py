"""What a user can get wrong, and what can go wrong at work: exceptions that carry the place and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from artel.printable import in_a_line
from artel.secrets import hide_secrets

# Letters of what is wrong, which may quote what somebody wrote; the longest list of names there is has 1,300.
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it stands, what it is, and what to write instead.

    Secrets are hidden, and what would act on a terminal or begin a line is escaped: much of it was written by others.
    """

    where: str
    """The key (`data.block`), the place (`run.yaml:12`, `texts/a.txt:3`) or the command-line flag."""
    what: str
    fix: str = ""
    quoted: tuple[str, ...] = ()
    """Lines of another program, shown below what is wrong."""

    def __post_init__(self) -> None:
        for name in ("where", "what", "fix"):
            object.__setattr__(self, name, _shown(getattr(self, name)))
        object.__setattr__(self, "quoted", tuple(_shown(line) for line in self.quoted))

    @property
    def lines(self) -> list[str]:
        """As people read it: the place and what is wrong; indented below it, what is quoted and what to do."""
        first = f"{self.where}: {self.what}" if self.where else self.what
        return [first, *(f"    | {line}" for line in self.quoted), *([f"    {self.fix}"] if self.fix else [])]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class ArtelError(Exception):
    """Base of all errors that are shown to people as they are, without a traceback."""

    exit_code = 1

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @property
    def in_a_line(self) -> str:
        """All problems in one line, for messages that quote them."""
        return " · ".join("; ".join(line.strip() for line in problem.lines) for problem in self.problems)

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show in place of a traceback."""
        return [f"{type(self).__name__}:", *(line for problem in self.problems for line in problem.lines)]

    @classmethod
    def at(cls, where: str, what: str, fix: str = "", quoted: tuple[str, ...] = ()) -> Self:
        """An error with one problem: `raise InputError.at("data.block", "is 0", "write 1 or more")`."""
        return cls((Problem(where, what, fix, quoted),))


class InputError(ArtelError):
    """The run file, the data or the command line is wrong; nothing has been started. Exit status 2."""

    exit_code = 2


class WorkError(ArtelError):
    """The input was right and the work failed: disk full, NaN, a lost connection. Exit status 1."""

    exit_code = 1


class OutOfMemory(WorkError):
    """One of several processes was out of memory, and has noted that the run must do with less; to be started again.

    Exit status 76, by which a launcher knows that the failure cannot repeat itself for ever.
    """

    exit_code = 76


class Interrupted(ArtelError):
    """Stopped by a signal after everything was saved; the same command resumes. Exit status 130."""

    exit_code = 130


def _shown(text: str) -> str:
    text = hide_secrets(text)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return in_a_line(text)


def missing_extra(package: str, extra: str, needed_for: str) -> InputError:
    """The error for an optional dependency that is not installed."""
    return InputError.at(
        needed_for, f"needs the package {package}, which is not installed", f"pip install 'artel-lm[{extra}]'"
    )
