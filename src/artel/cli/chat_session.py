"""A conversation in a terminal or from a script: messages, and commands that begin with a slash."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from artel.cli.common import print_error, print_status
from artel.cli.streams import write_to
from artel.elapsed import hide_elapsed
from artel.errors import ArtelError, InputError
from artel.interrupts import mark_interrupt_handled
from artel.printable import escape_lines

if TYPE_CHECKING:
    from artel.inference import ChatSession
    from artel.inference.chat import Exchange
    from artel.text import ToolCall
    from artel.text.tool_functions import ToolFunctions

_PROMPT = "> "
_HISTORY_LINES = 1000
_MAX_CALLS = 10
"""Maximum consecutive answers with calls per message."""
_CONTINUATION_PROMPT = "... "
_QUOTES = '"""'
_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/set NAME VALUE": "change a setting; without arguments, list all settings",
    "/save FILE": "save the conversation as a line of JSON",
    "/load FILE": "load a conversation saved by /save",
    "/retry": "answer the last message again",
    "/exit": "end the chat, like Ctrl-D; Ctrl-C stops an answer",
    "/help": "list the commands",
}
_CONTINUATION_HELP = 'a message continues on the next line after a final \\, or if it is between """ and """'


class Screen:
    """Shows a conversation: streamed answers, and notices on separate lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_in_line = False

    def write(self, text: str) -> None:
        self._is_in_line = True
        write_to(self._out, escape_lines(text))

    def end_line(self) -> None:
        if self._is_in_line:
            write_to(self._out, "\n")
        self._is_in_line = False

    def print_status(self, text: str) -> None:
        """Print a notice on standard error."""
        self.end_line()
        print_status(text)


class Session:
    """A conversation whose lines are messages and commands."""

    def __init__(self, conversation: ChatSession, screen: Screen, functions: ToolFunctions | None = None) -> None:
        """`functions`: functions that the model may call. If they cannot run, the user types their results."""
        self.conversation = conversation
        self._screen = screen
        self._functions = functions
        self._ask_result: Callable[[str], str] = lambda name: _ask(f"{name} returned: ")
        self.exchanges: list[Exchange] = []
        """All answers in order, including forgotten and replaced ones."""

    def run_terminal(self) -> int:
        """Chat until Ctrl-D or /exit. Print errors and continue. Return exit status 0."""
        print_status("/help lists the commands, Tab completes them, Ctrl-D ends the chat")
        names = [usage.split()[0] for usage in _COMMANDS]
        with line_editor(names, list(asdict(self.conversation.settings))):
            return self._run_loop()

    def _run_loop(self) -> int:
        while True:
            try:
                if not self._process_entry(_read_entry(_ask(_PROMPT), lambda: _ask(_CONTINUATION_PROMPT))):
                    return 0
            except EOFError:
                print_status("")
                return 0
            except ArtelError as error:
                print_error(error)
            except KeyboardInterrupt:
                mark_interrupt_handled()
                print_status("", "(stopped; Ctrl-D ends)")

    def run_script(self, lines: Iterable[str], name: str) -> int:
        """Process all lines, and show each with its answer. Return the exit status of the first error, or 0."""
        status = 0
        source = "standard input" if name == "-" else name
        numbered_lines = enumerate(lines, 1)

        def next_line() -> str:
            for _, line in numbered_lines:
                return _check_utf8(line)
            raise InputError.at("", "ends within a message", f"end it with {_QUOTES}, or remove the final \\")

        def next_result(name: str) -> str:
            for _, line in numbered_lines:
                if line.strip():
                    return _check_utf8(line)
            raise InputError.at("", f"ends before {name} has a result", "write the result on the next line")

        self._ask_result = next_result
        for line_number, line in numbered_lines:
            if not line.strip():
                continue
            try:
                entry = _read_entry(_check_utf8(line), next_line)
                self._screen.write(f"{_PROMPT}{entry.text}")
                self._screen.end_line()
                if not self._process_entry(entry):
                    break
            except ArtelError as error:
                print_error(error, f"{source}:{line_number}: ")
                status = status or error.exit_code
        return status

    def _process_entry(self, entry: _Entry) -> bool:
        """Answer a message or run a command. Return False if it ends the conversation."""
        if not entry.text:
            return True
        if not entry.is_command:
            self._show_answer(self.conversation.answer(entry.text))
            self._answer_calls()
            return True
        command, _, argument = entry.text.partition(" ")
        return self._run_command(command, argument.strip())

    def _run_command(self, command: str, argument: str) -> bool:
        if command == "/exit" and not argument:
            return False
        if command == "/reset" and not argument:
            self.conversation.reset()
            print_status("conversation forgotten")
        elif command == "/system":
            self.conversation.system = argument
            print_status("system message set" if argument else "system message removed")
        elif command == "/set" and not argument:
            print_status(*(f"{name} = {value}" for name, value in asdict(self.conversation.settings).items()))
        elif command == "/set" and len(argument.split()) == 2:
            name, value = argument.split()
            self.conversation.set(name, value)
            print_status(f"{name} = {asdict(self.conversation.settings)[name]}")
        elif command == "/save" and argument:
            self.conversation.save(argument)
            print_status(f"saved: {argument}")
        elif command == "/load" and argument:
            self.conversation.load(argument)
            print_status(f"loaded: {len(self.conversation.exchanges):,} messages with their answers")
        elif command == "/retry" and not argument:
            self._show_answer(self.conversation.retry())
            self._answer_calls()
        elif command == "/help" and not argument:
            print_status(*(f"{usage:<17} {purpose}" for usage, purpose in _COMMANDS.items()), _CONTINUATION_HELP)
        else:
            raise _command_error(command)
        return True

    def _answer_calls(self) -> None:
        """Pass the results of calls to the model, until it answers without a call."""
        try:
            for _ in range(_MAX_CALLS):
                if not self.conversation.open_calls:
                    return
                self._show_answer(
                    self.conversation.answer_results([self._run_call(call) for call in self.conversation.open_calls])
                )
            if self.conversation.open_calls:
                print_status(f"stopped: the model has answered with calls {_MAX_CALLS} times in a row")
        finally:  # even if a result is missing
            self.conversation.drop_calls()

    def _run_call(self, call: ToolCall) -> str:
        self._screen.write(f"→ {call.name}({json.dumps(call.arguments, ensure_ascii=False)})")
        self._screen.end_line()
        if self._functions is not None and self._functions.can_run:
            result = self._functions.run(call)
        else:
            result = self._ask_result(call.name)
        self._screen.write(f"← {result}")
        self._screen.end_line()
        return result

    def _show_answer(self, chunks: Iterator[str]) -> None:
        """Stream an answer. If it is stopped, end its line and keep it."""
        self.exchanges.append(self.conversation.exchanges[-1])
        try:
            self._screen.write("")  # an empty answer gets a line too
            for chunk in chunks:
                self._screen.write(chunk)
        finally:
            self._screen.end_line()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A message or a command of one or more lines."""

    text: str
    is_command: bool = False


