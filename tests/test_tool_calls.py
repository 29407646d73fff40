"""Tools: rows of the shapes of real data sets become calls, templates write them, and what is learned is the calls."""

import json
import re
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.inference.serve.tool_calls import FreeCalls, merge_deltas
from artel.objectives import Chat, DocumentSamples
from artel.text import Document, Record, Rejected, ToolCall
from artel.text.formats.chat import read_chat
from artel.text.formats.preferences import read_preferences
from artel.text.tool_calls import CallReader, read_calls
from artel.tokens import train_tokenizer
from support.chat_models import learned_texts
from support.reading import read, rows_of
from support.templates import LLAMA_3, TOOLS_AS_TEXT, TOOLS_WITH_IDS

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
AS_TOOL = {"type": "function", "function": WEATHER}
CALL = ToolCall("get_weather", {"city": "Омск"})
CALL_AS_JSON = json.dumps({"name": "get_weather", "arguments": {"city": "Омск"}}, ensure_ascii=False)
RESULT = '{"degrees": -3}'
TOOLACE_SYSTEM = "You are an expert in composing functions. You are given a question and possible functions."
HERMES_SYSTEM = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. "
    "You may call one or more functions to assist with the user query. Here are the available tools:\n<tools>\n"
    f"{json.dumps([AS_TOOL])}\n</tools>\nFor each function call return a JSON object, with the following pydantic "
    "model json schema for each:\n{'title': 'FunctionCall', 'type': 'object'}\nEach function call should be enclosed "
    "within <tool_call> </tool_call> XML tags.\nExample:\n<tool_call>\n{'name': <function-name>}\n</tool_call>\n"
)


def parquet_of(folder, rows, name="a.parquet"):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return folder / name


def from_value(*turns):
    return [{"from": role, "value": value} for role, value in turns]


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


