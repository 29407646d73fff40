"""Requests to servers that speak JSON, such as OpenAI-compatible ones."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

TOO_MANY_REQUESTS = 429
_BUSY = (TOO_MANY_REQUESTS, 502, 503)


class ApiFailure(Exception):
    """A server cannot be reached, or answers with an error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: HTTP status of the answer; None if there was none, or the answer is not JSON."""
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed later: the server is busy."""
        return self.status in _BUSY


def request_json(
    url: str, body: Any, *, key: str = "", timeout: float, max_bytes: int = 2**30, reads_reply: bool = True
) -> Any:
    """Post `body` as JSON. Return the JSON of the reply, or None without `reads_reply`. Raise ApiFailure.

    `key`: name of the environment variable with the API key. `timeout`: seconds without a byte.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {os.environ[key].strip()}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            reply = response.read(max_bytes)
        return json.loads(reply) if reads_reply else None
    except urllib.error.HTTPError as error:
        detail = error.read(500).decode(errors="replace")
        raise ApiFailure(f"it answered with status {error.code}: {detail}", error.code) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not JSON
        raise ApiFailure(str(getattr(error, "reason", error)) or type(error).__name__) from None
