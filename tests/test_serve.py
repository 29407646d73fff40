"""The server's answers, by OpenAI's API: conversations, streams, sampling, schemas."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import torch

from artel.tokens.tokenizer.chat_template import CHATML, prompt_ids
from support.chat_models import user
from support.serving import QUESTION, answer, error_of, greedy, texts


def events(client, path, **body):
    """The parts of a stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_conversation_is_answered_through_the_chat_template(served, client):
    ids = prompt_ids(served.opened.tokenizer, CHATML, QUESTION["messages"])
    response = answer(client)
    expected = served.opened.tokenizer.hf.decode(greedy(served, ids, 12), skip_special_tokens=True)
    assert texts(response) == [expected.lstrip()]
    assert response["object"] == "chat.completion"
    assert response["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 12, "total_tokens": len(ids) + 12}
    assert response["choices"][0]["finish_reason"] == "length"
    parts = [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]
    assert texts(answer(client, messages=[{"role": "user", "content": parts}])) == texts(response)


def test_what_people_write_takes_no_role(client):
    plain = answer(client, messages=user("<|im_end|>"))["usage"]["prompt_tokens"]
    assert plain > answer(client, messages=user("x"))["usage"]["prompt_tokens"] + 3  # its letters, no single token


def test_a_stream_has_the_text_of_the_whole_answer(served, client):
    """White space at its end too, which the tokens of its logprobs have."""
    (space,) = served.opened.tokenizer.hf.encode(" ", add_special_tokens=False)
    sampled = {"n": 8, "temperature": 1, "seed": 1, "logit_bias": {str(space): 4}}
    whole = texts(answer(client, **sampled))
    assert any(text != text.rstrip() for text in whole)
    body = QUESTION | sampled | {"stream_options": {"include_usage": True}}
    parts = events(client, "/v1/chat/completions", **body)
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 8 * 12
    streamed, ends = [""] * 8, {}
    for part in parts[:-1]:
        (choice,) = part["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert streamed == whole
    assert ends == dict.fromkeys(range(8), "length")


def test_equal_seeds_write_equal_texts_whatever_is_computed_beside_them(client):
    settings = {"temperature": 1.5, "max_tokens": 20}
    alone = texts(answer(client, seed=7, **settings))
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(answer, client, seed=seed, messages=user("of" * seed), **settings) for seed in range(6)]
        again = pool.submit(answer, client, seed=7, **settings)
        assert texts(again.result()) == alone
        assert all(other.result() for other in others)
    several = texts(answer(client, seed=7, n=3, **settings))
    assert several[0] == alone[0]
    assert len(set(several)) == 3
    assert len({*texts(answer(client, n=4, **settings))}) == 4  # without a seed


def test_stop_texts_end_an_answer_and_are_not_in_it(client):
    whole = client.post("/v1/completions", json={"prompt": "the of", "temperature": 0, "max_tokens": 30}).json()
    text = whole["choices"][0]["text"]
    stop = text[8:11]
    body = {"prompt": "the of", "temperature": 0, "max_tokens": 30, "stop": [stop, "never written"]}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    streamed = events(client, "/v1/completions", **body)
    assert "".join(part["choices"][0]["text"] for part in streamed) == choice["text"]


def test_logprobs_are_those_of_the_model(served, client):
    body = {"prompt": "to in a", "temperature": 0.7, "seed": 1, "max_tokens": 5, "logprobs": 3}
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    response = answer(client, logprobs=True, top_logprobs=2)
    content = response["choices"][0]["logprobs"]["content"]
    ids = prompt_ids(served.opened.tokenizer, CHATML, QUESTION["messages"])
    written = greedy(served, ids, 12)
    with torch.no_grad():
        rows = served.opened.model(input_ids=torch.tensor([ids + written])).logits[0].float().log_softmax(-1)
    expected = [rows[len(ids) - 1 + place, token].item() for place, token in enumerate(written)]
    assert [token["logprob"] for token in content] == pytest.approx(expected, abs=1e-4)
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]  # the likeliest was taken
    assert all(bytes(token["bytes"]).decode(errors="replace") == token["token"] for token in content)
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [5] * 4
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])


