"""Downloads by http(s): each file once into a cache folder, atomically, with errors that name the address.

A minimum rate keeps servers from blocking a download. Other schemes are not opened.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import io
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import xxhash

from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.secrets import HIDDEN, fill_variables, find_variables, hide_secrets
from artel.storage.http.resume import PartialDownload, fetch_once

_RETRY_SECONDS = (0.3, 1.0)  # seconds before the second and the third attempt
_PROGRESS_BYTES = 1 << 20  # bytes: after an attempt that received this many more, attempts are counted anew
_CHUNK_BYTES = 1 << 18
_MIN_BYTES_PER_SECOND = 1_000  # minimum average rate over a window of twice the timeout
_FIX_ADDRESS = "check the address"
_FIX_NETWORK = "check the address and the network (proxies: http_proxy, https_proxy), and try again"


@dataclass(frozen=True, slots=True)
class Download:
    """A downloaded file."""

    path: Path
    content_type: str
    """The Content-Type header; empty if there was none."""
    digest: str
    """xxh3-128 of the content, 32 hex digits."""


class _Retry(Exception):
    """A temporary failure: try again."""


def fetch(url: str, cache: Path | str, *, max_bytes: int | None = None, timeout: float = 30.0) -> Download:
    """Download `url`, or return it from `cache` if it was downloaded before (delete its folder there to repeat it).

    Server errors, timeouts and broken connections are tried three times, counted anew after each further MiB. If the
    server supports it (Range, and a strong ETag or Last-Modified), each attempt resumes where the one before it
    stopped; so does the next process, if this one is killed.

    Args:
        url: may contain `${NAME}`, an environment variable whose value is never written to disk.
        timeout: seconds for each wait on the network. Less than 1,000 bytes per second over twice this time is an
            error too.

    Raise InputError (no such page, too large, not an address), WorkError (the network or the server fails).
    """
    key = str(xxhash.xxh3_128_hexdigest(url.encode()))
    folder = fetch_once(Path(cache), key, lambda partial: _download_with_retries(url, partial, max_bytes, timeout))
    body = folder / "body"
    if max_bytes is not None and body.stat().st_size > max_bytes:
        raise _size_error(url, body.stat().st_size, max_bytes)
    headers = json.loads((folder / "headers.json").read_bytes())
    return Download(body, headers["content_type"], headers["digest"])


def _download_with_retries(url: str, partial: PartialDownload, max_bytes: int | None, timeout: float) -> dict[str, Any]:
    _check_secrets(url)
    attempts, furthest = 0, partial.size
    while True:
        try:
            content_type = _download(url, partial, max_bytes, timeout)
            return {"url": hide_secrets(url), "content_type": content_type}
        except _Retry as reason:
            attempts = attempts + 1 if partial.size < furthest + _PROGRESS_BYTES else 1
            furthest = max(furthest, partial.size)
            if attempts > len(_RETRY_SECONDS):
                hint = f"; the {partial.size:,} bytes that came are kept" if partial.metadata else ""
                raise WorkError.at(url, f"{reason}, three times", _FIX_NETWORK + hint) from reason
            time.sleep(_RETRY_SECONDS[attempts - 1])


def _download(url: str, partial: PartialDownload, max_bytes: int | None, timeout: float) -> str:
    """Try once to download the missing bytes, and return the Content-Type. Raise _Retry, or as `fetch` does."""
    metadata = partial.metadata
    if metadata and partial.size == metadata["total"]:  # the process was killed after the last byte
        return str(metadata["content_type"])
    # A compressed body would have to be decompressed here, and its length would not tell the size.
    headers = {"User-Agent": "artel", "Accept-Encoding": "identity"}
    if metadata and partial.size:
        headers |= {"Range": f"bytes={partial.size}-", "If-Range": metadata["validator"]}
    try:
        with _open_with_limits(_build_request(url, headers), timeout) as response:
            _check_length(url, response.headers)
            total_bytes = _prepare_partial(response, partial)
            _check_size(url, total_bytes or 0, max_bytes, partial)
            while chunk := response.read1(_CHUNK_BYTES):
                _check_size(url, partial.size + len(chunk), max_bytes, partial)
                partial.write(chunk)
            if total_bytes is not None and partial.size != total_bytes:
                raise _Retry(f"the connection was cut after {partial.size:,} of {total_bytes:,} bytes")
            return str(response.headers.get("Content-Type", ""))
    except urllib.error.HTTPError as error:
        error.close()
        raise _status_error(url, error, partial, headers) from error
    except _TooSlow as error:
        raise _Retry(str(error)) from error
    except TimeoutError as error:
        raise _Retry(f"no answer within {timeout:g} seconds") from error
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise _connection_error(url, error, timeout) from error
    except (UnicodeError, ValueError) as error:
        raise InputError.at(url, f"is not an address: {error}", "write http://… or https://…") from error


def _check_length(url: str, headers: Message) -> None:
    """Raise WorkError if a server states two lengths: Python would use the first and silently drop bytes."""
    lengths = sorted(set(headers.get_all("Content-Length", [])))
    if len(lengths) > 1:
        raise WorkError.at(url, f"the server says {len(lengths)} lengths: {', '.join(lengths)}", _FIX_ADDRESS)


def _prepare_partial(response: http.client.HTTPResponse, partial: PartialDownload) -> int | None:
    """Prepare for the missing bytes, or for the full body if the content changed. Return the total size, if stated."""
    validator = _read_validator(response.headers)
    if response.status == 206:
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        total = int(content_range[2]) if content_range and content_range[2] != "*" else partial.metadata.get("total")
        is_same = partial.metadata.get("total") in (None, total) and validator in (
            "",
            partial.metadata.get("validator"),
        )
        if content_range is None or int(content_range[1]) != partial.size or not is_same:
            partial.start({})
            raise _Retry("the server answers with another part than was asked for")
        return total
    content_length = response.headers.get("Content-Length")
    total = int(content_length) if content_length and content_length.isdigit() else None
    content_type = response.headers.get("Content-Type", "")
    partial.start({"validator": validator, "total": total, "content_type": content_type} if validator else {})
    return total


def _read_validator(headers: Message) -> str:
    """Return the value for If-Range: a header that changes with the content. Empty if there is none."""
    etag = headers.get("ETag", "").strip()
    if etag:
        return etag if etag.startswith('"') else ""  # a weak ETag (W/"…") may stay the same when bytes change
    try:
        modified = email.utils.parsedate_to_datetime(headers.get("Last-Modified", ""))
        age = (email.utils.parsedate_to_datetime(headers.get("Date", "")) - modified).total_seconds()
    except (TypeError, ValueError):
        return ""
    # Within the same minute, one time in seconds may belong to two contents (RFC 9110, 8.8.2.2).
    return str(headers["Last-Modified"]) if age >= 60 else ""


def _status_error(
    url: str, error: urllib.error.HTTPError, partial: PartialDownload, headers: dict[str, str]
) -> Exception:
    what = f"the server answers {error.code} {error.reason}"
    if "Range" in headers and error.code in (412, 416):  # the content changed or is shorter: download all of it
        partial.start({})
        return _Retry(what)
    if error.code >= 500 or error.code in (408, 429):
        return _Retry(what)
    return InputError.at(url, what, _FIX_ADDRESS)


def _connection_error(url: str, error: Exception, timeout: float) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return _Retry(f"no answer within {timeout:g} seconds")
    if isinstance(reason, http.client.InvalidURL):
        return InputError.at(url, f"is not an address: {reason}", "write http://… or https://…")
    if isinstance(reason, socket.gaierror):
        host = urllib.parse.urlsplit(url).hostname
        return WorkError.at(url, f"the name {host} is not found", _FIX_NETWORK)
    if isinstance(reason, ConnectionRefusedError):
        return WorkError.at(url, "the server refuses the connection", _FIX_NETWORK)
    if isinstance(reason, ConnectionError | http.client.HTTPException):
        return _Retry(f"the connection was cut ({type(reason).__name__})")
    return WorkError.at(url, f"cannot be fetched: {reason}", _FIX_NETWORK)


def _check_size(url: str, num_bytes: int, max_bytes: int | None, partial: PartialDownload) -> None:
    if max_bytes is not None and num_bytes > max_bytes:
        partial.start({})
        raise _size_error(url, num_bytes, max_bytes)


def _size_error(url: str, num_bytes: int, max_bytes: int) -> ArtelError:
    what = f"is {num_bytes:,} bytes or more, over the limit of {max_bytes:,}"
    return InputError.at(url, what, "raise data.max_document")


def _check_secrets(url: str) -> None:
    """Raise InputError if the address lacks a secret: it was hidden, or its environment variable is not set."""
    if HIDDEN in url:
        what = f"its secret was not saved: {HIDDEN} is in its place"
        fix = "give the address again, with ${NAME} for the secret, and set NAME in the environment"
        raise InputError.at(url, what, fix)
    missing = [name for name in find_variables(url) if name not in os.environ]
    if missing:
        what = "there is no {} in the environment"
        raise InputError([Problem(url, what.format(name), f"set it: export {name}=…") for name in missing])


def _build_request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    """Return the request. USER:PASSWORD@ becomes a header that is not sent to the target of a redirect."""
    values = {name: urllib.parse.quote(os.environ[name].strip(), safe="") for name in find_variables(url)}
    address = _to_ascii(fill_variables(url, values))
    parts = urllib.parse.urlsplit(address)
    user, separator, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host)), headers=headers)
    if separator:
        credentials = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {credentials}")
    return request


def _to_ascii(url: str) -> str:
    """Return the address in ASCII: domain names in punycode, other letters and spaces percent-encoded."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no http(s) scheme or no host")
    netloc = parts.netloc
    if not netloc.isascii():
        netloc = netloc.replace(parts.hostname, parts.hostname.encode("idna").decode())
    safe = "/:=&?~+!$,;'@()*[]%"
    path, query = urllib.parse.quote(parts.path, safe), urllib.parse.quote(parts.query, safe)
    return urllib.parse.urlunsplit((parts.scheme, netloc, path, query, ""))


