"""artel chat --tools: a model that calls a function, is given what it returned, and answers; its calls compared."""

import functools
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from artel.config import RunConfig
from artel.errors import InputError
from artel.inference import ChatSession, ChatSettings, evaluate, open_model
from artel.objectives import Chat
from artel.objectives.conversation.calls import CallTurn, call_metrics, call_turns, conversation_reference, same_calls
from artel.parallel import World
from artel.text import Conversation, Document, Message, Record, ToolCall
from artel.text.tool_functions import read_functions
from artel.tokens.tokenizer.chat_template import CHATML
from printed.inputs import written
from support.chat_models import MARKS, learned_by_heart, llama, saved, trained_tokenizer
from support.chat_templates import FAMILIES
from support.messages import logged

FUNCTION = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Omsk"}}}
TALK = [
    {"role": "user", "content": "Is it cold?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "-3"},
    {"role": "assistant", "content": "Yes: -3."},
]
MODULE = '''
from pathlib import Path


def weather(city: str):
    """
    The weather.

    Args:
        city: A city.
    """
    return -3 if city == "Omsk" else {"nothing": "known"}


def _hidden(): ...
'''
OPTIONS = ("--temperature", "0", "--repetition-penalty", "1", "--new-tokens", "80")


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """A model that knows TALK by heart, with the functions before it."""
    folder = tmp_path_factory.mktemp("models") / "calls"
    return learned_by_heart(folder, MARKS, CHATML, [TALK], TOOLS, steps=200, max_position_embeddings=1024)


@pytest.fixture
def chat_here(artel_here):
    """The command in this process and in an empty folder, with functions to call."""
    Path("functions.json").write_text(json.dumps([FUNCTION]))
    Path("functions.py").write_text(MODULE)
    return functools.partial(artel_here, "chat")


@pytest.mark.slow
def test_results_are_typed_in_and_the_conversation_is_saved_and_loaded(calling, chat_here, tmp_path):
    lines = ["Is it cold?", "-3", "/save talk.jsonl", "/reset", "/load talk.jsonl", "/retry"]
    done = chat_here(calling, "--tools", "functions.json", *OPTIONS, typed="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr
    answered = ["> Is it cold?", "I look.", '→ weather({"city": "Omsk"})', "← -3", "Yes: -3."]
    assert done.stdout.splitlines()[:5] == answered
    assert done.stdout.splitlines()[-2:] == ["> /retry", "Yes: -3."]
    saved = json.loads((tmp_path / "talk.jsonl").read_text())
    assert saved["tools"] == TOOLS
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert saved["messages"][1]["tool_calls"][0]["function"] == CALL["function"]


@pytest.mark.slow
def test_functions_of_a_python_file_run(calling, chat_here):
    done = chat_here(calling, "--tools", "functions.py", "--json", *OPTIONS, typed=b"Is it cold?")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [message["content"] for message in result["messages"]] == ["Is it cold?", "I look.", "-3", "Yes: -3."]
    assert result["answers"][0]["calls"][0]["arguments"] == {"city": "Omsk"}


def test_a_script_that_ends_before_a_result_says_so(calling, chat_here):
    done = chat_here(calling, "--tools", "functions.json", *OPTIONS, typed=b"Is it cold?")
    assert (done.returncode, "ends before weather has a result" in done.stderr) == (2, True)


def test_a_message_is_not_taken_while_a_call_is_open(calling):
    with open_session(calling) as talk:
        assert "".join(talk.answer("Is it cold?")) == "I look."
        assert talk.open_calls == (ToolCall("weather", {"city": "Omsk"}),)
        with pytest.raises(InputError, match="waits for the results of its calls: weather"):
            talk.answer("Well?")
        assert "".join(talk.answer_results(["-3"])) == "Yes: -3."
        assert not talk.open_calls


def open_session(folder):
    settings = ChatSettings(temperature=0, repetition_penalty=1, new_tokens=80)
    return closing(ChatSession(open_model(str(folder)), settings, "", tuple(TOOLS)))


@pytest.mark.slow
def test_a_call_after_the_mark_that_ends_what_is_said_is_learned_and_made(tmp_path):
    """GigaChat 3 writes <|message_sep|> between the two; what artel learns of a conversation is all that is learned."""
    messages = (
        Message("user", "Is it cold?"),
        Message("assistant", "I look.", tool_calls=(ToolCall("weather", {"city": "Omsk"}),)),
        Message("tool", "-3"),
        Message("assistant", "Yes: -3."),
    )
    tokenizer = FAMILIES["gigachat3"].tokenizer()
    run = RunConfig.model_validate({"objective": "chat", "data": {"block": 2048}})
    record = Record("", "a.jsonl:1", "a", Conversation(messages, tuple(TOOLS)))
    (made,) = Chat(run, tokenizer).samples([Document(record, "train")])
    (sample,) = made.samples
    model = llama(tokenizer, max_position_embeddings=2048).train()
    ids = torch.from_numpy(sample.ids)[None]
    labels = torch.where(torch.from_numpy(sample.flags)[None] > 0, ids, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(100):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with open_session(saved(tmp_path / "giga", model, tokenizer)) as talk:
        assert "".join(talk.answer("Is it cold?")) == "I look."
        assert talk.open_calls == messages[1].tool_calls
        assert "".join(talk.answer_results(["-3"])) == "Yes: -3."
        assert not talk.open_calls


def test_a_tokenizer_with_a_template_of_its_own_for_tools_takes_them(tmp_path):
    tokenizer = FAMILIES["hermes2_pro"].tokenizer()
    with open_session(saved(tmp_path / "hermes", llama(tokenizer, max_position_embeddings=2048), tokenizer)) as talk:
        talk.settings = talk.settings.with_value("new_tokens", "2")
        assert list(talk.answer("Is it cold?"))


def test_a_file_of_functions_is_a_module_like_others(tmp_path):
    (tmp_path / "helper.py").write_text("DEGREES = -3\n")
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom helper import DEGREES\n"
    (tmp_path / "tools.py").write_text(
        f"{head}@dataclass\nclass Place:\n    name: str\n{MODULE.replace('-3', 'DEGREES')}"
    )
    functions = read_functions(str(tmp_path / "tools.py"))
    assert functions.run(ToolCall("weather", {"city": "Omsk"})) == "-3"
    assert str(tmp_path) not in sys.path


def test_what_a_function_raises_is_told_to_the_model(tmp_path):
    (tmp_path / "functions.py").write_text(MODULE)
    functions = read_functions(str(tmp_path / "functions.py"))
    assert [tool["function"]["name"] for tool in functions.tools] == ["weather"]
    assert functions.run(ToolCall("weather", {"city": "Tomsk"})) == '{"nothing": "known"}'
    assert functions.run(ToolCall("weather", {"town": "Omsk"})).startswith("error: TypeError: ")
    assert functions.run(ToolCall("rain", {})) == "error: there is no function rain; the functions are weather"


@pytest.mark.parametrize("page", ["docs/chat.md", "docs/ru/chat.md"])
def test_the_file_of_the_page_can_be_called(tmp_path, page):
    written(page, "functions.py")(tmp_path)
    functions = read_functions(str(tmp_path / "functions.py"))
    assert functions.tools[0]["function"]["parameters"]["required"] == ["city"]
    assert functions.run(ToolCall("get_weather", {"city": "Omsk"})) == '{"degrees": -3}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", "is not JSON"),
        ("a.json", "{}", "is not a list of functions"),
        ("a.json", '[{"description": "?"}]', "entry 1 has no name"),
        ("a.py", "x = 1", "defines no function"),
        ("a.py", "1 / 0", "cannot be run: ZeroDivisionError"),
        ("a.py", "\n\ndef f(a): ...", "a.py:3: f cannot be described"),
        ("b.json", None, "there is no file"),
    ],
)
def test_files_that_are_no_functions_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_functions(name)


# The calls of held-out conversations

QUESTION = TALK[0]
TO_TOMSK = json.loads(json.dumps(TALK[1]).replace("Omsk", "Tomsk"))


def evaluated(folder, rows, **overrides):
    """The figures and wrong turns of a model on conversations, each with TOOLS unless it says otherwise."""
    lines = [row if isinstance(row, dict) else {"tools": TOOLS, "messages": row} for row in rows]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = logged()
    alone = World(0, 1, 0, torch.device("cpu"))
    result = evaluate(open_model(str(folder)), "talks.jsonl", {"objective": "chat", **overrides}, alone)
    return result, told


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_calls_are_those_of_the_record_or_wrong(calling, packing):
    """It knows TALK by heart, and calls for Omsk whatever the record has."""
    spoken = [QUESTION, {"role": "assistant", "content": "Yes."}]
    not_learned = [QUESTION, {**TO_TOMSK, "weight": 0}, *TALK[2:]]
    rows = [TALK, [QUESTION, TO_TOMSK], spoken, not_learned, {"messages": spoken}]
    result, told = evaluated(calling, rows, **{"data.packing": packing})
    assert any("calls in 5 turns" in line for line in told)
    figures = result.metrics
    assert (figures["calls"], figures["calls_named"], figures["calls_expected"]) == (3 / 5, 4 / 5, 1 / 2)
    shown = [(row["record"], row["model"]) for row in result.details["tables"]["Wrong calls"]]
    omsk, tomsk = (ToolCall("weather", {"city": city}).as_json() for city in ("Omsk", "Tomsk"))
    assert shown == [(tomsk, omsk), ("Yes.", omsk)]


def test_by_heart_all_calls_are_right_and_untrained_none(calling, tmp_path):
    result, told = evaluated(calling, [TALK, TALK])
    assert any("calls in 4 turns" in line for line in told)
    assert {name: figure for name, figure in result.metrics.items() if name.startswith("calls")} == {
        "calls": 1.0, "calls_named": 1.0, "calls_expected": 1.0
    }  # fmt: skip
    assert not result.details
    tokenizer = trained_tokenizer(MARKS)
    untrained = saved(tmp_path / "untrained", llama(tokenizer, max_position_embeddings=1024), tokenizer)
    result, _ = evaluated(untrained, [TALK[:2]])
    assert {result.metrics[name] for name in ("calls", "calls_named", "calls_expected")} == {0.0}


def test_no_more_turns_are_taken_than_asked_for():
    talk = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))
    stored = conversation_reference(Conversation(talk, (FUNCTION,)))
    turns, left_out = call_turns([stored, stored], lambda before, tools: [len(before)], 3)
    assert ([turn.answer.content for turn in turns], left_out) == (["b", "d", "b"], 0)


