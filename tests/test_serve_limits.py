"""What the server refuses, each time with OpenAI's error, who may call it, and what it counts."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import uvicorn

from artel.generation.sampler import SamplingOptions
from artel.inference.serve import access
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.app import Limits, read_body
from artel.inference.serve.completions import Prompt, Usage, generate_deltas
from artel.inference.serve.limits import AdmissionLimit
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import ChatRequest, CompletionRequest
from artel.inference.serve.server import avoid_full_collections
from artel.text.tool_calls import read_calls
from artel.tokens.tokenizer.chat_template import TurnEnd
from support.chat_models import user
from support.serving import QUESTION, answer, app_of, client_of, error_of, texts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "gpt-5"}, (404, "model", "model_not_found")),
        ({"messages": []}, (422, "messages", "invalid_request")),
        ({"temperature": "hot"}, (422, "temperature", "invalid_request")),
        ({"temperature": -1}, (422, "temperature", "invalid_request")),
        ({"frequency_penalties": 1}, (422, "frequency_penalties", "invalid_request")),
        ({"n": 100}, (422, "n", "invalid_request")),
        ({"max_tokens": 10_000}, (400, "messages", "context_length_exceeded")),
        ({"messages": user("long " * 2000)}, (400, "messages", "context_length_exceeded")),
        ({"logit_bias": {"x": 1}}, (400, "logit_bias", None)),
        ({"logit_bias": {"1000000": 1}}, (400, "logit_bias", None)),
        ({"logit_bias": {"1" * 5000: 1}}, (400, "logit_bias", None)),
        ({"messages": user("".join(map(chr, range(0xE000, 0xF900))))}, (400, "messages", None)),
        ({"top_logprobs": 2}, (400, "top_logprobs", None)),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
         (400, "messages[0].tool_calls", None)),
        ({"tool_choice": "required"}, (400, "tool_choice", None)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
         (400, "response_format", None)),
    ],
)  # fmt: skip
def test_what_exceeds_a_limit_or_is_unknown_gets_openais_error(client, changes, expected):
    assert error_of(client.post("/v1/chat/completions", json=QUESTION | changes)) == expected
    assert error_of(client.post("/v1/chat/completions", json=QUESTION | changes | {"stream": True})) == expected


def test_an_unknown_key_is_named_with_near_ones(client):
    for path, body in (("/v1/chat/completions", QUESTION), ("/v1/completions", {"prompt": "x"})):
        said = client.post(path, json=body | {"typical_p": 1, "zzzzzz": 1}).json()["error"]["message"]
        assert "typical_p: is unknown here; did you mean top_p" in said
        assert "zzzzzz: is unknown here" in said
        assert "Extra inputs" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"top_p": 0}, "top_p: is too small; write a number above 0"),
        ({"n": 100}, "n: is too large; write at most 8"),
        ({"stop": 3}, "stop: must be a string; stop: must be an array"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
         "messages.0.content.0.type: is unknown; write 'text'"),
        ({"tool_choice": "all"}, "tool_choice: is unknown; write 'none', 'auto' or 'required'"),
        ({"response_format": {"type": "xml"}},
         "response_format: has an unknown 'type'; write 'text', 'json_object', 'json_schema'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}, "strict": True}},
         "response_format.strict: is unknown here"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_said_in_plain_words_with_its_place(client, changes, said):
    error = client.post("/v1/chat/completions", json=QUESTION | changes).json()["error"]
    assert error["message"] == said
    assert error["param"] == said.partition(":")[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": [{"type": "web_search"}]},
         "tools: is not supported at /v1/responses; remove it, or use /v1/chat/completions"),
        ({"previous_response_id": "resp_1", "background": True},
         "previous_response_id: is not supported at /v1/responses; this server stores nothing: send the earlier "
         "messages in input; background: is not supported at /v1/responses; remove it"),
        ({"input": [{"type": "function_call", "role": "user", "content": "x"}]},
         "input.0.type: is unknown; write 'message'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]},
         "input.0.content.0.type: is unknown; write 'input_text', 'output_text' or 'text'"),
        ({"max_tokens": 3}, "max_tokens: is unknown here; did you mean max_output_tokens or max_tool_calls?"),
    ],
)  # fmt: skip
def test_what_responses_do_not_support_is_said_with_what_to_do(client, changes, said):
    assert client.post("/v1/responses", json={"input": "x"} | changes).json()["error"]["message"] == said


def test_responses_accept_what_asks_for_nothing(client, capfd):
    nothing = {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "background": False,
               "previous_response_id": None, "include": [], "store": True, "truncation": "disabled",
               "temperature": 0}  # fmt: skip
    message = {"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": {}}], "index": 0}
    for _ in range(2):
        body = {"input": [message], "max_output_tokens": 2} | nothing
        assert client.post("/v1/responses", json=body).json()["usage"]["output_tokens"] == 2
    logged = capfd.readouterr().err
    assert [logged.count(f"{name} is ignored") for name in ("input.index", "input.content.cache_control")] == [1, 1]
    assert error_of(client.post("/v1/responses", json=body | {"max_output_tokens": 10_000}))[:2] == (400, "input")


CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "3"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([RESULT], "messages[1].role"),
        ([{"role": "assistant", "content": "f()"}, RESULT], "messages[2].role"),
        ([CALLED, RESULT, *user("And?"), RESULT], "messages[4].role"),
        ([CALLED, RESULT | {"tool_call_id": "b"}], "messages[2].tool_call_id"),
    ],
)
def test_a_result_that_answers_no_call_is_refused(client, messages, param):
    asked = {"messages": [*user("How much?"), *messages], "max_tokens": 2}
    response = client.post("/v1/chat/completions", json=asked)
    assert error_of(response) == (400, param, None)
    assert "tool_calls" in response.json()["error"]["message"] or "no call 'b'" in response.json()["error"]["message"]
    good = [*user("How much?"), CALLED, RESULT, RESULT | {"tool_call_id": "a"}]
    assert client.post("/v1/chat/completions", json={"messages": good, "max_tokens": 2}).status_code == 200


def test_errors_of_http_are_openais_too(client):
    assert error_of(client.get("/v1/nothing"))[0] == 404
    assert error_of(client.get("/v1/completions"))[0] == 405
    json_type = {"content-type": "application/json"}
    assert error_of(client.post("/v1/completions", content=b"{", headers=json_type))[0] == 400
    assert error_of(client.post("/v1/completions", json={"prompt": [10**6]}))[:2] == (400, "prompt")
    question = {"question": "x", "context": "y"}
    for path, body in (("embeddings", {"input": "x"}), ("fill-mask", {"input": "x"}), ("answers", question)):
        refused = client.post(f"/v1/{path}", json=body)
        assert error_of(refused)[:2] == (400, "model")
        assert re.search(r"does not .*: it .+; use /v1/", refused.json()["error"]["message"])


def test_a_foreign_page_cannot_reach_a_server_of_this_machine(client):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        assert error_of(client.get("/v1/models", headers={"host": host}))[2] == "wrong_host"
    for host in ("localhost:8000", "LocalHost", "127.0.0.1", "127.0.0.2:8000", "[::1]:8000"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200
    simple = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert simple.status_code == 422  # what a page may send without asking is no request
    assert "Content-Type: application/json" in simple.json()["error"]["message"]
    assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": "http://a.example"}).headers


def test_only_pages_that_are_named_may_call(served):
    with client_of(served, origins=["http://a.example"]) as client:
        allowed = client.get("/v1/models", headers={"origin": "http://a.example"}).headers
        assert allowed["access-control-allow-origin"] == "http://a.example"
        other = client.get("/v1/models", headers={"origin": "http://b.example"}).headers
        assert "access-control-allow-origin" not in other


def test_a_key_is_asked_for_where_there_is_one(served):
    with client_of(served, key="secret", loopback=False) as client:
        for path in ("/v1/models", "/metrics"):
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
                assert error_of(client.get(path, headers=given)) == (401, None, "invalid_api_key")
            assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}


def test_a_body_has_a_largest_size(served):
    with client_of(served, limits=Limits(body_bytes=2000)) as client:
        assert texts(answer(client))
        long = QUESTION | {"messages": user("x" * 3000)}
        assert error_of(client.post("/v1/chat/completions", json=long))[2] == "body_too_large"
        pieces = (b"x" * 1000 for _ in range(3))  # without a length
        assert error_of(client.post("/v1/chat/completions", content=pieces))[2] == "body_too_large"


def test_who_comes_when_all_places_are_taken_is_told_to_come_again(served):
    admission = AdmissionLimit(running=1, queued=2)
    for _ in range(2):
        with admission.admit(3), pytest.raises(ApiError) as refused, admission.admit():
            pass
        response = refused.value.response()
        assert (response.status_code, refused.value.code) == (429, "server_busy")
        assert int(response.headers["retry-after"]) > 0
        assert admission.admitted == 0
    with client_of(served, limits=Limits(requests=1, queue=2)) as client:
        for _ in range(2):
            assert len(texts(answer(client, n=3))) == 3  # and every place is free again
        refused = client.post("/v1/chat/completions", json=QUESTION | {"n": 4})
        assert error_of(refused)[:2] == (400, "n")  # which no time to come changes


async def cut_off(served, new_tokens):
    """(tokens, why it ended) of an answer that has no time."""
    prompt = Prompt(
        served.opened.tokenizer.prompt("the of"), SamplingOptions(temperature=0), new_tokens, TurnEnd(frozenset())
    )
    usage = Usage()
    deltas = [delta async for delta in generate_deltas(served, prompt, 0, usage, Metrics(), 0.0)]
    return usage.completion_tokens, deltas[-1].finish_reason


def test_an_answer_is_cut_off_after_its_time(served):
    tokens, reason = asyncio.run(cut_off(served, 400))
    assert tokens < 400
    assert reason == "length"


@pytest.mark.parametrize("prompt", [["the", "of", "and"], [[1, 2], [3], [4]]])
def test_answers_to_a_request_are_its_prompts_times_n(served, prompt):
    with client_of(served, limits=Limits(requests=100)) as client:
        body = {"prompt": prompt, "max_tokens": 1}
        assert len(client.post("/v1/completions", json=body | {"n": 2}).json()["choices"]) == 6
        refused = client.post("/v1/completions", json=body | {"n": 3})
        assert error_of(refused) == (422, "prompt", "invalid_request")
        assert "3 prompts with n: 3 need more than 8 answers" in refused.json()["error"]["message"]


def test_what_is_refused_before_it_is_read_is_counted_by_the_status_that_clients_see(served):
    key = {"authorization": "Bearer secret"}
    with client_of(served, key="secret", limits=Limits(body_bytes=2000)) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers=key | {"host": "evil.example"}).status_code == 400
        assert client.post("/v1/completions", content=b"x" * 3000, headers=key).status_code == 413
        pieces = (b"x" * 1000 for _ in range(3))  # without a length: it is being read when it is refused
        assert client.post("/v1/completions", content=pieces, headers=key).status_code == 413
        text = client.get("/metrics", headers=key).text
    assert sorted(re.findall(r'artel_requests_total{path="(.+)",status="(\d+)"} 1.0', text)) == [
        ("/v1/completions", "413"), ("other", "400"), ("other", "401"), ("other", "413")
    ]  # fmt: skip


def test_figures_count_requests_and_tokens(served):
    with client_of(served) as client:
        answer(client, max_tokens=5)
        client.get("/nothing")
        text = client.get("/metrics").text
    assert 'artel_requests_total{path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'artel_requests_total{path="other",status="404"} 1.0' in text
    assert 'artel_tokens_total{kind="answer"} 5.0' in text
    assert "artel_answers 0.0" in text
    assert "artel_first_token_seconds_count 1.0" in text


def test_what_clients_have_in_an_answer_may_be_sent_back(client, capfd):
    """Fields of the objects of openai, langchain, litellm, Cline and vLLM, as they come back in a conversation."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "a", "type": "function", "index": 0, "function": function}
    said = {"role": "assistant", "content": "hi", "refusal": None, "audio": None, "function_call": None,
            "annotations": [], "tool_calls": [call], "parsed": None, "reasoning": "so", "id": "msg_1",
            "provider_specific_fields": {"a": 1}}  # fmt: skip
    part = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    result = {"role": "tool", "content": "3", "tool_call_id": "a"}
    messages = [*user("a"), said, result, {"role": "user", "content": [part]}]
    settings = {"prompt_cache_key": "k", "safety_identifier": "s", "store": True, "metadata": {}}
    settings |= {"service_tier": "auto"}
    for _ in range(2):
        assert answer(client, messages=messages, **settings)
    logged = capfd.readouterr().err
    for field in ("messages.provider_specific_fields", "messages.content.cache_control", "messages.tool_calls.index"):
        assert logged.count(f"{field} is ignored") == 1
    thought = [*user("a"), said | {"reasoning": None}, *messages[2:]]
    spoken, silent = (answer(client, messages=each)["usage"] for each in (messages, thought))
    assert spoken == silent  # ChatML has no place for thoughts