def _read_entry(line: str, next_line: Callable[[], str]) -> _Entry:
    """Read an entry from its first line. It continues after a final backslash, or up to closing triple quotes."""
    quoted = line.lstrip()
    if quoted.startswith(_QUOTES):
        text = quoted.removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + next_line()
        return _Entry(text.rstrip().removesuffix(_QUOTES).strip())
    text = line
    while text.endswith("\\"):
        text = text[:-1] + "\n" + next_line()
    return _Entry(text.strip(), text.startswith("/"))


def _ask(prompt: str) -> str:
    """Read a line from the terminal. Raise EOFError at Ctrl-D."""
    if sys.stdout.isatty():
        with hide_elapsed():
            return _check_utf8(input(prompt))
    print(prompt, end="", file=sys.stderr, flush=True)  # no prompt into a file
    with hide_elapsed():
        return _check_utf8(input())


def _check_utf8(line: str) -> str:
    """Return the line. Raise InputError if it is not UTF-8."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        message = f"character {error.start + 1} of the line is not UTF-8"
        raise InputError.at("", message, "write it in UTF-8") from None
    return line


def _command_error(command: str) -> InputError:
    """Return the error for an unknown command, with the list of commands, or for a wrong argument."""
    usage = next((usage for usage in _COMMANDS if usage.split()[0] == command), None)
    if usage is not None:
        return InputError.at(command, "wrong arguments", f"write {usage}")
    fix = f"commands are: {', '.join(_COMMANDS)}; a message that begins with / needs a space before it"
    return InputError.at(command, "unknown command", fix)


@contextmanager
def line_editor(commands: Sequence[str], settings: Sequence[str]) -> Iterator[None]:
    """Edit lines of `input` with completion inside the block, if Python has readline. Keep a history for the user."""
    try:
        import readline
    except ImportError:
        yield
        return
    from artel.storage import state_folder

    folder = state_folder()
    history = None if folder is None else folder / "chat_history"
    if history is not None:
        with suppress(OSError):
            readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    readline.set_completer_delims(" ")
    readline.set_completer(_make_completer(readline, commands, settings))
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    try:
        yield
    finally:
        if history is not None:
            with suppress(OSError):  # the home folder may be read-only
                history.parent.mkdir(parents=True, exist_ok=True)
                history.touch(0o600)  # private
                readline.write_history_file(history)


def _make_completer(
    readline: ModuleType, commands: Sequence[str], settings: Sequence[str]
) -> Callable[[str, int], str | None]:
    def complete(word: str, index: int) -> str | None:
        """Return the completion with this index for the word before the cursor."""
        text_before = readline.get_line_buffer()[: readline.get_begidx()]
        candidates = completions(text_before, word, commands, settings)
        return candidates[index] if index < len(candidates) else None

    return complete


def completions(text_before: str, word: str, commands: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Return the completions of a word, given the text before it in the line."""
    words = text_before.split()
    if not words:
        return [f"{command} " for command in commands if command.startswith(word)] if word.startswith("/") else []
    if words == ["/set"]:
        return [f"{name} " for name in settings if name.startswith(word)]
    if words[0] in ("/save", "/load"):
        return _match_files(text_before.lstrip().partition(" ")[2].lstrip(), word)
    return []


def _match_files(text_before: str, word: str) -> list[str]:
    """Return matching files and folders. In a name with spaces, `text_before` has all words but the last."""
    folder, name = os.path.split(text_before + word)
    # Only the last word is replaced. Keep its folders, and omit the name's earlier words.
    folders, skipped_chars = (word[: word.rindex("/") + 1], 0) if "/" in word else ("", len(name) - len(word))
    with suppress(OSError, RuntimeError):  # no such folder or home folder
        entries = sorted(Path(folder or ".").expanduser().iterdir())
        matches = [entry for entry in entries if entry.name.startswith(name) and (name or entry.name[0] != ".")]
        return [folders + entry.name[skipped_chars:] + ("/" if entry.is_dir() else "") for entry in matches]
    return []