def test_without_tools_nothing_is_written(calling):
    result, told = evaluated(calling, [{"messages": TALK[::3]}])
    assert result.metrics.keys() == {"loss", "perplexity", "accuracy"}
    assert not any("calls in" in line for line in told)


def test_a_folder_is_judged_on_a_chat_runs_own_part_and_on_no_preferences(calling):
    talks = [[{"role": "user", "content": f"Is it cold {number} times?"}, *TALK[1:]] for number in range(6)]
    lines = [json.dumps({"tools": TOOLS, "messages": talk}) for talk in talks]
    Path("talks.jsonl").write_text("\n".join(lines))
    for objective in ("chat", "preference"):
        data = {"sources": [{"path": "talks.jsonl", "format": objective}], "validation": 0.5, "block": 1000}
        run = {"run": f"runs/{objective}", "objective": objective, "data": data}
        Path(f"{objective}.yaml").write_text(json.dumps(run))
    opened, alone = open_model(str(calling)), World(0, 1, 0, torch.device("cpu"))
    told = logged()
    result = evaluate(opened, "chat.yaml", {}, alone)
    assert 0 < result.documents < 6
    assert any(f"calls in {2 * result.documents} turns" in line for line in told)
    assert {"calls", "calls_named", "calls_expected"} <= result.metrics.keys()
    with pytest.raises(InputError, match="is for preference"):
        evaluate(opened, "preference.yaml", {}, alone)