# One row as each data set has it. All but the last two hold the same conversation.
ROWS = {
    "openai": {
        "messages": [
            *messages(("user", "Омск?")),
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function",
                 "function": {"name": "get_weather", "arguments": '{"city": "Омск"}'}}
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
            *messages(("assistant", "-3")),
        ],
        "tools": [AS_TOOL],
        "parallel_tool_calls": False,
    },
    "openai's older": {
        "messages": [
            *messages(("user", "Омск?")),
            {"role": "assistant", "function_call": {"name": "get_weather", "arguments": '{"city": "Омск"}'}},
            {"role": "function", "name": "get_weather", "content": RESULT},
            *messages(("assistant", "-3")),
        ],
        "functions": [WEATHER],
    },
    "hermes": {
        "conversations": from_value(
            ("system", HERMES_SYSTEM),
            ("human", "Омск?"),
            ("gpt", "<tool_call>\n{'arguments': {'city': 'Омск'}, 'name': 'get_weather'}\n</tool_call>"),
            ("tool", f"<tool_response>\n{RESULT}\n</tool_response>"),
            ("gpt", "-3"),
        ),
        "tools": json.dumps([AS_TOOL]),
    },
    "glaive ru parsed": {  # of impruver's fc configs
        "messages": json.dumps(messages(
            ("system", "Ты полезный помощник с доступом к следующим функциям. Используй их при необходимости:\n"
                       + json.dumps(WEATHER, indent=4)),
            ("user", "Омск?"), ("function_call", CALL_AS_JSON), ("function_response", RESULT), ("assistant", "-3"),
        ), ensure_ascii=False),
        "functions": json.dumps([WEATHER]),
    },
    "toolace": {
        "system": f"{TOOLACE_SYSTEM}\n"
                  f"Here is a list of functions in JSON format that you can invoke:\n{json.dumps([WEATHER])}. \n"
                  "Should you decide to return the function call(s). Put it in the format of "
                  "[func1(params_name=params_value, params_name2=params_value2...), func2(params)]\n\n"
                  "NO other text MUST be included. ",
        "conversations": from_value(
            ("user", "Омск?"), ("assistant", '[get_weather(city="Омск")]'), ("tool", RESULT), ("assistant", "-3")
        ),
    },
    "apigen-mt": {
        "system": "Be polite.", "tools": json.dumps([WEATHER]),
        "conversations": from_value(
            ("human", "Омск?"), ("function_call", CALL_AS_JSON), ("observation", RESULT), ("gpt", "-3")
        ),
    },
    "xlam": {
        "id": 1, "query": "Омск?",
        "tools": json.dumps([{"name": "get_weather", "description": "The weather in a city.",
                              "parameters": {"city": {"type": "str", "description": "Its name."},
                                             "days": {"type": "int, optional", "default": 1}}}]),
        "answers": json.dumps([{"name": "get_weather", "arguments": {"city": "Омск"}}]),
    },
    "when2call": {
        "tools": [json.dumps(WEATHER)],
        "messages": messages(("user", "Омск?"), ("assistant", f"<TOOLCALL>[{CALL_AS_JSON}]</TOOLCALL>")),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_real_shapes(tmp_path, name, suffix):
    write = {".jsonl": rows_of, ".parquet": parquet_of}[suffix]
    (record,) = read(read_chat, write(tmp_path, [ROWS[name]], f"a{suffix}"), format="chat")
    fields = record.fields
    asked, called, *rest = [message for message in fields.messages if message.role != "system"]
    assert (asked.content, called.content) == ("Омск?", "")
    assert [(call.name, call.arguments) for call in called.tool_calls] == [(CALL.name, CALL.arguments)]
    assert [(message.role, message.content) for message in rest] == (
        [] if name in ("xlam", "when2call") else [("tool", RESULT), ("assistant", "-3")]
    )
    (tool,) = fields.tools
    assert (tool["type"], tool["function"]["name"]) == ("function", "get_weather")
    parameters = tool["function"]["parameters"]
    assert parameters["properties"]["city"]["type"] == "string"
    assert parameters["required"] == ["city"]
    system = {"toolace": TOOLACE_SYSTEM, "apigen-mt": "Be polite."}.get(name)
    assert [message.content for message in fields.messages if message.role == "system"][:1] == (
        [system] if system else []
    )
    assert dict(fields.changes) == ({"tools_of_system": 1} if name in ("hermes", "glaive ru parsed", "toolace") else {})
    assert '"get_weather"' in record.text  # duplicates are told by calls too


def test_parquet_rows_have_no_keys_that_are_not_there(tmp_path):
    """Arrow gives every row the keys of all others, as null."""
    other = json.loads(json.dumps(ROWS["openai"]).replace("city", "place"))
    other["messages"][1]["content"] = "I look."
    first, second = read(read_chat, parquet_of(tmp_path, [ROWS["openai"], other]), format="chat")
    for record, key in ((first, "city"), (second, "place")):
        assert list(record.fields.messages[1].tool_calls[0].arguments) == [key]
        assert list(record.fields.tools[0]["function"]["parameters"]["properties"]) == [key]


def test_tools_that_all_rows_share_and_a_converter_of_ones_own(tmp_path):
    row = {"messages": ROWS["openai"]["messages"]}
    (record,) = read(read_chat, rows_of(tmp_path, [row]), format="chat", tools=[WEATHER])
    assert record.fields.tools == (AS_TOOL,)
    (tmp_path / "ones_own.py").write_text(
        "def read(row):\n    return {'messages': row['m'], 'tools': row['t']}\n", encoding="utf-8"
    )
    row = {"m": row["messages"], "t": [WEATHER]}
    (record,) = read(read_chat, rows_of(tmp_path, [row]), format="chat", converter="ones_own:read")
    assert record.fields.tools == (AS_TOOL,)
    with pytest.raises(ValueError, match="not a function; write"):
        read(read_chat, rows_of(tmp_path, [row]), format="chat", tools=[{"title": "x"}])


def test_preferences_with_calls(tmp_path):
    row = {"tools": [WEATHER], "prompt": "Омск?", "chosen": f"<tool_call>{CALL_AS_JSON}</tool_call>", "rejected": "-3?"}
    (record,) = read(read_preferences, rows_of(tmp_path, [row]), format="preference")
    assert record.fields.chosen.tool_calls == (CALL,)
    assert (record.fields.rejected.content, record.fields.tools) == ("-3?", (AS_TOOL,))


def changed(*path, to):
    """The OpenAI row with another value at a path."""
    row = json.loads(json.dumps(ROWS["openai"]))
    holder = row
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    return row


FUNCTION = ("messages", 1, "tool_calls", 0, "function")


def test_nulls_in_arguments_of_parquet_stay_in_json_alone(tmp_path):
    """As docs/chat.md says: Arrow cannot tell a null from a key that is not there."""
    with_null = {"city": None, "days": 1}
    for arguments, read_as in ((json.dumps(with_null), with_null), (with_null, {"days": 1})):
        row = changed(*FUNCTION, "arguments", to=arguments)
        (record,) = read(read_chat, parquet_of(tmp_path, [row]), format="chat")
        assert record.fields.messages[1].tool_calls[0].arguments == read_as


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        (changed(*FUNCTION, "arguments", to="{city: Омск}"), "bad_arguments", "message 2: the arguments .* not JSON"),
        (changed(*FUNCTION, "arguments", to="[1]"), "bad_arguments", r"are \[1\]; write"),
        (changed(*FUNCTION, "name", to=3), "bad_tool_call", "message 2: .*not a tool call; write"),
        (changed(*FUNCTION[:3], to="get_weather()"), "bad_tool_call", "is not JSON"),
        (changed(*FUNCTION, "name", to="get_wether"), "unknown_tool", r"calls 'get_wether', .*\(get_weather\);"),
        (changed("messages", 2, "tool_call_id", to="call_2"), "no_call", "'call_2', which does not exist"),
        (changed("messages", 1, to={"role": "user", "content": "?"}), "no_call", "message 2 is a tool result"),
        (changed("messages", 2, to={"role": "assistant", "content": "-4"}), "no_result", "message 3 continues after"),
        (changed("messages", 2, "role", to="narrator"), "unknown_role", "narrator"),
        (changed("tools", to="[{"), "bad_tools", "tools are not JSON"),
        (changed("tools", to=[{"title": "x"}]), "bad_tools", r"tools\[0\] is .*not a function"),
        (changed("messages", 3, "content", to="<tool_call>get it</tool_call>"), "bad_tool_call", "message 4 has"),
    ],
)  # fmt: skip
def test_bad_rows_are_counted_with_their_place(tmp_path, row, reason, said):
    records = read(read_chat, rows_of(tmp_path, [ROWS["openai"], row, ROWS["openai"]]), format="chat")
    assert [type(item) for item in records] == [Record, Rejected, Record]
    assert (records[1].origin, records[1].reason) == ("a.jsonl:2", reason)
    assert re.search(said, records[1].detail)


