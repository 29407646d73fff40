"""Calls that a request demands: of every form of template that can be forced, and through OpenAI's client."""

from __future__ import annotations

import json
from contextlib import contextmanager

import openai
import pytest
import torch

from artel.generation.sampler import Sampler, SamplingOptions
from artel.generation.text_stream import TextStream
from artel.inference.serve.call_grammars import UnsupportedParameters, required_calls_grammar
from artel.inference.serve.grammars import Grammars
from artel.inference.serve.tool_calls import merge_deltas, required_calls
from artel.text.tool_calls import read_calls
from support.called import SCHEMAS, TOOLS, assert_called, form_of, tool
from support.chat_models import MARKS, llama, saved, trained_tokenizer, user
from support.chat_templates import FAMILIES
from support.serving import client_of, served_model

CANNOT = {"gemma4"}
"""It writes no JSON and no tags."""


def written(tokenizer, end, form, tools, seed, *, parallel_calls=False):
    """What random logits, which seldom end, make of a grammar: the pieces of an answer's text."""
    grammar = required_calls_grammar(form, tools, tokenizer, parallel_calls=parallel_calls)
    matcher = Grammars(tokenizer, end.ids).lark_matcher_factory(grammar, "tools")()
    sampler = Sampler(
        SamplingOptions(seed=seed, logit_bias=dict.fromkeys(end.ids, -1.0)), [], tokenizer.vocabulary, matcher
    )
    stream = TextStream(tokenizer, [], (), special_tokens=True)
    random = torch.Generator().manual_seed(seed)
    for _ in range(2000):
        token = sampler.choose(torch.randn(tokenizer.vocabulary, generator=random)).id
        if token in end.ids and sampler.is_over:
            break
        yield stream.add(token).text
        if sampler.is_over:
            break
    assert sampler.is_over
    yield stream.flush()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls and family.describes])
def test_whatever_the_weights_the_answer_is_calls_in_the_form_of_the_template(name):
    tokenizer, end, form = form_of(FAMILIES[name])
    if name in CANNOT:
        assert form is None
        return
    counts, called = set(), set()
    for seed in range(20):
        reader, pieces = (
            required_calls(form, TOOLS),
            list(written(tokenizer, end, form, TOOLS, seed, parallel_calls=True)),
        )
        assert "".join(reader.feed(piece) for piece in pieces) + reader.flush() == ""
        calls = merge_deltas(reader.take_deltas())
        assert_called(calls)
        counts.add(len(calls))
        called |= {call["function"]["name"] for call in calls}
        # And it reads as what a model of that family writes by itself.
        _, read = read_calls("".join(pieces), TOOLS)
        assert [(call.name, call.arguments) for call in read] == [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
        ]
        if seed >= 4 and max(counts) > 1 and called == {*SCHEMAS}:  # random logits may take more seeds
            break
    assert called == {*SCHEMAS}
    assert (max(counts) > 1) == (form.between_calls is not None)


def test_one_call_alone_where_no_more_are_wanted():
    tokenizer, end, form = form_of(FAMILIES["qwen2_5"])
    for seed in range(4):
        assert "".join(written(tokenizer, end, form, TOOLS, seed)).count("<tool_call>") == 1


def test_arguments_may_hold_the_marks_of_the_form():
    _, _, form = form_of(FAMILIES["qwen2_5"])
    arguments = json.dumps({"city": '</tool_call> \\"} {', "days": 3})
    text = f"{form.prefix}get{form.after_name}{arguments}{form.between_calls}get_time{form.after_name}{{}}{form.suffix}"
    for size in (1, 3, len(text)):
        reader = required_calls(form, TOOLS)
        for at in range(0, len(text), size):
            reader.feed(text[at : at + size])
        first, second = merge_deltas(reader.take_deltas())
        assert (first["function"]["arguments"], second["function"]["arguments"]) == (arguments, "{}")


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"type": "array"}, "'array'"),
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "f: a: pattern"),
        ({"properties": {"a b": {}}}, "'a b'"),
        ({"anyOf": []}, "'anyOf'"),
        ({"properties": ["a"]}, "properties must be an object"),
        ({"properties": None}, "properties must be an object"),
        ({"required": 5}, "required must be an array"),
        ({"required": [1]}, "required must be an array"),
        ({"properties": {"a": {"type": "string", "enum": 1}}}, "enum must be an array"),
    ],
)
def test_what_tags_have_no_place_for_is_refused(parameters, what):
    tokenizer, _, form = form_of(FAMILIES["qwen3_5"])
    with pytest.raises(UnsupportedParameters, match=what):
        required_calls_grammar(form, (tool("f", parameters),), tokenizer, parallel_calls=False)


# Through the server


@contextmanager
def client_for(folder, tokenizer, context=None):
    """A client of a server of random weights with this tokenizer."""
    model = saved(folder / "tiny", llama(tokenizer, max_position_embeddings=4096), tokenizer)
    with served_model(model, context=context) as served, client_of(served) as client:
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with client_for(tmp_path_factory.mktemp("served"), trained_tokenizer(MARKS), 2048) as http:
        yield openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)


