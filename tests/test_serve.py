"""The server's answers, by OpenAI's API: the same tokens as `artel generate`, whatever is computed beside them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from artel.errors import InputError
from artel.inference import open_model
from artel.inference.engine.sequential import SequentialEngine
from artel.inference.engine.slots import SlotEngine
from artel.inference.serve.app import Limits
from artel.inference.serve.served import ServedModel
from artel.inference.serve.server import Precision, ServerOptions, hold_weights, open_models
from artel.inference.serve.vllm import vllm_arguments
from artel.models.generate import Sampling, write_tokens
from artel.tokens.tokenizer.chat_template import CHATML, prompt_ids
from support.chat_models import MARKS, llama, saved, trained_tokenizer, user
from support.serving import client_of, served_model

QUESTION = {"messages": user("Who are you?"), "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = trained_tokenizer(MARKS)
    return saved(tmp_path_factory.mktemp("served") / "tiny", llama(tokenizer), tokenizer)


@pytest.fixture(scope="module")
def served(folder):
    with served_model(folder) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with client_of(served) as client:
        yield client


def answer(client, **changes):
    response = client.post("/v1/chat/completions", json=QUESTION | changes)
    assert response.status_code == 200, response.text
    return response.json()


def texts(response):
    return [choice["message"]["content"] for choice in response["choices"]]


def events(client, path, **body):
    """The parts of a stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def greedy(served, ids, count):
    sampling = Sampling(new_tokens=count, temperature=0, top_k=0)
    opened = served.opened
    return list(write_tokens(opened.model, opened.tokenizer, ids, sampling, None, served.text_end.ids))


def test_prompts_of_all_lengths_at_once_get_the_tokens_that_generate_writes(served, client):
    assert isinstance(served.engine, SlotEngine)
    texts = [f"{'the of and ' * (number % 7)}to {number}" for number in range(12)]
    expected = [greedy(served, served.text_ids(text), 10 + number) for number, text in enumerate(texts)]

    def ask(number):
        body = {"prompt": texts[number], "temperature": 0, "max_tokens": 10 + number, "logprobs": 0}
        return client.post("/v1/completions", json=body).json()["choices"][0]

    with ThreadPoolExecutor(12) as pool:
        choices = list(pool.map(ask, range(12)))
    decode = served.opened.tokenizer.decode
    assert [choice["logprobs"]["tokens"] for choice in choices] == [[decode([id]) for id in ids] for ids in expected]


