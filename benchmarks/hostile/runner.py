"""Runs a case and judges it: exit status, words, silence, memory, and the user's files."""

from __future__ import annotations

import array
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hostile.case import Case, Command, Outcome, Place, Skip, Wrong

POLL = 0.05
MEASURED = 0.4
"""Seconds between two looks at what processes hold."""
MOST = 5 << 30
"""Bytes at which the processes of a case are ended, for the sake of the machine."""
_TRACEBACK = re.compile(
    r"^Traceback \(most recent|panicked at|fault of artel|^Fatal Python error|core dumped|^  File \".*\", line \d+",
    re.M,
)
# Characters that a terminal obeys; a line break of another's making shows as a line that begins with FORGED.
_CONTROL = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f\x80-\x9f]|\r(?!\n)")
_FORGED = re.compile(r"^(artel: )?FORGED", re.M)


@dataclass
class Verdict:
    """What came of a case."""

    case: str
    family: str
    statuses: list[int] = field(default_factory=list)
    line: str = ""
    seconds: float = 0.0
    peak: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)
    """(kind, what): traceback, hang, lost, in silence, let in, memory, status, words."""
    skipped: str = ""
    commands: list[str] = field(default_factory=list)
    err: str = ""

    @property
    def text(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        kinds = Counter(kind for kind, _ in self.faults)
        return ", ".join(kinds) or "right"


class Runner:
    """Starts commands and watches them; also from several threads at once."""

    def __init__(self, *, patience: float, seconds: float, keep: bool = False) -> None:
        """`patience`: seconds without a line that are borne; `seconds`: those that a command has, if it names none.

        `keep`: the folders of cases that are not right stay.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="artel-hostile-"))
        self.shelf = self.folder / "shelf"
        self.shelf.mkdir()
        self._patience, self._seconds, self._keep = patience, seconds, keep
        self._number, self._lock, self._making = 0, threading.Lock(), threading.RLock()
        path = Path(__file__).parents[1]
        self._python = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
        }
        self._socket = str(self.folder / "starter")
        self._starter = subprocess.Popen(
            [sys.executable, "-m", "hostile.starter", self._socket],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._python,
        )  # fmt: skip
        assert self._starter.stdout is not None
        assert self._starter.stdout.readline() == b"ready\n"

    def close(self) -> None:
        assert self._starter.stdin is not None
        self._starter.stdin.close()
        self._starter.wait()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _have(self, name: str) -> None:
        """Make what is not on the shelf yet, once."""
        from hostile.made import make

        made = "trained" if name in ("model", "store") else name
        with self._making:
            if not (self.shelf / made).exists():
                make(self, made)

    def judge(self, case: Case) -> Verdict:
        """Run all steps of a case."""
        verdict = Verdict(case.name, case.family)
        with self._lock:
            self._number += 1
            root = self.folder / f"case-{self._number}"
        place = Place(root, self.shelf, self._have)
        began = time.monotonic()
        try:
            self._go_through(case, place, verdict)
        except Skip as skip:
            verdict.skipped = str(skip)
        except Wrong as wrong:
            verdict.faults.append(("in silence", str(wrong)))
        except Exception:
            verdict.faults.append(("in silence", f"the check ended with {traceback.format_exc(limit=-2)}"))
        finally:
            for end in reversed(place.ends):
                with suppress(Exception):
                    end()
        if place.trap.exists():
            verdict.faults.append(("let in", "code of the input was run"))
        verdict.seconds = time.monotonic() - began
        if not (self._keep and verdict.faults):
            shutil.rmtree(root, ignore_errors=True)
        return verdict

    def _go_through(self, case: Case, place: Place, verdict: Verdict) -> None:
        steps = case.steps(place)
        outcome: Outcome | None = None
        while True:
            try:
                command = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration:
                return
            place.look()
            command = command.having(seconds=command.seconds or self._seconds)
            outcome = self.run(command, place)
            verdict.statuses.append(outcome.status)
            verdict.peak = max(verdict.peak, outcome.peak)
            verdict.line = first_line(outcome.err, place)
            verdict.err = outcome.err
            verdict.commands.append(" ".join(command.arguments))
            faults = [*self._faults(command, outcome, place), *(("lost", each) for each in place.losses())]
            verdict.faults += faults
            if outcome.status not in command.right:  # what follows stands on this
                steps.close()
                return

    def _faults(self, command: Command, outcome: Outcome, place: Place) -> list[tuple[str, str]]:
        faults: list[tuple[str, str]] = []
        err, status = outcome.err, outcome.status
        if found := _TRACEBACK.search(err):
            faults.append(("traceback", f"{err[max(0, found.start() - 200) : found.start() + 200]}{_written(err)}"))
        if outcome.silence > self._patience or outcome.seconds > command.seconds:
            faults.append(("hang", f"{outcome.silence:.0f} s without a line, {outcome.seconds:.0f} s in all"))
        if status not in command.right and outcome.seconds <= command.seconds:
            right = " or ".join(map(str, sorted(command.right)))
            faults.append(("status", f"{status}, not {right}: {err[-300:]}"))
        if status in (1, 2) and not err.strip() and command.stdout is None and not command.unheard:
            faults.append(("words", f"status {status} without a word"))
        faults += [("words", f"not said: {each}") for each in command.says if each not in err]
        for name, text in (("standard error", err), ("standard output", outcome.out)):
            if bad := _CONTROL.search(text) or (text is err and _FORGED.search(text)):
                shown = text[max(0, bad.start() - 60) : bad.end() + 60]
                faults.append(("let in", f"{name} holds what a terminal obeys: {shown!r}"))
        if outcome.peak > command.memory:
            faults.append(("memory", f"{outcome.peak / 1e9:.1f} GB"))
        return faults

    def run(self, command: Command, place: Place) -> Outcome:
        """Run a command to its end, or end it with its whole session when its time is over."""
        out = place.root / "out" if command.stdout is None else Path(command.stdout)
        err = place.root / "err"
        request = {"folder": str(place.work), "arguments": command.arguments, "limits": dict(command.limits),
                   "environment": self._environment(command, place), "command": []}  # fmt: skip
        if command.fresh or command.prefix or command.limits:
            request["command"] = [*command.prefix, sys.executable, "-m", "artel", *command.arguments]
        stdin = os.devnull if command.stdin is None else place.root / "in"
        if command.stdin is not None:
            (place.root / "in").write_bytes(command.stdin)
        with out.open("wb") as to_out, err.open("wb") as to_err, socket.socket(socket.AF_UNIX) as starter:
            starter.connect(self._socket)
            read = os.open(stdin, os.O_RDONLY)
            descriptors = array.array("i", [read, to_out.fileno(), to_err.fileno()])
            starter.sendmsg([json.dumps(request).encode() + b"\n"],
                            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])  # fmt: skip
            os.close(read)
            watched = _Watched(starter, err, command)
            watched.wait()
        said = out.read_bytes().decode("utf-8", "replace") if out.is_file() else ""
        return Outcome(watched.status, said, err.read_bytes().decode("utf-8", "replace"), watched.seconds,
                       watched.silence, watched.peak)  # fmt: skip

    def _environment(self, command: Command, place: Place) -> dict[str, str]:
        variables: dict[str, str | None] = {
            **{name: value for name, value in self._python.items() if name != "COLUMNS"},
            "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", "ARTEL_CACHE": str(place.cache), "HOME": str(place.home),
            "OMP_NUM_THREADS": "1", "TMPDIR": str(place.root), "HF_HOME": str(place.root / "hub"),
            "no_proxy": "127.0.0.1",
            # Under a limit on files, Python 3.11 would leave its compiled files in the clone as short as that.
            "PYTHONDONTWRITEBYTECODE": "1",
            **command.environment,
        }  # fmt: skip
        return {name: value for name, value in variables.items() if value is not None}


class _Watched:
    """A command that runs: its end, its longest silence, its memory."""

    def __init__(self, starter: socket.socket, err: Path, command: Command) -> None:
        self._answers, self._err, self._command = starter.makefile("rb"), err, command
        self.pid: int = json.loads(self._answers.readline())["pid"]
        self.status, self.peak, self.seconds, self.silence = 0, 0, 0.0, 0.0
        self._ended = threading.Event()

    def wait(self) -> None:
        threading.Thread(target=self._read_end, daemon=True).start()
        began = spoke = time.monotonic()
        lines, size, measured, actions = 0, -1, began, list(self._command.actions)
        text = b""
        while not self._ended.wait(POLL):
            now = time.monotonic()
            if self._err.stat().st_size != size:
                text = self._err.read_bytes()
                size = len(text)
                if text.count(b"\n") > lines:
                    lines, spoke = text.count(b"\n"), now
            self.silence = max(self.silence, now - spoke)
            while actions and actions[0][0](text.decode("utf-8", "replace")):
                actions.pop(0)[1](self.pid)
                spoke = time.monotonic()  # an action may take a minute, in which a server has nothing to say
            if now - measured > MEASURED:
                measured, self.peak = now, max(self.peak, _resident(self.pid))
            if now - began > self._command.seconds or self.peak > MOST:
                self._kill()
        self.seconds = time.monotonic() - began
        self._kill()  # what it left running

    def _read_end(self) -> None:
        end = json.loads(self._answers.readline() or b'{"status": -9, "peak": 0}')
        self.status, self.peak = end["status"], max(self.peak, end["peak"])
        self._ended.set()

    def _kill(self) -> None:
        for pid in _session(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    pids = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                pids.append(pid)
    return pids


def _resident(leader: int) -> int:
    """Bytes of memory of a session's processes that are no file's; pages that forks share are counted once each."""
    total = 0
    for pid in _session(leader):
        with suppress(OSError, TypeError):  # a process that has ended has no such line
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    return total


def _written(err: str) -> str:
    """The end of the traceback that a fault of artel was written into."""
    file = re.search(r"the traceback: (\S+\.txt)", err)
    return f"\n{Path(file[1]).read_text()[-900:]}" if file and Path(file[1]).is_file() else ""


def first_line(err: str, place: Place) -> str:
    """The first line that is a message, else the last one; without the names of temporary folders."""
    lines = [line for line in err.splitlines() if line.strip()]
    chosen = next((line for line in lines if line.startswith(("artel: ", "Error: "))), lines[-1] if lines else "")
    return chosen.replace(str(place.work), ".").replace(str(place.root), "…")[:220]
