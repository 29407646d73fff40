"""The parent's side of a child process that scores completions."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

OUT_OF_MEMORY = "out of memory"

Result = tuple[float | None, str | None]
"""(score, None), or (None, reason) for a failure. (None, None) if the reward does not apply."""

_POLL_SECONDS = 0.5
"""Interval between checks that the process is alive. Its own children may keep the socket open when it ends."""
_END_SECONDS = 1.0
"""Time for a process to exit after it has closed its socket."""
_MAX_ANSWER_BYTES = 2**28


def time_reason(seconds: float) -> str:
    return f"took more than {seconds:g} s"


class ProcessLost(Exception):
    """The process has ended or does not answer. The message gives the reason."""


class ProcessTimeout(ProcessLost):
    """The process exceeded its time limit."""


class RewardProcess:
    """A child process in its own process group, so that its children can be killed with it."""

    def __init__(self) -> None:
        parent_socket, child_socket = socket.socketpair()
        command = [sys.executable, "-P", "-m", "artel.rewards.worker", str(child_socket.fileno())]
        with child_socket:
            self._process = subprocess.Popen(
                command, pass_fds=[child_socket.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        self._socket = parent_socket
        self._buffer = bytearray()
        self.requests = 0

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer. Raise ProcessLost if there is none within `seconds`."""
        message = json.dumps({**request, "id": self.requests}, default=str).encode() + b"\n"
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(message)
            answer = json.loads(self._read_line(deadline, seconds))
        except TimeoutError:
            raise ProcessTimeout(time_reason(seconds)) from None
        except OSError:
            raise ProcessLost(self._describe_end()) from None
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.get("id") != self.requests:
            raise ProcessLost("wrote to the socket that its process shares with artel")
        self.requests += 1
        return answer

    def _read_line(self, deadline: float, seconds: float) -> bytes:
        has_ended = False
        while b"\n" not in self._buffer[-65536:]:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or len(self._buffer) > _MAX_ANSWER_BYTES:
                raise TimeoutError
            self._socket.settimeout(min(remaining, _POLL_SECONDS))
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                if has_ended:
                    raise ConnectionResetError from None
                has_ended = self._has_ended()
                continue
            if not data:
                raise ConnectionResetError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)

    def kill(self) -> None:
        """Kill the process and everything in its process group."""
        self.signal()
        self._process.wait()
        self._socket.close()

    def signal(self) -> None:
        """Send SIGKILL to the process group. Another thread may be waiting in `ask`."""
        if self._process.returncode is None:  # after reaping, the PID may be reused
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _has_ended(self) -> bool:
        """True if the process has ended. It stays a zombie, so its process group ID is not reused."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _describe_end(self) -> str:
        deadline = time.monotonic() + _END_SECONDS
        while not self._has_ended():
            if time.monotonic() > deadline:
                return "closed the socket that its process shares with artel"
            time.sleep(0.01)
        self.kill()
        code = self._process.returncode
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
            return f"its process was ended by signal {-code} ({name})"
        return f"its process exited with status {code}"
