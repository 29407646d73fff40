"""`artel serve` under bodies that double in size: /health answers within half a second throughout."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from hostile.case import Place, Steps, case, check, ends

SECONDS = 60.0
LATENCY = 0.5
_BODIES: dict[str, Any] = {
    "/v1/chat/completions": [
        lambda size: {"messages": [{"role": "user", "content": 1}] * (size // 32)},
        lambda size: {"messages": [{"role": "user", "content": "<" * size}]},
        lambda size: {f"key{number}": 1 for number in range(size // 12)},
        lambda size: {"messages": [[]] * (size // 4)},
    ],
    "/v1/completions": [lambda size: {"prompt": [-1] * (size // 4)}, lambda size: {"prompt": "word " * (size // 5)}],
}


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> float:
    """Seconds to the end of an answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    connection.getresponse().read()
    connection.close()
    return time.monotonic() - began


@case("network", quick=False)
def bodies_that_double_in_size(place: Place) -> Steps:
    """And half a head a second beside them; SIGTERM ends the server in the midst of it."""
    place.take("model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    waits: list[float] = []

    def attack(pid: int) -> None:
        until = time.monotonic() + SECONDS
        half = []

        def send() -> None:
            size = 1024
            while time.monotonic() < until:
                for path, makers in _BODIES.items():
                    for make in makers:
                        with suppress(OSError, http.client.HTTPException):
                            _ask(port, "POST", path, json.dumps(make(size)).encode()[: 2 << 20])
                size = min(2 * size, 2 << 20)

        threading.Thread(target=send, daemon=True).start()
        while time.monotonic() < until:
            half.append(socket.create_connection(("127.0.0.1", port)))
            half[-1].sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            waits.append(_ask(port, "GET", "/health"))
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)

    listens = (lambda err: re.search(r"is served at http", err) is not None, attack)
    yield ends({0, -15}, "serve", "model", "--port", port, actions=(listens,), fresh=True, seconds=SECONDS + 90)
    check(len(waits) > 20, f"/health answered {len(waits)} times")
    check(max(waits) <= LATENCY, f"/health took up to {max(waits):.2f} s, {len(waits)} answers")
