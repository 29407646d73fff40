"""`artel chat` at a terminal: keys that stop an answer and end it, and the prompt."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from support.chat_models import ONE_THREAD
from support.runs import ENVIRONMENT
from support.waiting import LIMIT, Screen

# The child makes the pseudo-terminal the one that it is controlled by, so that Ctrl-C typed into it is a signal.
_IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "artel", *sys.argv[1:]])
"""


class Terminal:
    """`artel` at a pseudo-terminal: what is typed, and what is seen."""

    def __init__(self, *arguments: str, stdout=None, state: str = "state") -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x28\x00\xa0\x00\x00\x00\x00\x00")  # 40 lines of 160 columns
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, *map(str, arguments)],
            stdin=slave,
            stdout=stdout or slave,
            stderr=slave,
            start_new_session=True,
            env={**ENVIRONMENT, **ONE_THREAD, "TERM": "dumb", "XDG_STATE_HOME": state},
        )
        os.close(slave)
        self._screen = Screen(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str, silence: float = LIMIT) -> None:
        """Read on until `text` is seen; what comes after it is left to the next call."""
        self._screen.read_until(lambda seen: text in seen, silence)
        self._screen.text = self._screen.text.partition(text)[2]

    def until_more(self, characters: int) -> None:
        self._screen.read_until(lambda seen: len(seen) >= characters)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal():
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, **more) -> Terminal:
        opened.append(Terminal(*arguments, **more))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


@pytest.mark.ci
@pytest.mark.processes
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(endless, tmp_path, terminal):
    file = tmp_path / "talk.jsonl"
    seen = terminal("chat", endless, "--new-tokens", "500000", "--temperature", "0")
    seen.until("> ")
    seen.type("/set new_tokens 4\n")
    seen.until("new_tokens = 4")
    seen.type("Say a word.\n")
    seen.until("\r\ncut off after 4 tokens")  # a notice begins a line, also right behind an answer
    seen.type("/retry\n")
    seen.until("\r\ncut off after 4 tokens")
    seen.type("/reset\n/set new_tokens 500000\n")
    seen.until("new_tokens = 500000")
    for stop in ("typed", "sent"):
        seen.type(f"Message {stop}\n")
        seen.until(f"Message {stop}\r\n")
        seen.until_more(50)
        if stop == "typed":
            seen.type("\x03")
        else:
            seen.process.send_signal(signal.SIGINT)
        seen.until("(stopped; Ctrl-D ends)")
        seen.until("> ")
    # At the prompt there is nothing to stop, and the program stays. readline may miss a signal between showing the
    # prompt and waiting for the line; people press again.
    while True:
        seen.type("\x03")
        with suppress(AssertionError):
            seen.until("(stopped; Ctrl-D ends)", silence=5)
            break
    seen.until("> ")
    seen.type(f"/save {file}\n")
    seen.until("saved: ")
    seen.until("> ")
    seen.type("/nonsense\n")
    seen.until("commands are:")
    seen.until("> ")
    seen.type("\x04")
    assert seen.process.wait(timeout=LIMIT) == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == ["Message typed", "Message sent"]
    assert all(len(message["content"]) > 10 for message in messages[1::2])


@pytest.mark.processes
def test_the_prompt_is_not_written_into_a_file(with_marks, tmp_path, terminal):
    with (tmp_path / "out.txt").open("wb") as out:
        seen = terminal("chat", with_marks, "--temperature", "0", "--repetition-penalty", "1", stdout=out)
        seen.until("> ")
        seen.type("Who are you?\n")
        seen.until("> ")
        seen.type("/exit\n")
        assert seen.process.wait(timeout=LIMIT) == 0
    assert (tmp_path / "out.txt").read_text() == "I am a tiny model.\n"


@pytest.mark.processes
def test_tab_completes_lines_go_on_and_what_was_typed_is_there_the_next_time(with_marks, tmp_path, terminal):
    options = ("chat", with_marks, "--temperature", "0", "--repetition-penalty", "1")
    seen = terminal(*options, state=str(tmp_path))
    seen.until("> ")
    seen.type("/se\ttemp\t0.0\n")
    seen.until("temperature = 0.0")
    seen.until("> ")
    seen.type("Who \\\n")
    seen.until("... ")
    seen.type("are you?\n")
    seen.until("> ")
    seen.type('"""/reset is no command\n')
    seen.until("... ")
    seen.type('here"""\n')
    seen.until("> ")
    seen.type("/sa\ttalk.jsonl\n")
    seen.until("saved: talk.jsonl")
    seen.until("> ")
    seen.type("/exit\n")
    assert seen.process.wait(timeout=LIMIT) == 0
    saved = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert [message["content"] for message in saved[::2]] == ["Who \nare you?", "/reset is no command\nhere"]

    history = tmp_path / "artel" / "chat_history"
    assert history.read_text().splitlines()[-1] == "/exit"
    assert history.stat().st_mode & 0o077 == 0
    seen = terminal(*options, state=str(tmp_path))
    seen.until("> ")
    seen.type("/lo\ttal\t\n")
    seen.until("loaded: 2 messages")
    seen.until("> ")
    seen.type("\x10\x10\n")  # the line before the last one: /exit of the first conversation
    assert seen.process.wait(timeout=LIMIT) == 0
