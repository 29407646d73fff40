"""`artel serve` under large and half requests, schemas that nothing satisfies and weights that are written over."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hostile.case import Family, Place, Steps, check, ends, fails

family = Family("network")

SECONDS = 60.0
LATENCY = 0.5
_QUESTION = {"messages": [{"role": "user", "content": "word"}], "max_tokens": 20}
_RING = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


def _schema(schema: Any) -> dict[str, Any]:
    return _QUESTION | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


_BODIES: dict[str, Any] = {
    "/v1/chat/completions": [
        lambda size: {"messages": [{"role": "user", "content": 1}] * (size // 32)},
        lambda size: {"messages": [{"role": "user", "content": "<" * size}]},
        lambda size: {f"key{number}": 1 for number in range(size // 12)},
        lambda size: {"messages": [[]] * (size // 4)},
        lambda size: {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (size // 30)}]},
        lambda size: _QUESTION | {"metadata": {"a": [[]] * (size // 4)}},
        lambda size: {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}] * (size // 49)}
            ]
        },
        lambda size: _QUESTION | {"tools": [_tool({"enum": [[]] * (size // 4)})]},
        lambda size: _schema({"enum": ["a"] * (size // 5)}),
    ],
    "/v1/responses": [
        lambda size: {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * (size // 40)}]}
    ],
    "/v1/completions": [lambda size: {"prompt": [-1] * (size // 4)}, lambda size: {"prompt": "word " * (size // 5)}],
}


def _body(make: Callable[[int], Any], size: int) -> bytes:
    """A body of about `size` bytes, and not more."""
    return json.dumps(make((size - 100) * size // len(json.dumps(make(size))))).encode()


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> float:
    """Seconds to the end of an answer."""
    return _answer(port, method, path, body)[2]


def _answer(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, float]:
    """Status and body of an answer, and the seconds to its end."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    response = connection.getresponse()
    answered = response.read()
    connection.close()
    return response.status, answered, time.monotonic() - began


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _once_it_listens(act: Callable[[int], None]) -> Any:
    return ((lambda err: re.search(r"is served at http", err) is not None, act),)


@family.slow
def bodies_that_double_in_size(place: Place) -> Steps:
    """And half a head a second beside them; SIGTERM ends the server in the midst of it."""
    place.take("model")
    port = _port()
    sizes = [1024 << doubling for doubling in range(12)]  # the last is the largest that the server reads
    bodies = [(path, _body(make, size)) for size in sizes for path, makers in _BODIES.items() for make in makers]
    waits: list[float] = []
    unread: list[bytes] = []

    def attack(pid: int) -> None:
        until = time.monotonic() + SECONDS
        half = []

        def send() -> None:
            for path, body in itertools.cycle(bodies):
                if time.monotonic() > until:
                    return
                with suppress(OSError, http.client.HTTPException):
                    status, answered, _ = _answer(port, "POST", path, body)
                    if status == 413 or b"not JSON" in answered:
                        unread.append(answered)

        threading.Thread(target=send, daemon=True).start()
        while time.monotonic() < until:
            half.append(socket.create_connection(("127.0.0.1", port)))
            half[-1].sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            waits.append(_ask(port, "GET", "/health"))
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)

    yield ends(
        {0, -15}, "serve", "model", "--port", port, actions=_once_it_listens(attack), fresh=True, seconds=SECONDS + 90
    )
    check(not unread, f"a body was not read: {unread[:1]}")
    check(len(waits) > 20, f"/health answered {len(waits)} times")
    check(max(waits) <= LATENCY, f"/health took up to {max(waits):.2f} s, {len(waits)} answers")


_REFUSED = {
    "wrong-messages": [{"messages": [{"role": "user", "content": 1}] * count} for count in (10_000, 50_000)],
    "unknown-keys": [
        _QUESTION | {f"key{number}": 1 for number in range(100_000)},
        _QUESTION | {"temperature" * 100_000: 1},
    ],
    "schemas-that-fail": [
        _schema({"$ref": "#"}),
        _schema(_RING),
        *(_schema({"type": "integer", "multipleOf": number}) for number in (999_983, 2_147_483_629, 10**18)),
    ],
}


def _are_refused(bodies: list[dict[str, Any]], place: Place) -> Steps:
    """400 or 422 with a short reason and within seconds, /health answers meanwhile, and SIGTERM ends the server."""
    place.take("adapter", ".")
    port, waits = _port(), []
    answers: list[tuple[int, bytes, float]] = []

    def send() -> None:
        for body in bodies:
            answers.append(_answer(port, "POST", "/v1/chat/completions", json.dumps(body).encode()))

    def attack(pid: int) -> None:
        thread = threading.Thread(target=send)
        thread.start()
        while thread.is_alive():
            waits.append(_ask(port, "GET", "/health"))
            thread.join(0.1)
        os.kill(pid, signal.SIGTERM)

    yield ends({0, -15}, "serve", "run", "--port", port, actions=_once_it_listens(attack))
    for status, answered, seconds in answers:
        check(status in (400, 422) and len(answered) < 5000, f"{status}: {answered[:300]!r}")
        check(seconds < 20, f"answered after {seconds:.1f} s")
    check(len(answers) == len(bodies) and max(waits) < 2, f"{len(answers)} answers, /health took {max(waits):.1f} s")


for _name, _bodies in _REFUSED.items():
    family.add(f"served-{_name}", _are_refused, _bodies, quick=False)


@family.slow
def served_600_half_heads(place: Place) -> Steps:
    """They are waited for a while; /health answers, and SIGTERM ends the server beside them."""
    place.take("model")
    port, waits, still_open = _port(), [], []

    def attack(pid: int) -> None:
        half = [socket.create_connection(("127.0.0.1", port)) for _ in range(600)]
        for each in half:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        until = time.monotonic() + 50
        with selectors.DefaultSelector() as open_ones:  # select() takes no descriptor over 1,023
            for each in half:
                open_ones.register(each, selectors.EVENT_READ)
            while open_ones.get_map() and time.monotonic() < until:
                waits.append(_ask(port, "GET", "/health"))
                for closed, _ in open_ones.select(0.3):
                    open_ones.unregister(closed.fileobj)
            still_open.extend(open_ones.get_map())
        os.kill(pid, signal.SIGTERM)

    yield ends({0, -15}, "serve", "model", "--port", port, actions=_once_it_listens(attack))
    check(not still_open, f"{len(still_open)} of 600 were still open after 50 s")
    check(max(waits) < 2, f"/health took up to {max(waits):.1f} s")


@family.slow
def served_weights_that_are_cut(place: Place) -> Steps:
    place.take("model")
    port = _port()

    def attack(pid: int) -> None:
        os.truncate(place / "model/model.safetensors", 0)
        with suppress(OSError, http.client.HTTPException):
            _ask(port, "POST", "/v1/completions", b'{"prompt": "word", "max_tokens": 5}')

    yield fails("serve", "model", "--port", port, actions=_once_it_listens(attack),
                says=("model.safetensors became shorter",))  # fmt: skip
