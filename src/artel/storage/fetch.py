"""Files by http(s): fetched once into a cache folder, whole or absent, with errors that name the address."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import xxhash

from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.storage.atomic import new_folder

_PAUSES = (0.3, 1.0)  # seconds before the second and the third try
_CHUNK = 1 << 18
_FIX_ADDRESS = "check the address"
_FIX_NETWORK = "check the address and the network (proxies: http_proxy, https_proxy), and start again"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched file: where it lies, and the Content-Type header it came with (empty when there was none)."""

    path: Path
    content_type: str


class _Again(Exception):
    """Something that may pass: worth another try."""


def fetch(url: str, cache: Path | str, *, max_bytes: int | None = None, timeout: float = 30.0) -> Fetched:
    """The body of `url`, from `cache` if it was fetched before (delete its folder there to fetch it anew).

    `timeout` is in seconds for each wait on the network; server errors and cut connections are tried three times.
    Raises InputError (no such page, too large, not an address), WorkError (the network or the server fails).
    """
    folder = Path(cache) / str(xxhash.xxh3_128_hexdigest(url.encode()))
    if not folder.is_dir():
        with new_folder(folder) as partial:
            headers = _download_with_patience(url, partial / "body", max_bytes, timeout)
            (partial / "headers.json").write_text(json.dumps({"url": url, **headers}, ensure_ascii=False))
    body = folder / "body"
    if max_bytes is not None and body.stat().st_size > max_bytes:
        raise _too_large(url, body.stat().st_size, max_bytes)
    return Fetched(body, json.loads((folder / "headers.json").read_text())["content_type"])


def _download_with_patience(url: str, target: Path, max_bytes: int | None, timeout: float) -> dict[str, str]:
    for pause in (*_PAUSES, None):
        try:
            return _download(url, target, max_bytes, timeout)
        except _Again as reason:
            if pause is None:
                raise WorkError([Problem(url, f"{reason}, three times", _FIX_NETWORK)]) from reason
            time.sleep(pause)
    raise AssertionError("unreachable")


def _download(url: str, target: Path, max_bytes: int | None, timeout: float) -> dict[str, str]:
    try:
        # Compressed transfer would have to be undone by hand, and its length says nothing of the size.
        request = urllib.request.Request(_ascii(url), headers={"User-Agent": "artel", "Accept-Encoding": "identity"})
        with urllib.request.urlopen(request, timeout=timeout) as response:
            announced = response.headers.get("Content-Length")
            length = int(announced) if announced and announced.isdigit() else None
            if max_bytes is not None and length is not None and length > max_bytes:
                raise _too_large(url, length, max_bytes)
            received = 0
            with target.open("wb") as file:
                while piece := response.read(_CHUNK):
                    received += len(piece)
                    if max_bytes is not None and received > max_bytes:
                        raise _too_large(url, received, max_bytes)
                    file.write(piece)
            if length is not None and received != length:
                raise _Again(f"the connection was cut after {received:,} of {length:,} bytes")
            return {"content_type": response.headers.get("Content-Type", "")}
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500 or error.code in (408, 429):
            raise _Again(f"the server answers {error.code} {error.reason}") from error
        raise InputError([Problem(url, f"the server answers {error.code} {error.reason}", _FIX_ADDRESS)]) from error
    except TimeoutError as error:
        raise _Again(f"no answer within {timeout:g} seconds") from error
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise _translated(url, error, timeout) from error
    except (UnicodeError, ValueError) as error:
        raise InputError([Problem(url, f"is not an address: {error}", "write http://… or https://…")]) from error


def _translated(url: str, error: Exception, timeout: float) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return _Again(f"no answer within {timeout:g} seconds")
    if isinstance(reason, http.client.InvalidURL):
        return InputError([Problem(url, f"is not an address: {reason}", "write http://… or https://…")])
    if isinstance(reason, socket.gaierror):
        host = urllib.parse.urlsplit(url).hostname
        return WorkError([Problem(url, f"the name {host} is not found", _FIX_NETWORK)])
    if isinstance(reason, ConnectionRefusedError):
        return WorkError([Problem(url, "the server refuses the connection", _FIX_NETWORK)])
    if isinstance(reason, ConnectionError | http.client.HTTPException):
        return _Again(f"the connection was cut ({type(reason).__name__})")
    return WorkError([Problem(url, f"cannot be fetched: {reason}", _FIX_NETWORK)])


def _too_large(url: str, size: int, limit: int) -> ArtelError:
    return InputError(
        [Problem(url, f"is {size:,} bytes or more, over the limit of {limit:,}", "raise data.max_document")]
    )


def _ascii(url: str) -> str:
    """The address as it goes over the wire: Russian domains in punycode, other letters and spaces percent-encoded."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no http(s) scheme or no host")
    netloc = parts.netloc
    if not netloc.isascii():
        netloc = netloc.replace(parts.hostname, parts.hostname.encode("idna").decode())
    safe = "/:=&?~+!$,;'@()*[]%"
    path, query = urllib.parse.quote(parts.path, safe), urllib.parse.quote(parts.query, safe)
    return urllib.parse.urlunsplit((parts.scheme, netloc, path, query, ""))
