"""Opening http(s) addresses so that no server keeps us waiting for ever, or sends us to another kind of address."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from http.client import HTTPMessage
from typing import Any
from urllib.parse import urljoin, urlsplit

LEAST_SPEED = 1_000
"""Bytes a second that a server must bring, over twice the time of a wait."""


class TooSlow(Exception):
    """The server sends, and too little."""


def open_paced(request: urllib.request.Request, timeout: float) -> Any:
    """`urlopen` for http and https alone, redirects included.

    Raises TooSlow when less than LEAST_SPEED comes over twice `timeout`, headers and reading included; HTTPError also
    for a redirect to another kind of address.
    """
    opener = urllib.request.OpenerDirector()  # build_opener's would open ftp, files of this machine and data too
    for handler in (urllib.request.ProxyHandler, urllib.request.UnknownHandler, urllib.request.HTTPDefaultErrorHandler,
                    urllib.request.HTTPErrorProcessor, _Redirects, _Http, _Https):  # fmt: skip
        opener.add_handler(handler())
    return opener.open(request, timeout=timeout)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage) -> Any:
        target = urljoin(req.full_url, headers.get("Location", headers.get("URI", "")))
        if urlsplit(target).scheme not in ("http", "https"):
            told = f"{msg}, which leads to {target}: artel follows to http and https alone"
            raise urllib.error.HTTPError(req.full_url, code, told, headers, fp)
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


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
