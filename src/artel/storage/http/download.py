"""Files by http(s): fetched once into a cache folder, whole or absent, with errors that name the address."""

from __future__ import annotations

import base64
import email.utils
import http.client
import json
import os
import re
import socket
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
from artel.secrets import HIDDEN, hide_secrets, variables_of, with_variables
from artel.storage.checksums import checksum
from artel.storage.http.resume import Unfinished, fetch_once
from artel.storage.http.time_limits import TooSlow, open_paced

_PAUSES = (0.3, 1.0)  # seconds before the second and the third try
_PROGRESS = 1 << 20  # bytes: a try that brought so much more was not in vain, and the tries are counted anew
_CHUNK = 1 << 18
_FIX_ADDRESS = "check the address"
_FIX_NETWORK = "check the address and the network (proxies: http_proxy, https_proxy), and start again"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched file: where it lies, the Content-Type header it came with (empty when there was none), its checksum.

    The digest is xxh3-128, 32 hex digits: the same for the same content, wherever and whenever it was fetched.
    """

    path: Path
    content_type: str
    digest: str


class _Again(Exception):
    """Something that may pass: worth another try."""


def fetch(url: str, cache: Path | str, *, max_bytes: int | None = None, timeout: float = 30.0) -> Fetched:
    """The body of `url`, from `cache` if it was fetched before (delete its folder there to fetch it anew).

    `timeout` is in seconds for each wait on the network; a server that brings less than 1,000 bytes a second over
    twice that time is as good as silent. Server errors, silence and cut connections are tried three times, counted
    anew after each further MiB. Where the server can (Range, and a strong ETag or Last-Modified), each try goes on
    where the one before it was cut, and so does the next start, also of a killed process.
    `${NAME}` in the address is taken from the environment, and never written down.
    Raises InputError (no such page, too large, not an address), WorkError (the network or the server fails).
    """
    key = str(xxhash.xxh3_128_hexdigest(url.encode()))
    folder = fetch_once(
        Path(cache), key, lambda unfinished: _download_with_patience(url, unfinished, max_bytes, timeout)
    )
    body = folder / "body"
    if max_bytes is not None and body.stat().st_size > max_bytes:
        raise _too_large(url, body.stat().st_size, max_bytes)
    headers = json.loads((folder / "headers.json").read_bytes())
    return Fetched(body, headers["content_type"], headers.get("digest") or checksum(body))


def _download_with_patience(url: str, unfinished: Unfinished, max_bytes: int | None, timeout: float) -> dict[str, Any]:
    _check_secrets(url)
    tries, furthest = 0, unfinished.size
    while True:
        try:
            content_type = _download(url, unfinished, max_bytes, timeout)
            return {"url": hide_secrets(url), "content_type": content_type}
        except _Again as reason:
            tries = tries + 1 if unfinished.size < furthest + _PROGRESS else 1
            furthest = max(furthest, unfinished.size)
            if tries > len(_PAUSES):
                kept = f"; the {unfinished.size:,} bytes that came are kept" if unfinished.about else ""
                raise WorkError.at(url, f"{reason}, three times", _FIX_NETWORK + kept) from reason
            time.sleep(_PAUSES[tries - 1])


def _download(url: str, unfinished: Unfinished, max_bytes: int | None, timeout: float) -> str:
    """One try: all that has not come yet; the Content-Type. Raises _Again, and what `fetch` does."""
    about = unfinished.about
    if about and unfinished.size == about["total"]:  # it was cut between its last byte and its name
        return str(about["content_type"])
    # Compressed transfer would have to be undone by hand, and its length says nothing of the size.
    asked = {"User-Agent": "artel", "Accept-Encoding": "identity"}
    if about and unfinished.size:
        asked |= {"Range": f"bytes={unfinished.size}-", "If-Range": about["validator"]}
    try:
        with open_paced(_request(url, asked), timeout) as response:
            _check_length(url, response.headers)
            total = _begin(response, unfinished)
            if max_bytes is not None and total is not None and total > max_bytes:
                unfinished.start({})
                raise _too_large(url, total, max_bytes)
            while piece := response.read1(_CHUNK):
                if max_bytes is not None and unfinished.size + len(piece) > max_bytes:
                    received = unfinished.size + len(piece)
                    unfinished.start({})
                    raise _too_large(url, received, max_bytes)
                unfinished.write(piece)
            if total is not None and unfinished.size != total:
                raise _Again(f"the connection was cut after {unfinished.size:,} of {total:,} bytes")
            return str(response.headers.get("Content-Type", ""))
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(url, error, unfinished, asked) from error
    except TooSlow as error:
        raise _Again(str(error)) from error
    except TimeoutError as error:
        raise _Again(f"no answer within {timeout:g} seconds") from error
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise _translated(url, error, timeout) from error
    except (UnicodeError, ValueError) as error:
        raise InputError.at(url, f"is not an address: {error}", "write http://… or https://…") from error


def _check_length(url: str, headers: Message) -> None:
    """Raise WorkError where a server says two lengths: Python takes the first, and the rest is lost in silence."""
    lengths = sorted(set(headers.get_all("Content-Length", [])))
    if len(lengths) > 1:
        raise WorkError.at(url, f"the server says {len(lengths)} lengths: {', '.join(lengths)}", _FIX_ADDRESS)


def _begin(response: http.client.HTTPResponse, unfinished: Unfinished) -> int | None:
    """Make ready for what comes: the rest of the body, or (other content, no ranges) all of it. How long that is."""
    validator = _validator(response.headers)
    if response.status == 206:
        part = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        total = int(part[2]) if part and part[2] != "*" else unfinished.about.get("total")
        same = unfinished.about.get("total") in (None, total) and validator in ("", unfinished.about.get("validator"))
        if part is None or int(part[1]) != unfinished.size or not same:
            unfinished.start({})
            raise _Again("the server answers with another part than was asked for")
        return total
    announced = response.headers.get("Content-Length")
    total = int(announced) if announced and announced.isdigit() else None
    content_type = response.headers.get("Content-Type", "")
    unfinished.start({"validator": validator, "total": total, "content_type": content_type} if validator else {})
    return total


def _validator(headers: Message) -> str:
    """What surely changes with every byte of the content, for If-Range; empty where the server says no such thing."""
    etag = headers.get("ETag", "").strip()
    if etag:
        return etag if etag.startswith('"') else ""  # W/"…" is the same for what means the same
    try:
        changed = email.utils.parsedate_to_datetime(headers.get("Last-Modified", ""))
        age = (email.utils.parsedate_to_datetime(headers.get("Date", "")) - changed).total_seconds()
    except (TypeError, ValueError):
        return ""
    # A time in seconds can stand for two contents as long as it is not past (RFC 9110, 8.8.2.2).
    return str(headers["Last-Modified"]) if age >= 60 else ""


def _refused(url: str, error: urllib.error.HTTPError, unfinished: Unfinished, asked: dict[str, str]) -> Exception:
    what = f"the server answers {error.code} {error.reason}"
    if "Range" in asked and error.code in (412, 416):  # it has no such part, or other content: all of it anew
        unfinished.start({})
        return _Again(what)
    if error.code >= 500 or error.code in (408, 429):
        return _Again(what)
    return InputError.at(url, what, _FIX_ADDRESS)


def _translated(url: str, error: Exception, timeout: float) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return _Again(f"no answer within {timeout:g} seconds")
    if isinstance(reason, http.client.InvalidURL):
        return InputError.at(url, f"is not an address: {reason}", "write http://… or https://…")
    if isinstance(reason, socket.gaierror):
        host = urllib.parse.urlsplit(url).hostname
        return WorkError.at(url, f"the name {host} is not found", _FIX_NETWORK)
    if isinstance(reason, ConnectionRefusedError):
        return WorkError.at(url, "the server refuses the connection", _FIX_NETWORK)
    if isinstance(reason, ConnectionError | http.client.HTTPException):
        return _Again(f"the connection was cut ({type(reason).__name__})")
    return WorkError.at(url, f"cannot be fetched: {reason}", _FIX_NETWORK)


def _too_large(url: str, size: int, limit: int) -> ArtelError:
    return InputError.at(url, f"is {size:,} bytes or more, over the limit of {limit:,}", "raise data.max_document")


def _check_secrets(url: str) -> None:
    """Raise InputError where the address lacks a secret: one that was hidden, or is to come from the environment."""
    if HIDDEN in url:
        what = f"its secret was not written down, {HIDDEN} stands in its place"
        fix = "give the address anew, with ${NAME} for the secret, and set NAME in the environment"
        raise InputError.at(url, what, fix)
    problems = [
        Problem(url, f"there is no {name} in the environment", f"set it: export {name}=…")
        for name in variables_of(url) if name not in os.environ
    ]  # fmt: skip
    if problems:
        raise InputError(problems)


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    """What is asked of the server. USER:PASSWORD@ goes into a header that is not sent to where it redirects us."""
    values = {name: urllib.parse.quote(os.environ[name].strip(), safe="") for name in variables_of(url)}
    address = _ascii(with_variables(url, values))
    parts = urllib.parse.urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host)), headers=headers)
    if at:
        given = urllib.parse.unquote(user).encode()
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(given).decode()}")
    return request


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