def operations(work) -> int:
    """Calls of functions, Python's and C's, in `work`."""
    count = 0

    def calls(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(calls)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_reading_a_body_sets_off_no_full_garbage_collection():
    content = json.dumps(QUESTION | {"metadata": {"a": [[]] * 100_000}}).encode()
    generations, usual = [], gc.get_threshold()
    note = lambda phase, info: generations.append(info["generation"])  # noqa: E731
    avoid_full_collections()
    gc.callbacks.append(note)
    try:
        read_body(content, ChatRequest)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*usual)
        gc.unfreeze()
    assert set(generations) == {0, 1}


def refused(model, body):
    content = json.dumps(body).encode()

    def read():
        with pytest.raises(ApiError) as refusal:
            read_body(content, model)
        assert len(re.findall(r"(?:^|; )[^ ;]+: ", str(refusal.value))) <= 10

    return read


WRONG_BODIES = {
    "messages": lambda size: (ChatRequest, {"messages": [{"role": "user", "content": 1}] * size}),
    "roles": lambda size: (ChatRequest, {"messages": [{"role": f"r{number}"} for number in range(size)]}),
    "unknown keys": lambda size: (ChatRequest, QUESTION | {f"key{number}": 1 for number in range(size)}),
    "long key": lambda size: (ChatRequest, QUESTION | {"temperature" * size: 1}),
    "ids": lambda size: (CompletionRequest, {"prompt": [1] * size + [-1] * size}),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_refusing_a_body_takes_work_in_proportion_to_its_size(name):
    small, large = (operations(refused(*WRONG_BODIES[name](size))) for size in (1000, 2000))
    assert large <= 2.1 * small
    assert operations(refused(*WRONG_BODIES[name](20_000))) <= 21 * small


@pytest.mark.parametrize(
    "text", ["[f(''", "[f(a=''", "<tool_call>", "<|tool_calls_section_begin|><|tool_call_begin|>f:0"]
)
def test_reading_calls_takes_work_in_proportion_to_the_text(text):
    tools = ({"type": "function", "function": {"name": "f"}},)
    small, large = (operations(partial(read_calls, text * size, tools)) for size in (200, 400))
    assert large <= 2.1 * small


@contextmanager
def listening(served, http=access.TimedProtocol):
    """A server's connections, in a thread of this process: (address, the server)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app_of(served), http=http, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname(), server
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


class ImpatientProtocol(access.TimedProtocol):
    header_timeout = 0.1


HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)


@pytest.mark.parametrize(
    "head", [b"", b"GET /health HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"]
)
def test_half_a_head_is_waited_for_a_while(served, head):
    with listening(served, http=ImpatientProtocol) as (address, _), socket.create_connection(address) as client:
        client.sendall(head)
        answered = b"".join(iter(lambda: client.recv(4096), b""))  # until the server closes
    assert answered.count(b'{"status":"ok"}') == head.count(b"\r\n\r\n")


def test_half_a_body_is_waited_for_a_while(served, monkeypatch):
    monkeypatch.setattr(access.AccessOptions, "body_seconds", 0.1)
    with listening(served) as (address, _), socket.create_connection(address) as client:
        client.sendall(HALF_BODY)
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_head_without_end_is_cut_off(served):
    with listening(served) as (address, _), socket.create_connection(address) as client:
        with suppress(ConnectionError):
            client.sendall(b"GET /health HTTP/1.1\r\n" + b"X-Long: 1\r\n" * 10**6)
        with suppress(ConnectionError):
            assert client.recv(100) == b""


def test_half_requests_do_not_keep_the_server_from_ending(served):
    with listening(served) as (address, server):
        clients = [socket.create_connection(address) for _ in range(2)]
        for client, half in zip(clients, (HALF_BODY, HALF_BODY[:20]), strict=True):
            client.sendall(half)
        while len(server.server_state.connections) < 2 or not server.server_state.tasks:
            pass
    for client in clients:
        client.close()
