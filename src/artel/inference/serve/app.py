"""The server's routes: OpenAI's API, the chat page, health and metrics."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

import artel
from artel.inference.serve import tasks
from artel.inference.serve.access import AccessControl, AccessOptions, App
from artel.inference.serve.api_errors import ApiError, make_body_error
from artel.inference.serve.chat import ChatCompletions, Responses
from artel.inference.serve.completions import Completions, RequestAnswers
from artel.inference.serve.limits import AdmissionLimit, Deadline, timeout_error
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.reload import Reloader, add_reload_routes
from artel.inference.serve.schema import (
    AnswerRequest,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    EntitiesRequest,
    FillMaskRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
)
from artel.inference.serve.seq2seq import Seq2SeqCompletions
from artel.inference.serve.served import ServedModel
from artel.storage import MappedFiles

Result = TypeVar("Result")

_PAGE = Path(__file__).with_name("page")
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_UNREAD_SECONDS = 60.0
"""Seconds for a client to read the end of a stream."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server."""

    requests: int | None = None
    """Maximum answers computed concurrently. None: a number chosen for the model."""
    queue: int = 64
    """Maximum answers that wait."""
    body_bytes: int = 2 * 2**20
    """Maximum size of a request body."""
    seconds: float = 600.0
    """Seconds after which an answer is cut off."""


