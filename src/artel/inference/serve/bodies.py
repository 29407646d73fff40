"""Bodies of requests: read and checked in a thread of their own, so that the event loop answers others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from artel.inference.serve.errors import ApiError, invalid_body
from artel.inference.serve.schema import ClientObject

_thread = ThreadPoolExecutor(1, "artel-bodies")
NOT_AN_OBJECT = "the body must be a JSON object, with the header Content-Type: application/json"


class BodyRoute(APIRoute):
    """A route whose body is validated off the event loop: FastAPI takes over a model that is made already."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = get_type_hints(self.endpoint).get("body")

        async def read(request: Request) -> Response:
            return await handle(request if model is None else _Request(request.scope, request.receive, model))

        return read


class _Request(Request):
    def __init__(self, scope: Any, receive: Any, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """The body as its model. Raises ApiError."""
        content = await self.body()
        return await asyncio.get_running_loop().run_in_executor(_thread, read_body, content, self._model)


def read_body(content: bytes, model: type[BaseModel]) -> BaseModel:
    """Return the body of a request as its model. Raises ApiError."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(422, NOT_AN_OBJECT, None, "invalid_request")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error, body, model.model_fields) from None


def ignored_fields(value: Any, path: str) -> Iterator[str]:
    """Yield the fields of clients' objects in a body that nothing here uses, as `messages.parsed`."""
    if isinstance(value, list):
        for item in value:
            yield from ignored_fields(item, path)
    elif isinstance(value, ClientObject):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from ignored_fields(getattr(value, name), f"{path}.{name}")
