"""Functions that are `strict`, and `tool_choice: allowed_tools`: an answer may speak, and its calls are held."""

from __future__ import annotations

import openai
import pytest
import torch

from artel.generation.sampler import Sampler, SamplingOptions
from artel.generation.text_stream import TextStream
from artel.inference.serve.call_grammars import optional_calls_grammar
from artel.inference.serve.grammars import Grammars
from artel.inference.serve.tool_calls import merge_deltas, optional_calls
from support.called import SCHEMAS, TOOLS, assert_called, form_of, tool
from support.chat_models import MARKS, llama, saved, trained_tokenizer, user
from support.chat_templates import FAMILIES
from support.serving import client_of, served_model

CANNOT = {"gemma4"}
UNMARKED = {"llama3", "llama4", "gigachat3", "gpt_oss"}  # calls may come without the mark that the template writes
STRICT = tuple({"type": "function", "function": one["function"] | {"strict": True}} for one in TOOLS)
THOUGHT = "<think>I weigh it.</think> Сейчас: "


class Answer:
    """An answer under a grammar: what is put into it, and random logits for the rest."""

    def __init__(self, family, tools, *, parallel_calls=True, answer=None):
        self.tokenizer, self.end, form = form_of(family)
        grammar = optional_calls_grammar(
            form, tools, self.tokenizer, self.end.ids, parallel_calls=parallel_calls, answer=answer
        )
        self.matcher = Grammars(self.tokenizer, self.end.ids).lark_matcher_factory(grammar, "tools")()
        self.mark = form.mark
        self._stream = TextStream(self.tokenizer, [], (), special_tokens=True)
        self._reader = optional_calls(form, tools, no_text=answer is not None)
        self.text = ""

    def put(self, text):
        """Whether the grammar allows a text, which is part of the answer then."""
        for token in self.ids(text):
            if not self.matcher.consume_token(token):
                return False
            self._take(token)
        return True

    def ids(self, text):
        return next(self.tokenizer.encode_with_offsets([text], control=True)).ids

    def go_on(self, seed):
        """Random tokens to the end of the answer."""
        biases = dict.fromkeys(self.end.ids, -1.0)  # seldom the end of it
        sampler = Sampler(SamplingOptions(seed=seed, logit_bias=biases), [], self.tokenizer.vocabulary, self.matcher)
        random = torch.Generator().manual_seed(seed)
        for _ in range(2000):
            token = sampler.choose(torch.randn(self.tokenizer.vocabulary, generator=random)).id
            if token in self.end.ids:
                break
            self._take(token)
            if sampler.is_over:
                break
        self.text += self._reader.feed(self._stream.flush()) + self._reader.flush()

    def _take(self, token):
        self.text += self._reader.feed(self._stream.add(token).text)

    @property
    def calls(self):
        return merge_deltas(self._reader.take_deltas())


@pytest.mark.parametrize(
    "name",
    [name for name, family in FAMILIES.items() if family.calls and family.describes and name not in CANNOT | UNMARKED],
)
def test_an_answer_may_speak_and_what_it_calls_fits(name):
    for seed, said in enumerate(("", "I look it up. ", THOUGHT)):
        answer = Answer(FAMILIES[name], STRICT)
        assert answer.put(said + answer.mark)
        answer.go_on(seed)
        assert answer.text.strip() == said.strip()
        calls = answer.calls
        assert calls
        assert_called(calls)
    silent = Answer(FAMILIES[name], STRICT)
    assert silent.put("No call { is needed.")
    assert silent.matcher.is_accepting()
    assert silent.matcher.consume_token(min(silent.end.ids))


def test_functions_that_are_not_strict_take_any_object():
    tags = "<tool_call>get\n<arg_key>days</arg_key>\n<arg_value>soon</arg_value>\n</tool_call>"
    calls = {"qwen2_5": '<tool_call>\n{"name": "get", "arguments": {"city": 7}}', "glm4_5": tags}
    for family, call in calls.items():
        for tools, fits in ((TOOLS, True), (STRICT, False)):
            assert Answer(FAMILIES[family], tools).put(call) == fits


def test_no_other_function_than_the_allowed_ones():
    answer = Answer(FAMILIES["qwen2_5"], TOOLS[1:])
    assert answer.put('<tool_call>\n{"name": "get_')
    assert not Answer(FAMILIES["qwen2_5"], TOOLS[1:]).put('<tool_call>\n{"name": "get"')


def test_an_answer_in_json_or_calls():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert Answer(FAMILIES["qwen2_5"], STRICT, answer=schema).put('{"a": 1}')
    assert not Answer(FAMILIES["qwen2_5"], STRICT, answer=schema).put("words")
    called = Answer(FAMILIES["qwen2_5"], STRICT, answer=schema)
    assert called.put(called.mark)
    called.go_on(0)
    assert_called(called.calls)


def test_an_answer_in_json_may_mention_the_mark():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    answer = Answer(FAMILIES["qwen2_5"], STRICT, answer=schema)
    said = '{"a": "<tool_call> opens a call"}'
    assert answer.put(said)
    answer.go_on(0)
    assert (answer.text, answer.calls) == (said, [])


