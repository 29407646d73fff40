"""Printed commands in a folder of their own, word for word as a shell takes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from printed.commands import PROGRAMS
from support.forks import run_forked
from support.runs import ENVIRONMENT

# Verbs that set variables before they import anything, or start what must not be a fork's child.
_OWN_PROCESS = ("doctor", "hardware")
_LIMIT = 500  # a command takes a few seconds, on a machine that is busy with others a hundred times as long


def words_of(command: str, folder: Path) -> tuple[list[str], str | None]:
    """What bash makes of a command: the words that reach the program, and the file that its output goes to."""
    command, _, behind = command.partition(" > ")
    output, _, more = behind.strip().partition(" ")  # what the test appends stands behind the file's name
    functions = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\"; }}; " for name in PROGRAMS)
    done = subprocess.run(
        ["bash", "-c", f"{functions}{command} {more}"], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1], output or None


def run(command: str, folder: Path, home: Path, typed: str, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it in `folder`, with `home` for HOME: caches and all defaults are those of a user who has set nothing.

    `typed` is what stands on standard input; `extra` are variables beside.
    """
    words, output = words_of(command, folder)
    if output is not None:
        (folder / output).unlink(missing_ok=True)
    variables = dict(re.findall(r"(?:^|\s)([A-Z_]+)=(\S+)(?=.*\sartel )", command))
    environment = {**ENVIRONMENT, "HOME": str(home), "OMP_NUM_THREADS": "1", **extra, **variables}
    for name in ("ARTEL_CACHE", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(folder)]))
    forks = words[0] == "artel" and words[1] not in _OWN_PROCESS
    if forks and not typed and not variables and "PYTHONPATH" not in extra:
        here = Path.cwd()
        os.chdir(folder)
        try:
            done = run_forked(words[1:], environment, _LIMIT)
        finally:
            os.chdir(here)
    else:
        done = subprocess.run(
            [*_program(words[0]), *words[1:]], cwd=folder, env=environment, input=typed or None, capture_output=True,
            text=True, timeout=_LIMIT, **({} if typed else {"stdin": subprocess.DEVNULL})
        )  # fmt: skip
    if output is not None and done.stdout:  # an empty file is none of what a step leaves
        (folder / output).write_text(done.stdout, encoding="utf-8")
    return done


def _program(name: str) -> list[str]:
    """How a program is found here: the environment of the tests need not be on PATH."""
    modules = {
        "artel": "artel",
        "torchrun": "torch.distributed.run",
        "deepspeed": "deepspeed.launcher.runner",
        "accelerate": "accelerate.commands.accelerate_cli",
    }
    beside = Path(sys.executable).with_name(name)
    if name in modules:
        return [sys.executable, "-m", modules[name]]
    return [str(beside) if beside.is_file() else name]
