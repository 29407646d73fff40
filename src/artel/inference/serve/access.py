"""Access control: the host name, the key, and limits on the size and duration of a request."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from artel.inference.serve.api_errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_PUBLIC_PATHS = ("/", "/health", "/openapi.json")
"""Paths that need no API key. Files of the page (/page/) also need none."""
_MAX_HEADER_BYTES = 64 * 2**10
"""Maximum bytes of headers in a request."""
_MIN_UPLOAD_RATE = 32 * 2**10
"""Minimum upload rate in bytes/s, which sets the timeout for bodies (at least 60 s)."""


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses, with or without brackets."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return False


@dataclass(frozen=True, slots=True)
class AccessOptions:
    key: str | None
    max_body_bytes: int
    """Maximum bytes of a request body."""
    loopback: bool
    """True if the server listens on a loopback address only. Other host names are then refused (DNS rebinding)."""

    @property
    def body_seconds(self) -> float:
        """Seconds for a body to arrive."""
        return max(60.0, self.max_body_bytes / _MIN_UPLOAD_RATE)


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """An HTTP connection of uvicorn that closes if the headers of a request arrive too slowly or are too large."""

    header_timeout = 30.0
    """Seconds for the headers to arrive."""
    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._cancel_header_timer()
            return
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            self.transport.close()
        elif self._timer is None:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection if a request is incomplete, since uvicorn would wait for the rest of its body."""
        if self._is_answering and self.cycle.more_body:
            self.transport.close()
        super().shutdown()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        self._timer = None
        if not self._is_answering:
            self.transport.close()

    def _cancel_header_timer(self) -> None:
        self._header_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _BodyTooLarge(Exception):
    """Raised inside the app when a body exceeds the limit."""


class AccessControl:
    """An ASGI middleware that refuses requests without a key, and bodies that are too large or arrive too slowly."""

    def __init__(self, app: App, options: AccessOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = is_too_large = is_complete = False
        received_bytes = 0
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.body_seconds

        async def limited_receive() -> MutableMapping[str, Any]:
            nonlocal received_bytes, is_too_large, is_complete
            try:
                async with asyncio.timeout_at(None if is_complete else deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the body did not arrive within {self._options.body_seconds:g} s"
                raise ApiError(408, reason, code="timeout") from None
            is_complete = is_complete or not message.get("more_body", False)
            received_bytes += len(message.get("body", b""))
            is_too_large = received_bytes > self._options.max_body_bytes
            if is_too_large:
                raise _BodyTooLarge  # the app may turn this into another error response, which is not sent
            return message

        async def guarded_send(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            if has_started or not is_too_large:
                has_started = True
                await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._check_request(scope["path"], headers)
            with suppress(_BodyTooLarge):
                await self._app(scope, limited_receive, guarded_send)
            if is_too_large and not has_started:
                raise self._too_large_error()
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _check_request(self, path: str, headers: dict[bytes, bytes]) -> None:
        options = self._options
        if options.loopback:
            host = headers.get(b"host", b"localhost").decode("latin-1")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if not is_loopback(name):
                message = "this server only accepts requests to localhost or 127.0.0.1"
                raise ApiError(400, message, code="wrong_host")
        if options.key is not None and path not in _PUBLIC_PATHS and not path.startswith("/page/"):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), options.key.encode()):
                raise ApiError(401, "an API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > options.max_body_bytes:
            raise self._too_large_error()

    def _too_large_error(self) -> ApiError:
        return ApiError(
            413, f"request body too large: the limit is {self._options.max_body_bytes:,} bytes", code="body_too_large"
        )
