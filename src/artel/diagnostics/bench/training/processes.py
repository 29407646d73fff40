"""The processes of the contestants: all are started first, then one works at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from artel.diagnostics.bench.training import contestant

_LAST_WORDS = 5  # lines


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps of a contestant, measured from an idle device to an idle device."""

    seconds: float
    losses: list[float]
    """Of each of its steps."""
    peak_memory: int
    """Bytes, since the process began."""
    compile_seconds: float
    """Also since the process began."""


class Failed(Exception):
    """A contestant cannot continue; the reason, or the last lines of its process."""


@dataclass(slots=True)
class Contestant:
    """One of them: its process and its turns so far."""

    name: str
    function: str
    precision: str | None = None
    """What it computes in, where that is not the precision of `Work`."""
    process: subprocess.Popen[str] | None = None
    errors: Path | None = None
    first_step_seconds: float | None = None
    """From the start of its process to the end of its first step."""
    first_compile_seconds: float | None = None
    """Of these, the seconds in torch.compile."""
    losses: list[float] = field(default_factory=list)
    """Of all steps, counted or not."""
    turns: list[Turn] = field(default_factory=list)
    """Those that count."""
    peak_memory: int = 0
    """Bytes, up to the end of its newest turn."""
    why: str = ""
    """Why it was left out."""

    def start(self, folder: Path, environment: dict[str, str]) -> None:
        """Start its process and wait for the end of its first step. Raises Failed."""
        self.errors = folder / f"{len(list(folder.glob('*.errors')))}.errors"
        # -P: no module in the working folder takes the place of one that a library imports.
        command = [sys.executable, "-P", contestant.__file__, str(folder / "work.json"), self.function]
        started = time.monotonic()
        with self.errors.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        first = self._answer()
        self.first_step_seconds = time.monotonic() - started
        self.first_compile_seconds = first.compile_seconds

    def take_turn(self, steps: int, seconds: float) -> Turn:
        """`steps` steps, or fewer where `seconds` run out, at least one. Raises Failed."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"steps": steps, "seconds": seconds}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and there is no answer
        return self._answer()

    def _answer(self) -> Turn:
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.errors is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            words = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise Failed("\n".join(words[-_LAST_WORDS:]) or f"exit status {status}")
        answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        turn = Turn(**answer)
        self.losses += turn.losses
        self.peak_memory = turn.peak_memory
        return turn

    def is_slow(self, limit: float) -> bool:
        """True where a single step took longer than `limit` seconds; one measurement of it is enough."""
        return any(len(turn.losses) == 1 and turn.seconds > limit for turn in self.turns)

    def end(self) -> None:
        """Kill its process and all that it started."""
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def ending(contestants: list[Contestant]) -> Iterator[None]:
    """However the block ends, no contestant continues."""
    try:
        yield
    finally:
        for each in contestants:
            each.end()