def make_app(
    models: list[ServedModel],
    limits: Limits,
    *,
    key: str | None,
    loopback: bool,
    origins: list[str],
    reloader: Reloader | None = None,
) -> App:
    """Return the application that serves `models`. A request without a model's name goes to the first one.

    Web pages of `origins` may call the API (CORS). With a `reloader`, clients may replace the first model.
    """
    app = FastAPI(title="artel", version=artel.__version__, docs_url=None, redoc_url=None)
    metrics = Metrics()
    admission = AdmissionLimit(limits.requests or models[0].requests, limits.queue)
    app.router.route_class = BodyRoute
    _add_errors(app)
    _add_page(app)
    weights = MappedFiles()

    def check_weights() -> None:
        """Raise ApiError 503 if a weight file was overwritten, since answers would mix old and new weights."""
        if overwritten := weights.find_overwritten():
            reason = f"{', '.join(overwritten)} was overwritten while the server was running: restart the server"
            models[0].log_once(reason)
            raise ApiError(503, reason, code="weights_changed")

    def find_model(name: str, supports: Callable[[ServedModel], bool], task: str) -> ServedModel:
        check_weights()
        by_name = {served.name: served for served in models}
        served = by_name.get(name) if name else models[0]
        if served is None:
            message = f"there is no model {name[:100]!r}; served: {', '.join(by_name)}"
            raise ApiError(404, message, "model", "model_not_found")
        if served.is_reloading:
            raise ApiError(503, f"{served.name} is being replaced: try again", "model", "reloading")
        if not supports(served):
            raise ApiError(400, f"{served.name} does not {task}{_describe_uses(served)}", "model")
        return served

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [served.describe() for served in models]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return find_model(name, lambda _: True, "").describe()

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        served = find_model(body.model, lambda served: served.generates or served.can("generate"), "write text")
        if not served.generates:
            return await seq2seq(served, body, request)
        return await respond_with(Completions(served, body, metrics, limits.seconds), body.stream, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        served = find_model(body.model, lambda served: served.generates, "continue conversations")
        return await respond_with(ChatCompletions(served, body, metrics, limits.seconds), body.stream, request)

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        served = find_model(body.model, lambda served: served.generates, "continue conversations")
        return await respond_with(Responses(served, body, metrics, limits.seconds), body.stream, request)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.embeds, "make embeddings")
        return await run_task(served, lambda: tasks.embeddings(served, body), request)

    @app.post("/v1/fill-mask")
    async def fill(body: FillMaskRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.fills_masks, "fill masks")
        return await run_task(served, lambda: tasks.fill(served, body), request)

    @app.post("/v1/answers")
    async def answer(body: AnswerRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.answers_questions, "answer questions from a document")
        return await run_task(served, lambda: tasks.answer(served, body), request)

    @app.post("/v1/classify")
    async def classify(body: ClassifyRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.can("classify"), "label texts")
        return await run_task(served, lambda: tasks.classify(served, body), request)

    @app.post("/v1/entities")
    async def entities(body: EntitiesRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.can("entities"), "find entities in texts")
        return await run_task(served, lambda: tasks.entities(served, body), request)

    @app.post("/v1/rerank")
    async def rerank(body: RerankRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.can("rerank"), "order documents by a query")
        return await run_task(served, lambda: tasks.rerank(served, body), request)

    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> JSONResponse:
        served = find_model(body.model, lambda served: served.can("score"), "give scores")
        return await run_task(served, lambda: tasks.score(served, body), request)

    if reloader is not None:
        add_reload_routes(app, reloader)

    @app.get("/health")
    async def health() -> dict[str, str]:
        check_weights()
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    async def respond_with(request_answers: RequestAnswers, stream: bool | None, request: Request) -> Response:
        with ExitStack() as stack:
            stack.enter_context(admission.admit(request_answers.answer_count))
            await _cancel_on_disconnect(request, _with_timeout(request_answers.prepare(), limits.seconds))
            if stream:
                return _Stream(request_answers.stream(), stack.pop_all(), limits.seconds)
            return JSONResponse(await _cancel_on_disconnect(request, request_answers.full_response()))

    async def seq2seq(served: ServedModel, body: CompletionRequest, request: Request) -> Response:
        with ExitStack() as stack:
            stack.enter_context(admission.admit(body.answer_count))
            deadline = stack.enter_context(Deadline(limits.seconds))
            completions = Seq2SeqCompletions(served, body, metrics, deadline)
            if not body.stream:
                return JSONResponse(await _cancel_on_disconnect(request, completions.full_response()))
            events = completions.stream()
            first = await _cancel_on_disconnect(request, anext(events))  # an error here still sets the status
            return _Stream(_prepend(first, events), stack.pop_all(), limits.seconds)

    async def run_task(served: ServedModel, task: Callable[[], dict[str, Any]], request: Request) -> JSONResponse:
        with admission.admit(), Deadline(limits.seconds) as deadline:

            def work() -> dict[str, Any]:
                deadline.check()
                with deadline.enforce_on(served.opened.model):
                    return task()

            return JSONResponse(await _cancel_on_disconnect(request, _with_timeout(served.work(work), limits.seconds)))

    protected: App = AccessControl(app, AccessOptions(key, limits.body_bytes, loopback))
    if origins:
        protected = CORSMiddleware(protected, origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return _RequestCounter(protected, metrics)


def _describe_uses(served: ServedModel) -> str:
    """Return a clause about the model's task and endpoints."""
    does = served.opened.objective.presentation.does
    return (does and f": it {does}") + f"; use {' or '.join(served.endpoints)}"


class _ClientDisconnected(Exception):
    pass


class _Stream(StreamingResponse):
    """A stream that frees its slots when it ends, or `unread_seconds` after the limit if the client stops reading."""

    def __init__(
        self, events: AsyncIterator[str], slots: ExitStack, seconds: float, unread_seconds: float = _UNREAD_SECONDS
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._slots, self._seconds = slots, seconds + unread_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._slots:
            try:
                async with asyncio.timeout(self._seconds) as limit:
                    await super().__call__(scope, receive, send)
            except TimeoutError:
                if not limit.expired():
                    raise


async def _prepend(first: str, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _with_timeout(work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """Await the work. Cancel it and raise ApiError after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise timeout_error(seconds) from None


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work. Cancel it and raise _ClientDisconnected if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientDisconnected
        return await task
    finally:
        for pending in (task, disconnect):
            pending.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


class _RequestCounter:
    """An ASGI middleware that counts requests by route and status."""

    def __init__(self, app: App, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._metrics.count_request(getattr(route, "path", "other"), message["status"])
            await send(message)

        await self._app(scope, receive, counted_send if scope["type"] == "http" else send)


def _add_page(app: FastAPI) -> None:
    """Serve the chat page and its files."""
    files = {file.name: file for file in _PAGE.rglob("*") if file.suffix in _MEDIA_TYPES} if _PAGE.is_dir() else {}

    def send_file(name: str) -> Response:
        file = files.get(name)
        if file is None:
            raise ApiError(404, "page not found")
        return FileResponse(file, media_type=_MEDIA_TYPES[file.suffix], headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return send_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return send_file(name)


def _add_errors(app: FastAPI) -> None:
    """Answer every error as OpenAI's error object."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(_ClientDisconnected)
    async def client_disconnected(_: Request, error: _ClientDisconnected) -> Response:
        return Response(status_code=499)  # nobody reads this

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        # The body is not parsed, since a page of another site could send it without a CORS preflight.
        return ApiError(422, NOT_AN_OBJECT, None, "invalid_request").response()

    @app.exception_handler(Exception)
    async def unexpected_error(_: Request, error: Exception) -> JSONResponse:
        traceback.print_exception(error, file=sys.stderr)
        return ApiError(500, "internal error; the server's log has the reason").response()


# Request bodies


_body_thread = ThreadPoolExecutor(1, "artel-bodies")
NOT_AN_OBJECT = "the body must be a JSON object, with the header Content-Type: application/json"


class BodyRoute(APIRoute):
    """A route that parses and validates its body outside the event loop. FastAPI accepts the finished model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = get_type_hints(self.endpoint).get("body")

        async def handle_parsed(request: Request) -> Response:
            return await handle(request if model is None else _ParsedRequest(request.scope, request.receive, model))

        return handle_parsed


class _ParsedRequest(Request):
    """A request whose JSON body is read as a pydantic model."""

    def __init__(self, scope: Any, receive: Any, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """Return the body as its pydantic model. Raise ApiError if it does not fit."""
        content = await self.body()
        return await asyncio.get_running_loop().run_in_executor(_body_thread, read_body, content, self._model)


def read_body(content: bytes, model: type[BaseModel]) -> BaseModel:
    """Return the body of a request as its pydantic model. Raise ApiError if it does not fit."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(422, NOT_AN_OBJECT, None, "invalid_request")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise make_body_error(error, body, model.model_fields) from None
