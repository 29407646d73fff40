"""The processes of the contestants: all there from the start, one at work at a time."""

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
    """What a contestant did and took, from a device at rest to a device at rest."""

    seconds: float
    losses: list[float]
    """Of each of its steps."""
    peak_memory: int
    """Bytes, since the process began."""
    compile_seconds: float
    """Likewise."""


class Failed(Exception):
    """A contestant cannot go on; why, in its own words or the last of its process."""


@dataclass(slots=True)
class Contestant:
    """One of them: its process, and what it has done so far."""

    name: str
    function: str
    process: subprocess.Popen[str] | None = None
    errors: Path | None = None
    first_step_seconds: float | None = None
    """From the start of its process to the end of its first step."""
    first_compile_seconds: float | None = None
    """Of these, what torch.compile took."""
    losses: list[float] = field(default_factory=list)
    """Of all steps, counted or not."""
    turns: list[Turn] = field(default_factory=list)
    """Those that count."""
    peak_memory: int = 0
    """Bytes, up to the end of its newest turn."""
    why: str = ""
    """Why it takes part no more."""

    def start(self, folder: Path, environment: dict[str, str]) -> None:
        """Start its process and wait for the end of its first step. Raises Failed."""
        self.errors = folder / f"{len(list(folder.glob('*.errors')))}.errors"
        # -P: no module that lies where the user stands takes the place of one that a library imports.
        command = [sys.executable, "-P", contestant.__file__, str(folder / "work.json"), self.function]
        started = time.monotonic()
        with self.errors.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, encoding="utf-8", start_new_session=True,
            )  # fmt: skip
        first = self._answer()
        self.first_step_seconds = time.monotonic() - started
        self.first_compile_seconds = first.compile_seconds

    def take_turn(self, steps: int, seconds: float) -> Turn:
        """So many steps, or fewer where `seconds` run out, but one at least. Raises Failed."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"steps": steps, "seconds": seconds}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and has no answer
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
        """Whether a single step has taken longer than `limit` seconds; then it need not be measured again."""
        return any(len(turn.losses) == 1 and turn.seconds > limit for turn in self.turns)

    def end(self) -> None:
        """Its process and all that it started are gone afterwards."""
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def ending(contestants: list[Contestant]) -> Iterator[None]:
    """However the block is left, none of them goes on."""
    try:
        yield
    finally:
        for each in contestants:
            each.end()
