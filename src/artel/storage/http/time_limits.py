"""Opens http(s) addresses with a minimum rate, so that no server can block a download, and without other schemes."""

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

MIN_BYTES_PER_SECOND = 1_000
"""The rate that a server must reach over twice the timeout."""


class TooSlow(Exception):
    """The server sends too few bytes per second."""


def open_with_limits(request: urllib.request.Request, timeout: float) -> Any:
    """`urlopen` for http and https only, also after redirects.

    Raises TooSlow if the rate over twice `timeout` (seconds) is below MIN_BYTES_PER_SECOND, for headers and body;
    HTTPError also for a redirect to another scheme.
    """
    # build_opener's would also open ftp, local files and data.
    opener = urllib.request.OpenerDirector()
    errors = (urllib.request.UnknownHandler, urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor)
    for handler in (urllib.request.ProxyHandler, *errors, _Redirects, _Http, _Https):
        opener.add_handler(handler())
    return opener.open(request, timeout=timeout)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage) -> Any:
        target = urljoin(req.full_url, headers.get("Location", headers.get("URI", "")))
        if urlsplit(target).scheme not in ("http", "https"):
            what = f"{msg}, which leads to {target}: artel follows only http and https"
            raise urllib.error.HTTPError(req.full_url, code, what, headers, fp)
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _MinimumRate(io.RawIOBase):
    """Reads from a socket; raises TooSlow if the rate is too low."""

    def __init__(self, raw: io.RawIOBase, window: float) -> None:
        self._raw, self._window = raw, window
        self._start, self._received = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            # After a few bytes, a timeout means that the server is too slow, not that it gives no answer.
            if self._received:
                self._check_rate()
            raise
        self._received += count or 0
        if time.monotonic() - self._start >= self._window:
            self._check_rate()
            self._start, self._received = time.monotonic(), 0
        return count

    def _check_rate(self) -> None:
        elapsed = time.monotonic() - self._start
        if self._received < MIN_BYTES_PER_SECOND * min(elapsed, self._window):
            raise TooSlow(f"only {self._received:,} bytes came in {elapsed:.1f} seconds")

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        timeout = sock.gettimeout()
        if timeout is not None:
            self.fp = io.BufferedReader(_MinimumRate(self.fp.detach(), 2 * timeout))


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
