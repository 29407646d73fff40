"""Requests that instructor, litellm and langchain-openai sent to a running `artel serve`, replayed.

A seed is added to each, and results of earlier calls are shortened.

These clients do not install beside this project's versions, or bring too much with them. `openai` and lm-eval are
tested as they are, in test_serve_clients.py.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from support.chat_models import MARKS, llama, saved, trained_tokenizer, user
from support.serving import client_of, served_model

ASKED = user("How warm is it?")
FIELDS = {"name": {"title": "Name", "type": "string"}, "days": {"title": "Days", "type": "integer"}}
CITY = {"properties": FIELDS, "required": ["name", "days"], "title": "City", "type": "object"}
CLOSED = CITY | {"additionalProperties": False}
BARE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, parameters, description):
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def named(name):
    return {"type": "function", "function": {"name": name}}


def extracted(name):
    said = f"Correctly extracted `{name}` with all the required parameters with correct types"
    parameters = {"properties": FIELDS, "required": ["days", "name"], "type": "object"}
    return {"tool_choice": named(name), "tools": [tool(name, parameters, said)]}


def structured(**schema):
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def next_turn(of_assistant, of_tool):
    """A call and its result, with what a client adds to each message."""
    call = {"id": "call_8", "function": CALL, "type": "function"}
    result = {"role": "tool", "tool_call_id": "call_8", "content": "Validation Error found"}
    return [*ASKED, {"role": "assistant", "tool_calls": [call]} | of_assistant, result | of_tool]


CALL = {"name": "get", "arguments": '{"city": "Bern"}'}
OF_INSTRUCTOR = {"messages": ASKED, "model": "tiny", "max_tokens": 400}
OF_LITELLM = {"model": "tiny", "messages": ASKED, "max_tokens": 400}
OF_LANGCHAIN = {"messages": [{"content": "How warm is it?", "role": "user"}], "model": "tiny",
                "max_completion_tokens": 400}  # fmt: skip
WEATHER = [tool("get", BARE, "Weather")]
CITY_TOOL = [tool("City", {"properties": {"name": {"type": "string"}, "days": {"type": "integer"}},
                           "required": ["name", "days"], "type": "object"}, "")]  # fmt: skip

RECORDED = {
    "instructor 1.17.0": {
        "chat": OF_INSTRUCTOR | {"max_tokens": 5},
        "tool": OF_INSTRUCTOR | extracted("City"),
        "streamed tool": OF_INSTRUCTOR | {"stream": True} | extracted("PartialCity"),
        "schema": OF_INSTRUCTOR | structured(name="City", schema=CITY),
        "object": OF_INSTRUCTOR | {"response_format": {"type": "json_object"}},
        "next turn": OF_INSTRUCTOR | {"messages": next_turn({"content": ""}, {"name": "get"})},
    },
    "litellm 1.110.2": {
        "chat": OF_LITELLM | {"max_tokens": 5},
        "streamed chat": OF_LITELLM | {"max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
        "tool": OF_LITELLM | {"tools": WEATHER, "tool_choice": named("get")},
        "streamed tool": OF_LITELLM | {"tools": WEATHER, "tool_choice": "required", "stream": True},
        "schema": OF_LITELLM | structured(schema=CLOSED, name="City", strict=True),
        "object": OF_LITELLM | {"response_format": {"type": "json_object"}},
        "next turn": OF_LITELLM | {"messages": next_turn({}, {"name": "get"}), "tools": WEATHER},
    },
    "langchain-openai 1.7.4": {
        "chat": OF_LANGCHAIN | {"max_completion_tokens": 5, "stream": False},
        "streamed chat": OF_LANGCHAIN | {"max_completion_tokens": 5, "stream": True},
        "tool": OF_LANGCHAIN
        | {"parallel_tool_calls": False, "stream": False, "tool_choice": named("City"), "tools": CITY_TOOL},
        "streamed tool": OF_LANGCHAIN | {"stream": True, "tool_choice": "required", "tools": WEATHER},
        "schema": OF_LANGCHAIN | structured(schema=CLOSED, name="City", strict=True) | {"stream": False},
        "object": OF_LANGCHAIN | {"response_format": {"type": "json_object"}, "stream": False},
        "next turn": OF_LANGCHAIN | {"messages": next_turn({"content": None}, {}), "stream": False, "tools": WEATHER},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    tokenizer = trained_tokenizer([*MARKS, "<tool_call>", "</tool_call>"])
    model = llama(tokenizer, max_position_embeddings=4096)
    folder = saved(tmp_path_factory.mktemp("served") / "tiny", model, tokenizer)
    with served_model(folder, context=2048) as served, client_of(served) as client:
        yield client


def asked(client, body, seed=1):
    """The answer to a request, and to the same as a stream put together again: (text, calls, why it ended)."""
    response = client.post("/v1/chat/completions", json=body | {"seed": seed})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        (choice,) = response.json()["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
        return choice["message"]["content"], calls, choice["finish_reason"]
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    parts = [part for event in events for part in json.loads(event)["choices"]]
    text, calls = "", []
    for part in parts:
        text += part["delta"].get("content") or ""
        for call in part["delta"].get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[-1]["arguments"] += call["function"]["arguments"]
    return text or None, calls, parts[-1]["finish_reason"]


@pytest.mark.parametrize(("sender", "kind"), [(sender, kind) for sender, bodies in RECORDED.items() for kind in bodies])
def test_a_request_as_a_client_sent_it_is_answered(client, sender, kind):
    body = RECORDED[sender][kind]
    text, calls, reason = asked(client, body)
    if "tool" in kind:
        assert (text, reason) == (None, "tool_calls")
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in body["tools"]}
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
        assert calls
    elif kind == "schema":
        seeds = iter(range(2, 10))  # an untrained model may fill the context with one string
        while reason == "length":
            text, calls, reason = asked(client, body, next(seeds))
        assert reason == "stop"
        jsonschema.validate(json.loads(text), CITY)
    elif kind == "object":
        assert text.startswith("{")
    else:
        assert text
    if body.get("stream"):
        whole = asked(client, {name: value for name, value in body.items() if not name.startswith("stream")})
        assert whole == (text, calls, reason)