def test_a_system_message_may_describe_more_functions_than_can_be_read(tmp_path):
    described = json.dumps({"name": "get_time", "description": "The time.", "parameters": {"type": "object"}})
    bare = json.dumps({"name": "get_weather", "description": "The weather."})
    turns = [
        {"role": "system", "content": f"Here are the tools:\n<tools>\n{described}\n{bare}\n</tools>"},
        {"role": "user", "content": "Омск?"},
        {"role": "assistant", "content": f"<tool_call>{CALL_AS_JSON}</tool_call>"},
    ]
    (record,) = read(read_chat, rows_of(tmp_path, [{"messages": turns}]), format="chat")
    assert record.fields.messages[-1].tool_calls == (CALL,)


def test_any_function_may_be_called_where_none_is_described_or_the_turn_is_not_learned(tmp_path):
    row = changed(*FUNCTION, "name", to="get_wether")
    not_learned = json.loads(json.dumps(row))
    not_learned["messages"][1]["train"] = False
    rows = [{"messages": row["messages"]}, not_learned]
    records = read(read_chat, rows_of(tmp_path, rows), format="chat")
    assert [record.fields.messages[1].tool_calls[0].name for record in records] == ["get_wether"] * 2


# What templates make of it

CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Омск"}}\n</tool_call>'
TEMPLATES = {
    "chatml": ("chatml", f"{CALLED}<|im_end|>", "-3<|im_end|>"),
    "plain": ("plain", f" {CALLED}<|endoftext|>", " -3<|endoftext|>"),
    "arguments as text": (TOOLS_AS_TEXT, 'get_weather\n{"city": "Омск"}<|call|><|im_end|>', "-3<|im_end|>"),
    "ids": (TOOLS_WITH_IDS, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Омск"}, '
            '"id": "[0-9A-Za-z]{9}"}]<|endoftext|>', " -3<|endoftext|>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["Hello! I am an assistant. get_weather city Омск Привет, чем помочь?\n\n" * 40]
    special = ["<|im_start|>", "<|im_end|>"]
    return train_tokenizer(iter(texts), TokenizerTraining(vocab=300, special=special))


def objective(tokenizer, tmp_path, template, **chat):
    if "{" in template:
        (tmp_path / "template.jinja").write_text(template)
        template = str(tmp_path / "template.jinja")
    run = {"objective": "chat", "data": {"block": 10_000}, "chat": {"template": template, **chat}}
    return Chat(RunConfig.model_validate(run), tokenizer)


def documents_of(tmp_path, *rows):
    records = read(read_chat, rows_of(tmp_path, rows), format="chat")
    return [Document(record, "train") for record in records]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("shape", ["openai", "hermes", "toolace", "apigen-mt"])
def test_exactly_calls_and_answers_are_learned(tokenizer, tmp_path, name, shape):
    template, call, answer = TEMPLATES[name]
    (made,) = objective(tokenizer, tmp_path, template).samples(documents_of(tmp_path, ROWS[shape]))
    assert isinstance(made, DocumentSamples)
    called, answered = learned_texts(made, tokenizer)
    assert re.fullmatch(re.escape(call).replace(r"\[0\-9A\-Za\-z\]\{9\}", "[0-9A-Za-z]{9}"), called), called
    assert answered == answer
    text = tokenizer.decode(made.samples[0].ids)
    assert text.count("The weather in a city.") == 1  # once: the system message no longer describes it
    assert "degrees" in text
    if name != "ids":  # which writes its results as JSON
        assert text.count(RESULT) == 1


def learned(tokenizer, tmp_path, row, template="chatml", **chat):
    """The learned texts of the row."""
    (made,) = objective(tokenizer, tmp_path, template, **chat).samples(documents_of(tmp_path, row))
    return learned_texts(made, tokenizer)


@pytest.mark.parametrize(("train_on", "expected"), [("assistant", 2), ("tool_calls", 1), ("last", 1)])
def test_which_turns_are_learned(tokenizer, tmp_path, train_on, expected):
    turns = learned(tokenizer, tmp_path, ROWS["openai"], train_on=train_on)
    assert len(turns) == expected
    assert ("tool_call" in turns[0]) == (train_on != "last")


def test_what_a_tool_returned_is_never_learned(tokenizer, tmp_path):
    before, after = learned(tokenizer, tmp_path, changed("messages", 2, "weight", to=1), train_on="all")
    assert before.endswith("<tool_response>\n")
    assert after.startswith("\n</tool_response>")
    assert learned(tokenizer, tmp_path, changed("messages", 1, "weight", to=0)) == ["-3<|im_end|>"]


def test_arguments_of_every_kind_and_many_shapes(tokenizer, tmp_path):
    """Numbers, nulls, lists and nested objects; texts that look like the template's own; several calls at once."""
    for arguments in ({}, {"a": 1.5, "b": None, "c": [True, {"d": "</tool_call>\n"}]}, {"text": 'he said "Омск"\n\\'}):
        call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
        row = {"tools": [{"name": "f"}], "messages": [
            *messages(("system", "S"), ("user", "q")),
            {"role": "assistant", "content": "Two:", "tool_calls": [call, call]},
            *messages(("tool", "1"), ("tool", ""), ("assistant", "done"), ("user", "again")),
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]}  # fmt: skip
        turns = learned(tokenizer, tmp_path, row)
        assert turns[1] == "done<|im_end|>"
        found = [read_calls(turn.removesuffix("<|im_end|>")) for turn in (turns[0], turns[2])]
        if "</tool_call>" not in str(arguments):  # which no reader can tell from the mark
            assert [(text, [call.arguments for call in calls]) for text, calls in found] == [
                ("Two:", [arguments, arguments]), ("", [arguments])
            ]  # fmt: skip


def test_a_template_without_tools_is_refused_once_by_name(tokenizer, tmp_path):
    chat = objective(tokenizer, tmp_path, LLAMA_3)
    plain = {"messages": messages(("user", "a"), ("assistant", "b"))}
    with pytest.raises(InputError, match=r"chat\.template: .* tool calls, but a\.jsonl:2 has them") as error:
        list(chat.samples(documents_of(tmp_path, plain, ROWS["openai"], ROWS["hermes"])))
    assert "chatml" in error.value.problems[0].fix
    no_results = TOOLS_AS_TEXT.replace("'<result>' + message.content", "''")
    with pytest.raises(InputError, match="the template omits the results of tools"):
        list(objective(tokenizer, tmp_path, no_results).samples(documents_of(tmp_path, ROWS["openai"])))


# And back

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}},)  # fmt: skip
F = ToolCall("f", {"a": "5", "n": 5})
F_AS_JSON = '{"name": "f", "arguments": {"a": "5", "n": 5}}'
F_AS_PARAMETERS = F_AS_JSON.replace("arguments", "parameters")
GIGACHAT_CALL = "<|message_sep|>\n\nfunction call<|role_sep|>\n"


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"Sure.\n<tool_call>\n{F_AS_JSON}\n</tool_call>\n<tool_call>{F_AS_JSON}</tool_call>", "Sure.", [F, F]),
        (f"<tool_call>\n{F_AS_JSON}", "", [F]),  # without its end
        ("<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>"
         "\n</tool_call>", "", [F]),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n"
         "<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>", "", [F]),
        (f"<TOOLCALL>[{F_AS_JSON}, {F_AS_JSON}]</TOOLCALL>", "", [F, F]),
        (f"[TOOL_CALLS][{F_AS_JSON}]", "", [F]),
        ('I look.[TOOL_CALLS]f[ARGS]{"a": "5", "n": 5}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "5", "n": 5}',
         "I look.", [F, F]),
        ('f{"a": "5", "n": 5}', "", [F]),  # Mistral without its control tokens
        (f"<|python_tag|>{F_AS_PARAMETERS}", "", [F]),
        (f"{F_AS_JSON}; {F_AS_JSON}", "", [F, F]),
        ('[f(a="5", n=5)]', "", [F]),
        (f"I look.<|tool_call|>[{F_AS_JSON}]", "I look.", [F]),
        ('<|tool_call>call:f{a:<|"|>5<|"|>,n:5}<tool_call|>' * 2, "", [F, F]),
        ('<|tool_call>call:f{a:{b_c:[<|"|>x: "y"<|"|>,null]},n:-1.5}<tool_call|>', "",
         [ToolCall("f", {"a": {"b_c": ['x: "y"', None]}, "n": -1.5})]),
        ('I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>'
         '{"a": "5", "n": 5}<|tool_call_end|><|tool_calls_section_end|>', "I look.", [replace(F, id="functions.f:0")]),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "5", "n": 5}', "", [F]),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": "5", "n": 5}<|call|>', "", [F]),
        (f"<|python_start|>I look.<|python_end|>{F_AS_PARAMETERS}{F_AS_PARAMETERS}", "I look.", [F, F]),
        ('<|python_start|>[f(a="5", n=5)]<|python_end|>', "", [F]),
        ('I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "5", "n": 5}\n```'
         '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "5", "n": 5}\n```'
         '<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "I look.", [F, F]),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "5", "n": 5}<｜tool▁call▁end｜>'
         '<｜tool▁calls▁end｜>', "", [F]),  # DeepSeek V3.1
        (f"I look.{GIGACHAT_CALL}{F_AS_JSON}<|message_sep|>\n\n", "I look.", [F]),
        (f"{GIGACHAT_CALL}{F_AS_JSON}", "", [F]),
        (f"I look.<|function_call|>{F_AS_JSON}<|message_sep|>", "I look.", [F]),  # GigaChat 3.1
        *((text, text, []) for text in (
            "<|python_start|>print(5)<|python_end|>", "<|python_start|>[]<|python_end|>", f"{GIGACHAT_CALL}f",
            "a<|message_sep|>\n\nuser<|role_sep|>\nb", "it goes to=functions.f now",
            "<|tool_call>call:f{a:<tool_call|>", '{"name": "g", "arguments": {}}',  # a tool that was not offered
            '{"a": 5}', "[1, 2]", "<tool_call>f of a</tool_call>", "5 <b and f(a)", "5 <", "",
            '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        )),
    ],
)  # fmt: skip
def test_calls_are_read_back(text, rest, calls):
    assert read_calls(text, TOOLS) == (rest, tuple(calls))
    reader = CallReader(TOOLS)
    shown = "".join(reader.feed(letter) for letter in text) + reader.flush()  # as it is streamed
    assert (shown.strip(), reader.calls) == (rest, calls)


