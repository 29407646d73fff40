"""Opening http(s) addresses so that no server can keep us waiting for ever, however little it sends at a time."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.request
from typing import Any

LEAST_SPEED = 1_000
"""Bytes a second that a server must bring, over twice the time of a wait."""


class TooSlow(Exception):
    """The server sends, and too little."""


def open_paced(request: urllib.request.Request, timeout: float) -> Any:
    """`urlopen`, with TooSlow when less than LEAST_SPEED comes over twice `timeout`, headers and reading included."""
    return urllib.request.build_opener(_Http, _Https).open(request, timeout=timeout)


class _Paced(io.RawIOBase):
    """What comes from a socket, as long as it comes fast enough."""

    def __init__(self, raw: io.RawIOBase, window: float) -> None:
        self._raw, self._window = raw, window
        self._start, self._received = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            # Silence after a few bytes is a server that is too slow, not one that gives no answer.
            if self._received:
                self._complain_when_slow()
            raise
        self._received += count or 0
        if time.monotonic() - self._start >= self._window:
            self._complain_when_slow()
            self._start, self._received = time.monotonic(), 0
        return count

    def _complain_when_slow(self) -> None:
        passed = time.monotonic() - self._start
        if self._received < LEAST_SPEED * min(passed, self._window):
            raise TooSlow(f"only {self._received:,} bytes came in {passed:.1f} seconds")

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **more: Any) -> None:
        super().__init__(sock, *arguments, **more)
        timeout = sock.gettimeout()
        if timeout is not None:
            self.fp = io.BufferedReader(_Paced(self.fp.detach(), 2 * timeout))


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnection, req, context=ssl.create_default_context())
