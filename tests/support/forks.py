"""`artel` at the price of a fork: what the command imports is imported once for each process of tests.

multiprocessing's forkserver imports torch, transformers and artel's rooms and forks a process for each command. There
the module `artel` is run as `python -m artel` runs it. Importing takes four to eight seconds of a processor, more than
most commands in tests.

Variables that are read while modules are imported must be those of the tests: helpers.artel starts a process of its own
for whoever sets others.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["artel.cli.main", "artel.preparing", "artel.training.loop", "artel.inference.evaluate",
     "transformers.models.gpt2.modeling_gpt2"]
)  # fmt: skip


def run_forked(arguments: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m artel ARGUMENTS` in a fork and wait: what subprocess.run gives and raises, output as text."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = _FORKS.Process(target=_run, args=(arguments, str(Path.cwd()), environment, out, err))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, seconds, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _run(arguments: list[str], folder: str, environment: dict[str, str], out: Path, err: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_CREAT | os.O_WRONLY),
                                (2, err, os.O_CREAT | os.O_WRONLY)):  # fmt: skip
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["artel", *arguments]
    runpy.run_module("artel", run_name="__main__", alter_sys=True)
