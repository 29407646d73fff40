"""The line editor of a conversation: completion by Tab, and a history that lasts, where Python has readline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

_LINES = 1000
"""Of the history."""


@contextmanager
def line_editor(commands: Sequence[str], settings: Sequence[str]) -> Iterator[None]:
    """Within the block `input` edits lines. What was typed is kept in the user's state folder for the next time."""
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
    readline.set_history_length(_LINES)
    readline.set_completer_delims(" ")
    readline.set_completer(_completer(readline, commands, settings))
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    try:
        yield
    finally:
        if history is not None:
            with suppress(OSError):  # a home that cannot be written keeps no history
                history.parent.mkdir(parents=True, exist_ok=True)
                history.touch(0o600)  # what people say is theirs
                readline.write_history_file(history)


def _completer(
    readline: ModuleType, commands: Sequence[str], settings: Sequence[str]
) -> Callable[[str, int], str | None]:
    def complete(word: str, number: int) -> str | None:
        """What `word`, the one before the cursor, may be completed to: the possibility of this number."""
        before = readline.get_line_buffer()[: readline.get_begidx()]
        found = completions(before, word, commands, settings)
        return found[number] if number < len(found) else None

    return complete


def completions(before: str, word: str, commands: Sequence[str], settings: Sequence[str]) -> list[str]:
    """What a word may be completed to, behind what stands before it in the line."""
    words = before.split()
    if not words:
        return [f"{command} " for command in commands if command.startswith(word)] if word.startswith("/") else []
    if words == ["/set"]:
        return [f"{name} " for name in settings if name.startswith(word)]
    if words[0] in ("/save", "/load"):
        return _files(before.lstrip().partition(" ")[2].lstrip(), word)
    return []


def _files(before: str, word: str) -> list[str]:
    """Files and folders whose names begin so. Of a name with spaces, `before` has the words before the last."""
    folder, name = os.path.split(before + word)
    # Only the last word is replaced: the folders in it stay, and words of the name before it stand already.
    folders, words = (word[: word.rindex("/") + 1], 0) if "/" in word else ("", len(name) - len(word))
    with suppress(OSError, RuntimeError):  # no such folder, no such home
        entries = sorted(Path(folder or ".").expanduser().iterdir())
        found = [entry for entry in entries if entry.name.startswith(name) and (name or entry.name[0] != ".")]
        return [folders + entry.name[words:] + ("/" if entry.is_dir() else "") for entry in found]
    return []