def test_vllm_is_given_the_model_and_an_adapter_over_its_base(folder, tmp_path):
    options = ServerOptions(port=9000, context=300, precision=Precision.BF16)
    said = " ".join(vllm_arguments(str(folder), options))
    assert said.startswith(f"serve {folder} --served-model-name tiny --host 127.0.0.1 --port 9000 --dtype bfloat16")
    assert said.endswith("--max-num-seqs 16 --max-model-len 300")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.name_or_path = str(folder)
    get_peft_model(model, LoraConfig(r=12, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    said = " ".join(vllm_arguments(str(tmp_path / "adapter"), ServerOptions()))
    assert said.startswith(
        f"serve {folder} --enable-lora --max-lora-rank 16 --lora-modules adapter={tmp_path / 'adapter'}"
    )


def adapter_over(folder, place, seed):
    """An adapter with weights of its own, which artel opens over the model in `folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.name_or_path = str(folder)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(place)
    trained_tokenizer(MARKS).save(place)
    return place


def test_adapters_over_one_model_take_turns_and_each_writes_as_it_does_alone(folder, tmp_path):
    places = {name: str(adapter_over(folder, tmp_path / name, seed)) for seed, name in enumerate(("poet", "clerk"))}
    models = open_models(str(folder), ServerOptions(adapters=places))
    prompt = {"prompt": "the of and", "temperature": 0, "max_tokens": 15, "logprobs": 0}
    expected = {}
    for name, place in {"tiny": str(folder), **places}.items():
        with served_model(place) as alone, client_of(alone) as client:
            expected[name] = client.post("/v1/completions", json=prompt).json()["choices"][0]["logprobs"]["tokens"]
    assert len({*map(str, expected.values())}) == 3
    try:
        with client_of(*models) as client, ThreadPoolExecutor(12) as pool:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "poet", "clerk"]

            def ask(name):
                response = client.post("/v1/completions", json=prompt | {"model": name})
                return name, response.json()["choices"][0]["logprobs"]["tokens"]

            answers = list(pool.map(ask, ["tiny", "poet", "clerk", "poet", "tiny", "clerk", "clerk", "poet"] * 3))
        assert [tokens for _, tokens in answers] == [expected[name] for name, _ in answers]
    finally:
        models[0].close()


@pytest.mark.parametrize("wrong", ["base", "itself", "none", "name"])
def test_what_is_no_adapter_is_refused(folder, tmp_path, wrong):
    adapter = str(adapter_over(folder, tmp_path / "poet", 0))
    label = folder.name if wrong == "name" else "poet"
    name = adapter if wrong == "itself" else str(folder)
    place = {"base": str(folder), "none": "no"}.get(wrong, adapter)
    with pytest.raises(InputError) as error:
        open_models(name, ServerOptions(adapters={label: place}))
    assert error.value.problems[0].where == "--adapter"


def test_a_model_that_cannot_be_batched_answers_one_request_after_another(served, folder):
    with served_model(folder) as other:
        other.engine.close()
        other.engine = SequentialEngine(other.opened.model, other.opened.tokenizer, "one after another")
        with client_of(other) as client, client_of(served) as batching:
            assert texts(answer(client, max_tokens=20)) == texts(answer(batching, max_tokens=20))
            two = answer(client, n=2, temperature=1, seed=3)
            assert texts(two) == texts(answer(batching, n=2, temperature=1, seed=3))


def test_weights_in_bf16_give_the_same_tokens_at_once_as_alone(folder):
    opened = open_model(str(folder))
    hold_weights(opened.model, Precision.BF16, "tiny")
    model = ServedModel(opened, "tiny", 4, None)
    try:
        assert {parameter.dtype for parameter in opened.model.parameters()} == {torch.bfloat16}
        ids = model.text_ids("the of and")
        with client_of(model) as client:
            body = {"prompt": ids, "temperature": 0, "max_tokens": 20, "logprobs": 1}
            logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        alone = [model.token_text(token) for token in greedy(model, ids, 20)]
        place = next((place for place, token in enumerate(alone) if logprobs["tokens"][place] != token), 20)
        if place < 20:  # two tokens that are equally likely in bf16
            top = logprobs["top_logprobs"][place]
            assert max(top.values()) - logprobs["token_logprobs"][place] < 0.05
        assert place > 3
    finally:
        model.close()


def test_a_conversation_is_answered_through_the_chat_template(served, client):
    ids = prompt_ids(served.opened.tokenizer, CHATML, QUESTION["messages"])
    response = answer(client)
    expected = served.opened.tokenizer.hf.decode(greedy(served, ids, 12), skip_special_tokens=True)
    assert texts(response) == [expected.strip()]
    assert response["object"] == "chat.completion"
    assert response["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 12, "total_tokens": len(ids) + 12}
    assert response["choices"][0]["finish_reason"] == "length"
    parts = [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]
    assert texts(answer(client, messages=[{"role": "user", "content": parts}])) == texts(response)


def test_what_people_write_takes_no_role(client):
    plain = answer(client, messages=user("<|im_end|>"))["usage"]["prompt_tokens"]
    assert plain > answer(client, messages=user("x"))["usage"]["prompt_tokens"] + 3  # its letters, no single token


def test_a_stream_has_the_text_of_the_whole_answer(client):
    whole = texts(answer(client, n=3, temperature=1, seed=1))
    body = QUESTION | {"n": 3, "temperature": 1, "seed": 1, "stream_options": {"include_usage": True}}
    parts = events(client, "/v1/chat/completions", **body)
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 36
    streamed, ends = ["", "", ""], {}
    for part in parts[:-1]:
        (choice,) = part["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert [text.strip() for text in streamed] == whole
    assert ends == {0: "length", 1: "length", 2: "length"}


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
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [5] * 4
    assert all(len(top) <= 3 for top in logprobs["top_logprobs"])


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_for_a_model_that_knows_no_json(client, seed):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    response = answer(client, response_format=wanted, temperature=1, seed=seed, max_tokens=200)
    assert response["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(texts(response)[0]), SCHEMA)


def test_an_object_of_json_begins_with_a_brace(client):
    response = answer(client, response_format={"type": "json_object"}, temperature=1, seed=0)
    assert texts(response)[0].startswith("{")


def test_models_are_listed_with_what_they_can_do(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("tiny", "model", 512)
    assert model["endpoints"] == ["/v1/completions", "/v1/chat/completions"]
    assert client.get("/v1/models/tiny").json() == model
    assert texts(answer(client, model="tiny")) == texts(answer(client))


def error_of(response):
    """(status, key, code) of OpenAI's error object."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["param"], error["code"]


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
        ({"top_logprobs": 2}, (400, "top_logprobs", None)),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            (400, "messages[0].tool_calls", None),
        ),
        ({"tool_choice": "required"}, (400, "tool_choice", None)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            (400, "response_format", None),
        ),
    ],
)
def test_what_exceeds_a_limit_or_is_unknown_gets_openais_error(client, changes, expected):
    assert error_of(client.post("/v1/chat/completions", json=QUESTION | changes)) == expected
    assert error_of(client.post("/v1/chat/completions", json=QUESTION | changes | {"stream": True})) == expected


