"""What tests of far files have in common: the files that are there, and a relay to the server that can stop."""

import io
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet

TEXTS = [f"Строка {number}, и в ней слова" for number in range(500)]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def sample_parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:50]}), stream)
    return stream.getvalue()


BODY = random.Random(0).randbytes(3 << 20)
FILES = {"data/1.jsonl": LINES[: LINES.find(b"\n") + 1], "data/2.parquet": sample_parquet(), "README.md": b"# Texts\n"}


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


def answering(status: int, body: bytes = b"") -> type[QuietHandler]:
    """A handler that gives the same answer to every GET and HEAD."""

    class Answering(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

    return Answering


@contextmanager
def http_server(handler: Callable[..., BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Serve on loopback, in a thread of this process; the address."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def raw_server(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Hand each connection on loopback to `answer`, one after another, in a thread of this process; the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    answer(listener.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class Relay:
    """Passes what goes to a server and comes from it on, byte by byte, and holds it back when told to."""

    def __init__(self, target: str) -> None:
        self._host, port = target.removeprefix("http://").split(":")
        self._port = int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.held, self._free, self._counting = threading.Event(), threading.Event(), threading.Lock()
        self.go_on()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, *, up: float = float("inf"), down: float = float("inf")) -> None:
        """Stop when so many bytes have gone up to the server, or come down from it."""
        self.passed, self._limits = {"up": 0, "down": 0}, {"up": up, "down": down}
        self.held.clear()
        self._free.clear()

    def go_on(self) -> None:
        """Pass everything, and count anew."""
        self.passed, self._limits = {"up": 0, "down": 0}, {"up": float("inf"), "down": float("inf")}
        self._free.set()

    def close(self) -> None:
        self._free.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would let one more in
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._host, self._port))
                for way, source, target in (("up", client, server), ("down", server, client)):
                    threading.Thread(target=self._pass, args=(way, source, target), daemon=True).start()

    def _pass(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                with self._counting:
                    self.passed[way] += len(piece)
                    holds = self.passed[way] > self._limits[way]
                if holds:
                    self.held.set()
                    self._free.wait()
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def killed_when_held(relay: Relay, code: str, *arguments: object) -> None:
    """Run artel in another process, and kill it when the relay holds it back."""
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)])
    try:
        assert relay.held.wait(60)
    finally:
        process.kill()
        process.wait()
    relay.go_on()
