"""What a request must pass before it is read: the name it calls the server by, the key, the size of its body."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from artel.inference.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/health", "/openapi.json")
"""Paths that need no key, besides the page's files."""


def is_loopback(host: str) -> bool:
    """Whether a name, or an address with or without brackets, is that of every machine for itself."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return False


@dataclass(frozen=True, slots=True)
class GuardOptions:
    key: str | None
    largest_body: int
    """Bytes."""
    loopback: bool
    """Whether the server listens on this machine alone. Then a page of a foreign name that leads here is refused (DNS
    rebinding)."""


class _TooLarge(Exception):
    pass


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: App, options: GuardOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = exceeded = False
        read = 0

        async def receiving() -> MutableMapping[str, Any]:
            nonlocal read, exceeded
            message = await receive()
            read += len(message.get("body", b""))
            exceeded = read > self._options.largest_body
            if exceeded:
                raise _TooLarge  # the application may answer it as another error: that is not sent
            return message

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            if began or not exceeded:
                began = True
                await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._check(scope["path"], headers)
            with suppress(_TooLarge):
                await self._app(scope, receiving, sending)
            if exceeded and not began:
                raise self._too_large()
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        options = self._options
        if options.loopback:
            host = headers.get(b"host", b"localhost").decode("latin-1")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if not is_loopback(name):
                what = "this server answers by names of its own machine alone: write localhost or 127.0.0.1"
                raise ApiError(400, what, code="wrong_host")
        if options.key is not None and path not in _OPEN and not path.startswith("/page/"):
            given = headers.get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), options.key.encode()):
                raise ApiError(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > options.largest_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a body has {self._options.largest_body:,} bytes at most", code="body_too_large")