F, G = ToolCall("f", {"a": 1, "b": [{"c": None}, "x"]}), ToolCall("g", {})


@pytest.mark.parametrize(
    ("calls", "expected", "equal"),
    [
        ([F, G], [G, F], True),
        ([F, F], [F], False),
        ([F], [F, G], False),
        ([], [], True),
        ([ToolCall("f", {"b": [{"c": None}, "x"], "a": 1.0}, "id")], [F], True),
        ([ToolCall("f", {"a": True, "b": [{"c": None}, "x"]})], [F], False),
        ([ToolCall("f", {"a": "1", "b": [{"c": None}, "x"]})], [F], False),
        ([ToolCall("f", {"a": 1, "b": ["x", {"c": None}]})], [F], False),
        ([ToolCall("f", {"a": 1, "b": [{}, "x"]})], [F], False),
        ([ToolCall("h", F.arguments)], [F], False),
    ],
)
def test_calls_are_compared_as_values_of_json(calls, expected, equal):
    assert same_calls(calls, expected) is equal


def test_malformed_calls_are_wrong_and_no_error():
    deep = [size * '{"city":' + "5" + size * "}" for size in (100, 900, 5_000, 100_000)]
    arguments = [*deep, "{", "[1]", "{(1, 2): 3}", "{'city': {1, 2}}", "{'city': b'5'}", '{"city": NaN}', "9" * 5000]
    forms = [
        '<tool_call>{"name": "weather", "arguments": %s}</tool_call>',
        '<|python_tag|>{"name": "weather", "parameters": %s}',
        "[TOOL_CALLS]weather[ARGS]%s",
        "<|tool_call>call:weather%s<tool_call|>",
        "<tool_call><function=weather><parameter=city>%s</parameter></function></tool_call>",
        "weather%s",
        "[weather(city=%s)]",
    ]
    texts = [form % inside for form in forms for inside in arguments] + ["[TOOL_CALLS]" + "[" * 100_000]
    answer = Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Omsk"}),))
    figures, details = call_metrics([CallTurn([0], answer, tuple(TOOLS), "Is it cold?")] * len(texts), texts)
    assert (figures["calls"], figures["calls_expected"]) == (0.0, 0.0)
    assert len(details["tables"]["Wrong calls"]) == 10