def test_errors_of_http_are_openais_too(client):
    assert error_of(client.get("/v1/nothing"))[0] == 404
    assert error_of(client.get("/v1/completions"))[0] == 405
    json_type = {"content-type": "application/json"}
    assert error_of(client.post("/v1/completions", content=b"{", headers=json_type))[0] == 400
    assert error_of(client.post("/v1/completions", json={"prompt": [10**6]}))[:2] == (400, "prompt")
    assert error_of(client.post("/v1/embeddings", json={"input": "x"}))[:2] == (400, "model")
    assert error_of(client.post("/v1/fill-mask", json={"input": "x"}))[:2] == (400, "model")
    assert error_of(client.post("/v1/answers", json={"question": "x", "context": "y"}))[:2] == (400, "model")


def test_a_foreign_page_cannot_reach_a_server_of_this_machine(client):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        assert error_of(client.get("/v1/models", headers={"host": host}))[2] == "wrong_host"
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200
    simple = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert simple.status_code == 422  # what a page may send without asking is no request
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
            assert error_of(client.get(path))[2] == "invalid_api_key"
            assert error_of(client.get(path, headers={"authorization": "Bearer wrong"}))[0] == 401
            assert error_of(client.get(path, headers={"authorization": "Basic secret"}))[0] == 401
            assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}


def test_a_body_has_a_largest_size(served):
    with client_of(served, limits=Limits(body=2000)) as client:
        assert texts(answer(client))
        long = QUESTION | {"messages": user("x" * 3000)}
        assert error_of(client.post("/v1/chat/completions", json=long))[2] == "body_too_large"
        pieces = (b"x" * 1000 for _ in range(3))  # without a length
        assert error_of(client.post("/v1/chat/completions", content=pieces))[2] == "body_too_large"


def test_who_comes_when_all_places_are_taken_is_told_to_come_again(served):
    with client_of(served, limits=Limits(requests=1, queue=2)) as client:
        assert len(texts(answer(client, n=3))) == 3
        response = client.post("/v1/chat/completions", json=QUESTION | {"n": 4})
        assert error_of(response)[2] == "server_busy"
        assert int(response.headers["retry-after"]) > 0
        assert len(texts(answer(client, n=3))) == 3  # and every place is free again


def test_an_answer_is_cut_off_after_its_time(served):
    with client_of(served, limits=Limits(seconds=0.0)) as client:
        response = answer(client, max_tokens=400)
        assert response["choices"][0]["finish_reason"] == "length"
        assert response["usage"]["completion_tokens"] < 400


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