@pytest.mark.parametrize("name", sorted(UNMARKED))
def test_a_form_without_a_certain_mark(name):
    _, _, form = form_of(FAMILIES[name])
    assert form.mark == ""


def test_stop_texts_end_the_text_and_no_call():
    tokenizer, _, _ = form_of(FAMILIES["qwen2_5"])
    for text, shown in (("a stop b", "a "), ("a <tool_call> stop b", "a <tool_call> stop b")):
        stream = TextStream(tokenizer, [], ("stop",), stop_until="<tool_call>")
        pieces = [stream.add(token) for token in next(tokenizer.encode([text])).tolist()]
        stopped = [piece.stopped for piece in pieces]
        assert any(stopped) == (shown != text)
        kept = pieces[: stopped.index(True) + 1] if any(stopped) else pieces
        rest = "" if any(stopped) else stream.flush()
        assert "".join(piece.text for piece in kept) + rest == shown


# Through the server


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer([*MARKS, "<tool_call>", "</tool_call>"])


@pytest.fixture(scope="module")
def client(tmp_path_factory, tokenizer):
    model = llama(tokenizer, max_position_embeddings=4096)
    folder = saved(tmp_path_factory.mktemp("served") / "tiny", model, tokenizer)
    with served_model(folder, context=2048) as served, client_of(served) as http:
        yield openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)


QUESTION = {"model": "tiny", "messages": user("How warm is it?"), "tools": list(STRICT), "seed": 1}


def calling(tokenizer):
    """Logits that have a model of random weights open a call at once."""
    return {str(tokenizer.hf.convert_tokens_to_ids("<tool_call>")): 100}


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_openais_client_gets_strict_calls_whole_and_streamed(client, tokenizer):
    request = QUESTION | {"logit_bias": calling(tokenizer), "stop": ["city", "}"]}  # no stop text cuts a call
    whole = client.chat.completions.create(**request).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    calls = [call.model_dump() for call in whole.message.tool_calls]
    assert_called(calls)
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call["function"]["arguments"] for call in calls
    ]
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > len(calls)


def test_a_model_that_does_not_call_speaks(client):
    choice = client.chat.completions.create(**QUESTION | {"max_tokens": 20}).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert not choice.message.tool_calls


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_called(client, tokenizer, mode):
    bias = {"logit_bias": calling(tokenizer)} if mode == "auto" else {}
    for name in SCHEMAS:
        request = QUESTION | bias | {"tools": list(TOOLS), "tool_choice": allowed(mode, name), "max_tokens": 60}
        message = client.chat.completions.create(**request).choices[0].message
        assert {call.function.name for call in message.tool_calls} == {name}


BAD_PARAMETERS = {"type": "object", "properties": {"a": {"type": "nothing"}}}
UNKEPT = [{"type": "function", "function": {"name": "f", "parameters": BAD_PARAMETERS, "strict": True}}]


@pytest.mark.parametrize(
    ("changes", "param", "what"),
    [
        ({"tool_choice": allowed("auto", "get", "other")}, "tool_choice", "'other'"),
        ({"tool_choice": allowed("required", "other")}, "tool_choice", "'other'"),
        ({"tools": UNKEPT, "tool_choice": allowed("auto", "f")}, "tools", "nothing"),
        ({"tools": UNKEPT, "tool_choice": "required"}, "tools", "nothing"),
    ],
)
def test_what_cannot_be_held_is_refused(client, changes, param, what):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**QUESTION | changes)
    assert error.value.body["param"] == param
    assert what in error.value.body["message"]


def test_strict_that_cannot_be_kept_leaves_calls_free_and_is_said_once(client, capsys):
    for _ in range(2):
        assert client.chat.completions.create(**QUESTION | {"tools": UNKEPT, "max_tokens": 4}).choices[0]
    assert capsys.readouterr().err.count("tiny: strict is ignored: the schema cannot be used") == 1


@pytest.mark.parametrize(("family", "why"), [("gemma4", "cannot be forced"), ("llama3", "without a mark")])
def test_a_model_whose_calls_cannot_be_held(tmp_path, capsys, family, why):
    tokenizer = FAMILIES[family].tokenizer()
    folder = saved(tmp_path / family, llama(tokenizer, max_position_embeddings=4096), tokenizer)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "maximum": 9}}}
    with served_model(folder) as served, client_of(served) as client:
        for changes in ({}, {"response_format": schema}):
            response = client.post("/v1/chat/completions", json=QUESTION | changes | {"max_tokens": 4})
            assert response.status_code == 200, response.text
        assert int(response.json()["choices"][0]["message"]["content"]) <= 9
        assert capsys.readouterr().err.count("tiny: strict is ignored") == 1
        changes = {"tools": [tool("get")], "tool_choice": allowed("auto", "get")}
        error = client.post("/v1/chat/completions", json=QUESTION | changes).json()["error"]
    assert error["param"] == "tool_choice"
    assert why in error["message"]