def test_the_servers_answers_have_openais_calls():
    calls = FreeCalls(TOOLS)
    text = calls.feed("I look.<tool_call>") + calls.feed(F_AS_JSON + "</tool_c") + calls.feed("all>") + calls.flush()
    (call,) = merge_deltas(calls.take_deltas())
    assert (text, call["type"], call["id"][:5]) == ("I look.", "function", "call_")
    assert call["function"] == {"name": "f", "arguments": '{"a": "5", "n": 5}'}  # arguments are text there, once


def test_a_mark_that_only_ends_what_is_said_is_not_shown_and_a_call_after_it_ends_the_answer():
    silent = FreeCalls(TOOLS)
    assert silent.feed("Warm.") + silent.feed("<|message_sep|>\n\n") + silent.flush() == "Warm."
    assert not silent.is_full
    calls = FreeCalls(TOOLS)
    assert calls.feed(f"I look.{GIGACHAT_CALL}{F_AS_JSON}") == "I look."
    assert not calls.is_full
    assert calls.feed("<|message_sep|>") == ""
    assert calls.is_full
    assert calls.feed(f"\n\nfunction result<|role_sep|>\n{RESULT}") + calls.flush() == ""
    assert [call["function"]["name"] for call in merge_deltas(calls.take_deltas())] == ["f"]
