"""A process that has imported torch and artel's rooms, and forks a command for each request on a Unix socket.

A request is a line of JSON with three descriptors beside it (standard input, output, error); the answers are two lines:
{"pid": …}, and when the command has ended {"status": …, "peak": …} with wait4's largest resident size of it and of what
it waited for, in bytes. What must begin as a process of its own (limits of address space, another environment for
Python itself) is executed from the fork.

    python -m hostile.starter SOCKET
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

_IMPORTED = (
    "artel.cli.main", "artel.preparing", "artel.training.loop", "artel.inference.evaluate", "artel.inference.open",
    "transformers.models.gpt2.modeling_gpt2", "transformers.tokenization_utils_tokenizers",
    "transformers.convert_slow_tokenizer",
)  # fmt: skip


def serve(path: str) -> None:
    """Answer requests until the socket's other side, this process's standard input, is closed."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1",
                   "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # no collection in a fork walks through what all of them share
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        readable, _, _ = select.select([0, listener, *running], [], [])
        for each in readable:
            if each == 0:
                return
            if each is listener:
                connection, _ = listener.accept()
                pid = _start(connection, listener)
                running[os.pidfd_open(pid)] = pid, connection
                connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
            else:
                pid, connection = running.pop(each)
                os.close(each)
                _, status, usage = os.wait4(pid, 0)
                result = {"status": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss * 1024}
                with suppress(OSError):
                    connection.sendall(json.dumps(result).encode() + b"\n")
                connection.close()


def _start(connection: socket.socket, listener: socket.socket) -> int:
    descriptors = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    pid = os.fork()
    if not pid:
        listener.close()
        connection.close()
        _become(json.loads(data), list(descriptors))
    for each in descriptors:
        os.close(each)
    return pid


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    os.setsid()
    os.chdir(request["folder"])
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    for name, value in request["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (value, value))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["command"]:
        os.execvpe(request["command"][0], request["command"], request["environment"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["artel", *request["arguments"]]
    os._exit(_status())


def _status() -> int:
    """Run the command as `python -m artel` does; without taking all modules apart at the end, which takes long."""
    status = 0
    try:
        runpy.run_module("artel", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return status


if __name__ == "__main__":
    serve(sys.argv[1])
