"""Requests that wait for the thread in which texts are read and encoders compute: their places, time and clients."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, asynccontextmanager

import pytest
from starlette.testclient import TestClient

from artel.inference.serve import app, tasks
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.app import Limits
from artel.inference.serve.limits import AdmissionLimit, Deadline
from artel.inference.serve.schema import EmbeddingRequest
from support.serving import (
    QUESTION,
    app_of,
    ask,
    ask_and_leave,
    client_of,
    error_of,
    served_model,
    tiny_encoder,
    tiny_model,
)
from support.waiting import LIMIT

ONE_PLACE = {"requests": 1, "queue": 0}
ASKED = {
    "chat": ("/v1/chat/completions", QUESTION),
    "stream": ("/v1/chat/completions", QUESTION | {"stream": True}),
    "text": ("/v1/completions", {"prompt": "the of", "max_tokens": 3}),
    "embeddings": ("/v1/embeddings", {"input": "the of"}),
    "masks": ("/v1/fill-mask", {"input": "the <mask>"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model that writes and an encoder, by what is asked of them."""
    folder = tmp_path_factory.mktemp("served")
    with served_model(tiny_model(folder)) as writer, served_model(tiny_encoder(folder)) as encoder:
        yield {name: encoder if name in ("embeddings", "masks") else writer for name in ASKED}


@asynccontextmanager
async def busy(served):
    """Within the block the thread does something else, until the event is set."""
    free = threading.Event()
    working = asyncio.ensure_future(served.work(free.wait))
    try:
        yield free
    finally:
        free.set()
        await working


async def two_at_once(served, app, path, body):
    """What one is answered while the other waits for the thread, and what that one is answered then."""
    async with asyncio.timeout(LIMIT), busy(served) as free:
        both = [asyncio.create_task(ask(app, path, body)) for _ in range(2)]
        done, waiting = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        free.set()
        return [each.result() for each in done], await asyncio.gather(*waiting)


@pytest.mark.parametrize("name", [*ASKED])
def test_who_waits_for_the_thread_has_a_place(models, name):
    app = app_of(models[name], limits=Limits(**ONE_PLACE))
    (refused,), (answered,) = asyncio.run(two_at_once(models[name], app, *ASKED[name]))
    assert (error_of(refused), answered.status_code) == ((429, None, "server_busy"), 200)


async def left_and_asked_again(served, app, path, body):
    """The status for a client that goes while it waits for the thread; and `two_at_once` meanwhile."""
    gone = asyncio.Event()
    gone.set()
    async with asyncio.timeout(LIMIT), busy(served):
        status = await ask_and_leave(app, path, body, gone)
    return status, await two_at_once(served, app, path, body)


@pytest.mark.parametrize("name", [*ASKED])
def test_who_goes_while_it_waits_for_the_thread_frees_its_place(models, name):
    app = app_of(models[name], limits=Limits(**ONE_PLACE))
    status, (refused, answered) = asyncio.run(left_and_asked_again(models[name], app, *ASKED[name]))
    assert status == 499
    assert [response.status_code for response in (*refused, *answered)] == [429, 200]


@pytest.mark.parametrize("name", [*ASKED])
def test_a_request_whose_time_ends_before_it_is_read_is_told_so(models, name):
    with client_of(models[name], limits=Limits(**ONE_PLACE, seconds=0.0)) as client:
        path, body = ASKED[name]
        for _ in range(2):  # the place is free again
            response = client.post(path, json=body)
            assert error_of(response) == (504, None, "timeout")
            assert "send less text" in response.json()["error"]["message"]


def test_prompts_of_refused_requests_are_not_counted(models):
    app = app_of(models["text"], limits=Limits(requests=2, queue=0))
    path, body = ASKED["text"]
    (refused,), (answered,) = asyncio.run(two_at_once(models["text"], app, path, body | {"n": 2}))
    assert refused.status_code == 429
    tokens = answered.json()["usage"]["prompt_tokens"]
    with TestClient(app, base_url="http://localhost") as client:
        second = client.post(path, json=body | {"prompt": ["the of", "long " * 2000]})
        assert error_of(second) == (400, "prompt", "context_length_exceeded")
        assert f'artel_tokens_total{{kind="prompt"}} {float(tokens)}' in client.get("/metrics").text


def test_an_encoder_begins_no_forward_pass_for_nobody(models):
    served, body = models["embeddings"], EmbeddingRequest(input="the of")
    with Deadline(LIMIT) as deadline, deadline.enforce_on(served.opened.model):
        expected = tasks.embeddings(served, body)
    with deadline.enforce_on(served.opened.model), pytest.raises(ApiError) as refused:
        tasks.embeddings(served, body)
    assert refused.value.status == 504
    assert tasks.embeddings(served, body) == expected


async def left_in_the_midst(served, app, path, body):
    """The status for a client that goes in the first of several forward passes, and how many there were."""
    loop, gone, free = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    passes = []

    def begin(*_):
        passes.append(1)
        loop.call_soon_threadsafe(gone.set)
        free.wait(LIMIT)

    hook = served.opened.model.base_model.register_forward_pre_hook(begin)
    try:
        async with asyncio.timeout(LIMIT):
            status = await ask_and_leave(app, path, body, gone)
            free.set()
            await served.work(hook.remove)  # when the thread is done with the request
    finally:
        free.set()
        hook.remove()
    return status, len(passes)


def test_an_encoder_stops_when_its_client_goes(models):
    served = models["embeddings"]
    body = {"input": ["the of and"] * 100}
    assert asyncio.run(left_in_the_midst(served, app_of(served), "/v1/embeddings", body)) == (499, 1)


async def streamed(events, unread):
    """Send a stream to a client that reads nothing, and return the number of slots that are still held."""
    admission = AdmissionLimit(1, 0)
    slots = ExitStack()
    slots.enter_context(admission.admit())

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await app._Stream(events, slots, 0.0, unread)(scope, asyncio.Event().wait, send)
    return admission.admitted


async def failing():
    raise TimeoutError("a disk")
    yield ""


async def of_one_event():
    yield "data: 1\n\n"


def test_a_stream_that_is_not_read_ends_and_a_foreign_timeout_is_no_end():
    assert asyncio.run(streamed(of_one_event(), 0.1)) == 0
    with pytest.raises(TimeoutError, match="a disk"):
        asyncio.run(streamed(failing(), 600.0))
