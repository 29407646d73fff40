"""`artel chat`: talk to a model in the terminal, or run a script of messages and commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from artel.cli.common import AsJson, print_json, quiet_libraries, tell, tell_error
from artel.cli.streams import write_out
from artel.errors import ArtelError, InputError
from artel.printable import in_lines
from artel.storage import check_regular

if TYPE_CHECKING:
    from artel.inference import Talk
    from artel.inference.chat import Exchange

_PROMPT = "> "
_COMMANDS = {
    "/reset": "forget what was said",
    "/system TEXT": "give the model a system message, or none",
    "/set NAME VALUE": "change a setting; alone, show them all",
    "/save FILE": "write the conversation as a line of JSON",
    "/retry": "another answer to the last message",
    "/exit": "end, as Ctrl-D does; Ctrl-C stops an answer",
    "/help": "show this list",
}


def chat(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A run's folder, a model folder or a hub id.")],
    system: Annotated[str, typer.Option(help="The system message: who the model is to be.")] = "",
    script: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take messages and commands from a file's lines; - for stdin.")
    ] = None,
    history: Annotated[int, typer.Option(help="Earlier exchanges that a message is answered with.")] = 10,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 200,
    repetition_penalty: Annotated[float, typer.Option(help="Over 1 avoids tokens already there.")] = 1.2,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.5,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that sum to p.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest; 0 for all.")] = 40,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal conversations.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Talk to a model: its answers are streamed, Ctrl-C stops one, Ctrl-D ends. /help lists the commands.

    With --json the text goes to standard error, and the whole conversation to standard output at the end.

    Example: artel chat runs/assistant --system "You answer briefly."
    """
    tell("loading the model")
    quiet_libraries()
    from artel.inference import Talk, TalkSettings, open_model

    try:
        system.encode()
    except UnicodeEncodeError:
        raise InputError.at("--system", "is not UTF-8", "write it in UTF-8") from None
    settings = TalkSettings(history, new_tokens, repetition_penalty, temperature, top_p, top_k, seed)
    if script is None and not sys.stdin.isatty():
        script = "-"
    lines = None if script is None else _lines(script)
    screen = _Screen(sys.stderr if as_json else sys.stdout)
    session = _Session(Talk(open_model(name), settings, system, screen.tell), screen)
    status = session.run_terminal() if lines is None else session.run_script(lines, script or "")
    if as_json:
        print_json(
            {
                "model": name,
                "answers": [asdict(exchange) for exchange in session.written],
                "messages": session.talk.messages,
                "settings": asdict(session.talk.settings),
            }
        )
    if status:
        raise typer.Exit(status)


def _lines(script: str) -> Iterable[str]:
    """The lines of a file at once, or of standard input as they come."""
    if script == "-":
        return (line.removesuffix("\n") for line in sys.stdin)
    check_regular(Path(script))
    try:
        return Path(script).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        what = f"{script} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        what = f"{script} is not UTF-8 (byte {error.start})"
    raise InputError.at("--script", what, "give a text file with a message or a command on each line")


class _Screen:
    """Where a conversation is shown: answers piece by piece, and notices on lines of their own."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_in_line = False

    def write(self, piece: str) -> None:
        self._is_in_line = True
        write_out(in_lines(piece), self._out)

    def end_line(self) -> None:
        if self._is_in_line:
            write_out("\n", self._out)
        self._is_in_line = False

    def tell(self, text: str) -> None:
        """A notice, on standard error."""
        self.end_line()
        tell(text)


class _Session:
    """A conversation led by lines: messages, and commands that begin with a slash."""

    def __init__(self, talk: Talk, screen: _Screen) -> None:
        self.talk = talk
        self._screen = screen
        self.written: list[Exchange] = []
        """All answers in their order, also those that were forgotten or replaced since."""

    def run_terminal(self) -> int:
        """Until Ctrl-D or /exit; a mistake is told and the conversation goes on. Exit status 0."""
        with suppress(ImportError):  # editing and history of the line, where Python was built with them
            import readline  # noqa: F401
        tell("/help lists the commands, Ctrl-D ends")
        while True:
            try:
                if not self._take(_ask()):
                    return 0
            except EOFError:
                tell("")
                return 0
            except ArtelError as error:
                tell_error(error)
            except KeyboardInterrupt:
                tell("", "(stopped; Ctrl-D ends)")

    def run_script(self, lines: Iterable[str], name: str) -> int:
        """All lines, each shown before what comes of it. Exit status: that of the first mistake, else 0."""
        status = 0
        place = "standard input" if name == "-" else name
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                self._screen.write(f"{_PROMPT}{_checked(line).strip()}")
                self._screen.end_line()
                if not self._take(line):
                    break
            except ArtelError as error:
                tell_error(error, f"{place}:{number}: ")
                status = status or error.exit_code
        return status

    def _take(self, line: str) -> bool:
        """Answer a message or do a command. False when it ends the conversation."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._show(self.talk.answer(line.strip()))
            return True
        command, _, rest = line.strip().partition(" ")
        return self._do(command, rest.strip())

    def _do(self, command: str, rest: str) -> bool:
        if command == "/exit" and not rest:
            return False
        if command == "/reset" and not rest:
            self.talk.reset()
            tell("forgotten")
        elif command == "/system":
            self.talk.system = rest
            tell("the system message is set" if rest else "no system message")
        elif command == "/set" and not rest:
            tell(*(f"{name} = {value}" for name, value in asdict(self.talk.settings).items()))
        elif command == "/set" and len(rest.split()) == 2:
            name, value = rest.split()
            self.talk.set(name, value)
            tell(f"{name} = {asdict(self.talk.settings)[name]}")
        elif command == "/save" and rest:
            self.talk.save(rest)
            tell(f"saved: {rest}")
        elif command == "/retry" and not rest:
            self._show(self.talk.retry())
        elif command == "/help" and not rest:
            tell(*_help())
        else:
            raise _misunderstood(command)
        return True

    def _show(self, pieces: Iterator[str]) -> None:
        """Stream an answer. Also when it is stopped, it ends its line and is kept."""
        self.written.append(self.talk.exchanges[-1])
        try:
            self._screen.write("")  # an answer of no words is a line, too
            for piece in pieces:
                self._screen.write(piece)
        finally:
            self._screen.end_line()


def _ask() -> str:
    """A line of the person at the terminal. Raises EOFError at Ctrl-D."""
    if sys.stdout.isatty():
        return _checked(input(_PROMPT))
    print(_PROMPT, end="", file=sys.stderr, flush=True)  # standard output is a file: the prompt is not for it
    return _checked(input())


def _checked(line: str) -> str:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start + 1} of the line is not UTF-8"
        raise InputError.at("", what, "write it in UTF-8") from None
    return line


def _help() -> list[str]:
    return [f"{usage:<17} {what}" for usage, what in _COMMANDS.items()]


def _misunderstood(command: str) -> InputError:
    """A command that there is not, with the list of those there are, or one that was given too much or too little."""
    usage = next((usage for usage in _COMMANDS if usage.split()[0] == command), None)
    if usage is not None:
        return InputError.at(command, "it is written otherwise", usage)
    fix = f"commands are: {', '.join(_COMMANDS)}; a message that begins with / needs a space before it"
    return InputError.at(command, "there is no such command", fix)
