"""Requests to servers that speak JSON, such as OpenAI-compatible ones."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

_TOO_MANY, _UNAVAILABLE = 429, (502, 503)
"""HTTP statuses after which the same request may succeed."""
_UNAVAILABLE_SECONDS = 60.0
"""Time for which a request to an unavailable server is repeated. With too many requests there is no limit."""
_RETRY_SECONDS = 1.0


class ApiFailure(Exception):
    """A server cannot be reached, or answers with an error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: HTTP status of the answer; None if there was none, or not the expected one."""
        super().__init__(message)
        self.status = status


def request_json(url: str, body: Any = None, *, key: str = "", timeout: float, max_bytes: int = 2**30) -> Any:
    """Post `body` as JSON, or send a GET request if it is None. Return the JSON of the reply; None for an empty one.

    `key`: name of the environment variable with the API key. `timeout`: seconds without a byte. While the server is
    busy, the request is repeated. Raise ApiFailure.
    """
    end = time.monotonic() + _UNAVAILABLE_SECONDS
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {os.environ[key].strip()}")
    while True:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                reply = response.read(max_bytes)
            return json.loads(reply) if reply.strip() else None
        except urllib.error.HTTPError as error:
            is_busy = error.code == _TOO_MANY or (error.code in _UNAVAILABLE and time.monotonic() < end)
            if not is_busy:
                detail = error.read(500).decode(errors="replace")
                raise ApiFailure(f"it answered with status {error.code}: {detail}", error.code) from None
            time.sleep(_RETRY_SECONDS)
        except (OSError, ValueError) as error:  # ValueError: not JSON
            raise ApiFailure(str(getattr(error, "reason", error))) from None