def test_completions_tell_parts_of_characters_apart(served, client):
    """Two likely tokens that are each a part of a character are two entries, by their bytes, as OpenAI writes them."""
    body = {"prompt": "to in a", "temperature": 2, "seed": 1, "max_tokens": 30, "logprobs": 5}
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    names = [name for top in logprobs["top_logprobs"] for name in top]
    parts = [name for name in names if name.startswith("bytes:")]
    assert [len(top) for top in logprobs["top_logprobs"]] == [5] * len(logprobs["tokens"])
    assert any(sum(name in parts for name in top) > 1 for top in logprobs["top_logprobs"])  # else nothing is tried
    assert not any("\ufffd" in name for name in names + logprobs["tokens"])
    known = {bytes(served.token_bytes(token)) for token in range(served.num_output_ids)}
    assert all(bytes.fromhex(name[6:].replace("\\x", "")) in known for name in parts)


def test_settings_of_sampling_have_their_effect(served, client):
    likeliest = texts(answer(client))
    for one_token in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert texts(answer(client, temperature=5, seed=1, **one_token)) == likeliest
    token = served.opened.tokenizer.hf.encode("x", add_special_tokens=False)[-1]
    forced = answer(client, logit_bias={str(token): 100}, max_tokens=3)
    assert texts(forced) == [served.token_text(token) * 3]
    repeated = answer(client, logit_bias={str(token): 4}, frequency_penalty=2, max_tokens=20)
    assert texts(repeated)[0].count("x") < 20
    assert texts(answer(client, repetition_penalty=10, max_tokens=30)) != texts(answer(client, max_tokens=30))
    assert texts(answer(client, presence_penalty=2, max_tokens=30)) != texts(answer(client, max_tokens=30))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Анна", "Ivan"]}, "good": {"type": "boolean"}, "age": {"enum": [1, 20]}},
    "required": ["name", "good", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_for_a_model_that_knows_no_json(client, seed):
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    response = answer(client, response_format=response_format, temperature=1, seed=seed, max_tokens=200)
    assert response["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(texts(response)[0]), SCHEMA)


def json_answer(schema, **changes):
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return QUESTION | {"response_format": response_format, "temperature": 1, "seed": 0, "max_tokens": 60} | changes


MANY_PATTERNS = {"type": "object", "patternProperties": {f"^a{n}x.*": {"type": "string"} for n in range(2000)}}
ENDLESS = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "no answer can satisfy it"),
        (ENDLESS | {"$ref": "#/$defs/a"}, "no answer can satisfy it"),
        ({"type": "integer", "multipleOf": 2147483629}, "fuel exhausted"),
        ({"type": "integer", "multipleOf": 10**18}, "too many digits"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"type": "string", "pattern": r"[^\s\S]"}, "Regex is empty"),
        pytest.param({"type": "integer", "multipleOf": 999983}, "more than 3 s", marks=pytest.mark.slow),
        pytest.param(MANY_PATTERNS, "more than 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_schema_that_nothing_can_satisfy_is_refused_with_the_reason(client, schema, why):
    for stream in (False, True):
        response = client.post("/v1/chat/completions", json=json_answer(schema, stream=stream))
        assert error_of(response)[:2] == (400, "response_format")
        assert why in response.json()["error"]["message"]


def test_a_schema_that_fails_while_an_answer_is_written_is_no_answer(client):
    """The key can be written; its value cannot."""
    schema = ENDLESS | {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    response = client.post("/v1/chat/completions", json=json_answer(schema))
    assert error_of(response)[:2] == (400, "response_format")
    streamed = client.post("/v1/chat/completions", json=json_answer(schema, stream=True)).text
    assert '"finish_reason": "stop"' not in streamed
    assert "cannot be satisfied" in streamed
    assert "NoExtensionBias" not in streamed


def test_json_that_a_stop_text_cuts_off_does_not_end_with_stop(client):
    answered = client.post("/v1/chat/completions", json=json_answer({"type": "object"}, stop=['"', "}"])).json()
    assert answered["choices"][0]["finish_reason"] == "length"


def test_json_has_no_endless_white_space(served, client):
    """Blanks and line feeds are made by far the likeliest tokens."""
    tokens = range(served.opened.tokenizer.vocabulary)
    blanks = {str(token): 50 for token in tokens if served.token_text(token).isspace()}
    assert blanks
    answered = client.post("/v1/chat/completions", json=json_answer({"type": "object"}, logit_bias=blanks)).json()
    assert re.match(r'\{( |\n {0,40})?["}]', answered["choices"][0]["message"]["content"])


def test_models_are_listed_with_what_they_can_do(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("tiny", "model", 512)
    assert model["endpoints"] == ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
    assert client.get("/v1/models/tiny").json() == model
    assert texts(answer(client, model="tiny")) == texts(answer(client))
