"""`artel` at the price of a fork: what the command imports is imported once for each process of tests.

    python tests/forks.py NUMBER

imports torch, transformers and artel's rooms, and forks a process for each request on the socket of that number:
arguments, folder, environment, and three standard files. There the module `artel` is run as `python -m artel` runs it.
Importing takes four to eight seconds of a processor, more than most commands in tests.

Variables that are read while modules are imported must be those of this process: helpers.artel starts a process of its
own for whoever sets others.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import IO

_IMPORTED = ("artel.cli.main", "artel.preparing", "artel.training.loop", "artel.using.evaluate",
             "transformers.models.gpt2.modeling_gpt2")  # fmt: skip
_MESSAGE = 1 << 20

_line: socket.socket | None = None
"""To the process that forks; it ends when this end is closed, and so with this process."""


def run_forked(arguments: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m artel ARGUMENTS` in a fork and wait: what subprocess.run gives and raises, output as text.

    `environment` is that of the first call's imports. One command at a time.
    """
    global _line
    if _line is None:
        _line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, start_new_session=True)
    with Path(os.devnull).open() as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        message = json.dumps([arguments, str(Path.cwd()), environment]).encode()
        socket.send_fds(_line, [message], [file.fileno() for file in (nothing, out, err)])
        _line.settimeout(None)
        process = int(_line.recv(_MESSAGE))
        _line.settimeout(seconds)
        try:
            status = int(_line.recv(_MESSAGE))
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            _line.settimeout(None)
            _line.recv(_MESSAGE)  # it has been waited for
            raise subprocess.TimeoutExpired(arguments, seconds, _read(out), _read(err)) from None
        return subprocess.CompletedProcess(arguments, status, _read(out), _read(err))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n").replace("\r", "\n")  # as subprocess reads text


def _forked(line: socket.socket) -> list[str] | None:
    """Forks for each request, until the tests have ended: None. In a fork: the arguments of its command."""
    while True:
        message, files, _, _ = socket.recv_fds(line, _MESSAGE, 3)
        if not message:
            return None
        child = os.fork()
        if child == 0:
            line.close()
            arguments, folder, environment = json.loads(message)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return list(arguments)
        for file in files:
            os.close(file)
        line.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run() -> int:
    """The exit status of the module `artel`."""
    try:
        runpy.run_module("artel", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    asked = _forked(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        sys.argv = [sys.argv[0], *asked]
        sys.path[0] = str(Path.cwd())
        status = _run()
        # As the interpreter ends, but for its last step, the freeing of every module: it would touch, and so copy, each
        # page that is shared with the process that forks.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
