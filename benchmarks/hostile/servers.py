"""Servers on loopback that say whatever they like, by one function a connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from hostile.case import Place

Answer = Callable[[socket.socket, bytes], None]
"""Given a connection and the head of its request."""


def serve(place: Place, answer: Answer) -> str:
    """Answer each connection in a thread of its own until the case is over: http://ADDRESS."""
    listener = socket.create_server(("127.0.0.1", 0))
    place.ends.append(listener.close)
    place.ends.append(lambda: listener.shutdown(socket.SHUT_RDWR))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=_answer, args=(connection, answer), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _answer(connection: socket.socket, answer: Answer) -> None:
    with connection, suppress(OSError):
        head = b""
        while b"\r\n\r\n" not in head and len(head) < 1 << 16:
            piece = connection.recv(4096)
            if not piece:
                break
            head += piece
        answer(connection, head)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):  # the other side may still be writing
                pass


def head(status: str = "200 OK", **headers: object) -> bytes:
    """The head of an answer; underscores in names stand for hyphens."""
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\nConnection: close\r\n\r\n").encode("latin-1")


def always(data: bytes) -> Answer:
    """The same bytes to everybody; no body to HEAD."""

    def answer(connection: socket.socket, request: bytes) -> None:
        sent = data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if request.startswith(b"HEAD") else data
        connection.sendall(sent)

    return answer