QUESTION = {"model": "tiny", "messages": user("How warm is it?"), "tools": list(TOOLS), "seed": 1}
NAMED = {"type": "function", "function": {"name": "get"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_openais_client_gets_calls_whole_and_streamed(client, choice):
    wanted = QUESTION | {"tool_choice": choice, "n": 2}
    whole = client.chat.completions.create(**wanted)
    names = SCHEMAS if choice == "required" else {"get"}
    for answer in whole.choices:
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert_called([call.model_dump() for call in answer.message.tool_calls], names)
        assert choice == "required" or len(answer.message.tool_calls) == 1
    with client.chat.completions.stream(**wanted) as stream:
        events = list(stream)
        streamed = stream.get_final_completion()
    said = [[call.function for call in answer.message.tool_calls] for answer in whole.choices]
    for answer, functions in zip(streamed.choices, said, strict=True):
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert [call.function.arguments for call in answer.message.tool_calls] == [one.arguments for one in functions]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > sum(map(len, said))  # arguments come as they are written


def test_an_answer_that_is_cut_off_says_so(client):
    cut = client.chat.completions.create(**QUESTION | {"tool_choice": NAMED, "max_tokens": 20})
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 20


def test_of_several_calls_those_before_the_cut_are_whole_and_one_alone_ends_the_answer(client):
    """As OpenAI and vLLM have it: what max_tokens cuts off is `length`, whatever was called before."""

    def called(**changes):
        return client.chat.completions.create(**QUESTION | {"tool_choice": "required"} | changes)

    answers = (called(seed=seed).choices[0].message.tool_calls for seed in range(20))
    seed, calls = next((seed, calls) for seed, calls in enumerate(answers) if len(calls) > 1)
    alone = called(seed=seed, parallel_tool_calls=False)
    assert alone.choices[0].finish_reason == "tool_calls"
    assert [call.function for call in alone.choices[0].message.tool_calls] == [calls[0].function]
    cut = called(seed=seed, max_tokens=alone.usage.completion_tokens + 2).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function == calls[0].function


def test_a_stop_text_within_arguments_does_not_end_a_call(client):
    free = client.chat.completions.create(**QUESTION | {"tool_choice": NAMED}).choices[0]
    kept = client.chat.completions.create(**QUESTION | {"tool_choice": NAMED, "stop": ["city", "}"]}).choices[0]
    assert kept.message.tool_calls[0].function == free.message.tool_calls[0].function


DEEP = {"type": "object"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [tool("f", DEEP)]}, "tools"),
        ({"tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [tool("f", {"type": "object", "properties": {"a": {"type": "nothing"}}})]}, "tools"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools"),
    ],
)
def test_what_cannot_be_called_is_refused(client, changes, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**QUESTION | {"tool_choice": "required"} | changes)
    assert error.value.body["param"] == param


def test_a_template_whose_calls_cannot_be_forced_is_refused_by_name(tmp_path):
    with client_for(tmp_path, FAMILIES["gemma4"].tokenizer()) as client:
        response = client.post("/v1/chat/completions", json=QUESTION | {"tool_choice": "required"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice"), response.text
        assert "use auto or none" in response.json()["error"]["message"]


def test_tools_for_a_template_that_takes_none_are_refused_with_a_way_out(tmp_path):
    with client_for(tmp_path, FAMILIES["gemma3"].tokenizer()) as client:
        error = client.post("/v1/chat/completions", json=QUESTION).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].endswith("or train one with chat.template: chatml")


def test_tools_for_a_tokenizer_with_a_template_of_its_own_for_them(tmp_path, capfd):
    with client_for(tmp_path, FAMILIES["hermes2_pro"].tokenizer(), 4096) as client:
        called = client.post("/v1/chat/completions", json=QUESTION | {"tools": [TOOLS[0]], "tool_choice": "required"})
        assert called.status_code == 200, called.text
        assert_called(called.json()["choices"][0]["message"]["tool_calls"])
        spoken = client.post("/v1/chat/completions", json={"model": "tiny", "messages": user("Hi"), "max_tokens": 2})
        cached = {"type": "function", "cache_control": {}, "function": TOOLS[0]["function"] | {"cache_control": {}}}
        marked = client.post("/v1/chat/completions", json=QUESTION | {"tools": [cached], "max_tokens": 2})
    logged = capfd.readouterr().err
    assert [logged.count(f"{name}.cache_control is ignored") for name in ("tools", "tools.function")] == [1, 1]
    assert marked.json()["usage"]["prompt_tokens"] == called.json()["usage"]["prompt_tokens"]
    sizes = [response.json()["usage"]["prompt_tokens"] for response in (called, spoken)]
    assert sizes[0] > 2 * sizes[1]  # the tools stand in the one prompt alone