class _TooSlow(Exception):
    """The server sends too few bytes per second."""


def _open_with_limits(request: urllib.request.Request, timeout: float) -> Any:
    """Open a URL by http or https only, also after redirects. Raise _TooSlow for headers and body, and HTTPError."""
    # build_opener's would also open ftp, local files and data.
    opener = urllib.request.OpenerDirector()
    errors = (urllib.request.UnknownHandler, urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor)
    for handler in (urllib.request.ProxyHandler, *errors, _Redirects, _Http, _Https):
        opener.add_handler(handler())
    return opener.open(request, timeout=timeout)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        target = urllib.parse.urljoin(req.full_url, headers.get("Location", headers.get("URI", "")))
        if urllib.parse.urlsplit(target).scheme not in ("http", "https"):
            what = f"{msg}, which leads to {target}: artel follows only http and https"
            raise urllib.error.HTTPError(req.full_url, code, what, headers, fp)
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _MinimumRate(io.RawIOBase):
    """Reads from a socket; raises _TooSlow if the rate is too low."""

    def __init__(self, raw: io.RawIOBase, window: float) -> None:
        self._raw, self._window = raw, window
        self._start, self._received = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            num_bytes = self._raw.readinto(buffer)
        except TimeoutError:
            # After a few bytes, a timeout means that the server is too slow, not that it gives no answer.
            if self._received:
                self._check_rate()
            raise
        self._received += num_bytes or 0
        if time.monotonic() - self._start >= self._window:
            self._check_rate()
            self._start, self._received = time.monotonic(), 0
        return num_bytes

    def _check_rate(self) -> None:
        elapsed = time.monotonic() - self._start
        if self._received < _MIN_BYTES_PER_SECOND * min(elapsed, self._window):
            raise _TooSlow(f"only {self._received:,} bytes came in {elapsed:.1f} seconds")

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
