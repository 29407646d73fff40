"""A command within a shell script: its words, the line of each, and the variables that the script sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO

from artel.errors import InputError

SCRIPT = re.compile(r"\brun_([a-z]+)(_no_trainer)?\.py\b")
_ENDS = re.compile(r"\||\|\||&&?|;|[0-9]*>>?(&[0-9])?.*|<.*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the command, with the values of variables that the script sets in their places."""

    text: str
    line: int
    unset: tuple[str, ...] = ()
    """The variables in it that the script does not set."""


@dataclass(slots=True)
class Command:
    """A command that runs one of transformers' scripts."""

    kind: str
    """clm, mlm …"""
    has_trainer: bool
    before: list[Word] = field(default_factory=list)
    """Assignments and the launcher: everything before the script's name."""
    after: list[Word] = field(default_factory=list)
    """The script's arguments."""
    others: list[int] = field(default_factory=list)
    """Lines of further commands in the same file."""


def read_command(text: str, place: str) -> Command:
    """The first command of a script that runs one of transformers' scripts. Raises InputError."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if SCRIPT.search(line) and not _is_comment(line)]
    if not starts:
        fix = "give the whole command: python run_clm.py --model_name_or_path gpt2 …"
        raise InputError.at(place, "names run_clm.py or run_mlm.py in comments only", fix)
    first, last = _extent(lines, starts[0])
    values = _variables("\n".join(lines[:first]))
    try:
        words = list(_words(lines[first : last + 1], first + 1, values))
    except ValueError as error:  # shlex: an open quotation
        raise InputError.at(f"{place}:{first + 1}", f"is no command: {error}", "check its quotes") from None
    at = next(number for number, word in enumerate(words) if SCRIPT.search(word.text))
    name = SCRIPT.search(words[at].text)
    assert name is not None
    arguments = words[at + 1 :]
    end = next((number for number, word in enumerate(arguments) if _ENDS.fullmatch(word.text)), len(arguments))
    others = [number + 1 for number in starts if not first <= number <= last]
    return Command(name[1], not name[2], words[:at], arguments[:end], others)


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _extent(lines: list[str], at: int) -> tuple[int, int]:
    """The first and last line of a command, whose lines but the last end with a backslash."""
    first = last = at
    while first > 0 and lines[first - 1].rstrip().endswith("\\"):
        first -= 1
    while last < len(lines) - 1 and lines[last].rstrip().endswith("\\"):
        last += 1
    return first, last


def _words(lines: list[str], number: int, values: dict[str, str]) -> Iterator[Word]:
    """The words of a command whose first line has this number. Raises ValueError."""
    joined = "\n".join(re.sub(r"\\\s*$", "", line) for line in lines)
    stream = StringIO(joined)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    line, counted = number, 0
    while (text := lexer.get_token()) is not None:
        end = max(counted, stream.tell() - 1)
        line, counted = line + joined.count("\n", counted, end), end
        replaced, unset = _replaced(text, values)
        is_assignment = re.match(r"(\w+)=(.*)", text)
        if is_assignment:
            values[is_assignment[1]] = replaced.partition("=")[2]
        word = replaced.strip()
        yield Word(word.rstrip(";") or word, line, unset)


def _variables(text: str) -> dict[str, str]:
    """The variables that lines before the command set."""
    values: dict[str, str] = {}
    for name, written in _ASSIGNMENT.findall(text):
        value, unset = _replaced(written.strip("\"'"), values)
        if not unset and "$(" not in value and "`" not in value:
            values[name] = value
    return values


def _replaced(text: str, values: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in values:
            return values[name]
        if match[3] is not None:
            return match[3]
        unset.append(name)
        return match[0]

    replaced = _VARIABLE.sub(value, text)
    if "$(" in replaced or "`" in replaced:
        unset.append("$(…)")
    return replaced, tuple(unset)
