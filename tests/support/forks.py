"""`artel` at the price of a fork: what the command imports is imported once for each process of tests.

multiprocessing's forkserver imports torch, transformers and artel's rooms and forks a process for each command. There
the module `artel` is run as `python -m artel` runs it. Importing takes four to eight seconds of a processor, more than
most commands in tests.

Variables that are read while modules are imported must be those of the tests: runs.artel starts a process of its own
for whoever sets others.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["artel.cli.main", "artel.preparing", "artel.training.loop", "artel.inference.evaluate",
     "transformers.models.gpt2.modeling_gpt2"]
)  # fmt: skip


def run_forked(
    arguments: list[str], environment: dict[str, str], seconds: float, cwd: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `python -m artel ARGUMENTS` in a fork and wait: what subprocess.run gives and raises, output as text."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        streams[0].write_text(input, errors="surrogateescape")
        _, out, err = streams
        process = _FORKS.Process(target=_run, args=(arguments, str(cwd or Path.cwd()), environment, streams))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, seconds, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def call_forked(function: Callable[[], Any], **environment: str) -> Any:
    """What `function` of a module returns in a fork with one thread, where these variables are set."""
    results = _FORKS.SimpleQueue()
    process = _FORKS.Process(target=_call, args=(function, environment, results))
    process.start()
    value = results.get() if wait([process.sentinel, results._reader]) and results._reader.poll() else None
    process.join()
    assert process.exitcode == 0, f"{function.__name__} ended with status {process.exitcode}"
    return value


def _call(function: Callable[[], Any], environment: dict[str, str], results: Any) -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(environment)
    results.put(function())


def _run(arguments: list[str], folder: str, environment: dict[str, str], streams: list[Path]) -> None:
    gc.freeze()  # what was imported is not looked through, and its memory stays shared
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams):
        file = os.open(path, os.O_CREAT | os.O_WRONLY if number else os.O_RDONLY, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.argv = ["artel", *arguments]
    runpy.run_module("artel", run_name="__main__", alter_sys=True)
