"""Conversations and preferences: every form of row, and each thing that can be wrong."""

import gzip
import json
import re
from functools import partial
from pathlib import Path

import pytest
import zstandard

from artel.config import DataConfig
from artel.errors import InputError
from artel.text import Conversation, Message, Preference, Record, Rejected, check_sources
from artel.text.formats.chat import read_chat
from support.reading import MESSAGES, SHAREGPT, documents, message, read, read_rows, rows_of, turns

ASKED = [("user", "who?"), ("assistant", "me")]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


chat = partial(read_rows, read_chat, "chat")


# Forms of conversations


@pytest.mark.parametrize(
    ("row", "converter"),
    [
        ({"messages": MESSAGES}, "messages"),
        ({"messages": [message("User ", "who?"), message("BOT", "me")], "id": 3}, "messages"),
        ({"messages": [message("prompter", [{"type": "text", "text": "who"}, "?"]),
                       message("model", [{"type": "text", "value": "me"}])]}, "messages"),
        ({"conversations": SHAREGPT}, "sharegpt"),
        ({"conversation": SHAREGPT}, "sharegpt"),
        ({"conversations": MESSAGES}, "sharegpt"),
        ({"messages": {"role": ["user", "bot"], "content": ["who?", "me"]}}, "dialog"),
        ({"conversation": {"from": ["human", "gpt"], "value": ["who?", "me"]}}, "dialog"),
        ({"role": ["user", "bot"], "content": ["who?", "me"]}, "dialog"),
        ({"messages": ["who?", "me"]}, "dialog"),
        ({"instruction": "who?", "input": "", "output": "me"}, "alpaca"),
        ({"instruction": "who?", "output": "me", "input": None, "system": None, "history": []}, "alpaca"),
        ({"instruction": "", "input": "who?", "output": "me"}, "alpaca"),
        ({"instruction": "who?", "instances": [{"input": "", "output": "me"}]}, "alpaca"),
        ({"prompt": {"role": "prompter", "text": "who?",
                     "replies": [{"role": "assistant", "text": "me"}]}}, "oasst"),
        ({"dialogues": [{"chat": [message("operator", "who?"), message("char", "me")]}]}, "character"),
        ({"prompt": "who?", "completion": "me"}, "completion"),
        ({"prompt": [message("user", "who?")], "completion": [message("assistant", "me")]}, "completion"),
    ],
)  # fmt: skip
def test_every_form_is_told_by_its_fields_and_by_its_name(tmp_path, row, converter):
    for named in ("auto", converter):
        (record,) = chat(tmp_path, row, converter=named)
        assert turns(record) == ASKED
        assert (record.text, record.group) == ("who?\n\nme", "who?")
        assert record.origin == "a.jsonl:1" or re.fullmatch(r"a\.jsonl:1 \((instances|dialogues)\[0\]\)", record.origin)


def test_answers_in_a_prompt_are_not_learned(tmp_path):
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    (record,) = chat(tmp_path, {"prompt": prompt, "completion": [message("assistant", "d")]})
    assert [item.trained for item in record.fields.messages if item.role == "assistant"] == [False, None]


def test_nulls_that_datasets_wrote_into_json_lines_are_no_arguments(tmp_path):
    """`Dataset.to_json` gives each message, and the arguments of each call, the keys of all rows."""
    padded = {"tool_calls": None, "tool_call_id": None, "name": None}
    arguments = {"city": "Omsk", "unit": None}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked, answer = message("user", "who?"), message("tool", "-3")
    rows = [
        {"messages": [{**asked, **padded}, {**message("assistant", None), **padded, "tool_calls": [call]},
                      {**answer, **padded, "tool_call_id": "1"}, {**message("assistant", "me"), **padded}]},
        {"messages": [asked, message("assistant", None, tool_calls=[call]), answer, message("assistant", "me")]},
    ]  # fmt: skip
    found = [record.fields.messages[1].tool_calls[0].arguments for record in chat(tmp_path, *rows)]
    assert found == [{"city": "Omsk"}, arguments]


def test_system_messages_history_and_input(tmp_path):
    row = {
        "system": "be brief", "history": [["a", "b"], ["c", "d"]], "instruction": "add", "input": "1, 2", "output": "3",
    }  # fmt: skip
    records = chat(tmp_path, row, {"system": "be brief", "conversations": SHAREGPT})
    assert turns(records[0]) == [
        ("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"),
        ("user", "add\n\n1, 2"), ("assistant", "3"),
    ]  # fmt: skip
    assert records[0].group == "a"
    assert turns(records[1]) == [("system", "be brief"), *ASKED]


def test_instances_are_conversations_of_their_own(tmp_path):
    instances = [{"input": "1", "output": "one"}, {"input": "2"}, {"input": "3", "output": "three"}]
    records = chat(tmp_path, {"instruction": "say", "instances": instances})
    assert [item.origin for item in records] == [f"a.jsonl:1 (instances[{number}])" for number in range(3)]
    assert [item.group for item in records if isinstance(item, Record)] == ["say\n\n1", "say\n\n3"]
    assert records[1].reason == "no_field"
    assert "instances[1] has no field 'output' (it has: input)" in records[1].detail


CHARACTER = {
    "name": "Bob", "context": "A robot with a defect.", "greeting": "Beep!", "topics": ["work"],
    "example_dialogue": [message("user", "who?"), message("char", "me")],
}  # fmt: skip


def test_characters(tmp_path):
    talk = [message("user", "well?"), message("char", "broken"), message("operator", "mend"), message("bot", "beep")]
    dialogues = [{"chat": talk, "model_name": "gpt-4", "topic": "work"}, {"chat": []}, {"topic": "none"}]
    records = chat(
        tmp_path, CHARACTER | {"dialogues": dialogues}, CHARACTER, CHARACTER | {"context": "Bob is a robot."},
        {"name": "Bob", "dialogues": []},
    )  # fmt: skip
    who = ("system", "Bob\n\nA robot with a defect.")
    answers = [("user", "well?"), ("assistant", "broken"), ("user", "mend"), ("assistant", "beep")]
    assert turns(records[0]) == [who, *answers]
    assert [(item.origin, item.reason) for item in records[1:3]] == [
        ("a.jsonl:1 (dialogues[1])", "no_question"), ("a.jsonl:1 (dialogues[2])", "no_messages"),
    ]  # fmt: skip
    assert turns(records[3]) == [who, *ASKED]
    assert turns(records[4]) == [("system", "Bob is a robot."), *ASKED]
    assert (records[5].origin, records[5].reason) == ("a.jsonl:4", "empty_conversation")


def test_the_main_branch_of_a_tree(tmp_path):
    def node(role, text, *replies, **more):
        return {"role": role, "text": text, "replies": list(replies), **more}

    second = node(
        "assistant", "best", node("prompter", "more", deleted=True), node("prompter", "and?"), node("prompter", "x"),
        rank=0,
    )  # fmt: skip
    gone = node("assistant", "gone", rank=-1, deleted=True)
    tree = node("prompter", "who?", node("assistant", "unranked"), node("assistant", "worse", rank=1), gone, second)
    records = chat(tmp_path, {"prompt": tree}, {"prompt": tree | {"deleted": True}}, {"prompt": tree | {"replies": []}})
    assert turns(records[0]) == [("user", "who?"), ("assistant", "best")]  # and? has no answer
    assert [item.reason for item in records[1:]] == ["deleted", "no_answer"]


def test_thoughts(tmp_path):
    want = Message("assistant", "4", "2 and 2")
    asked = message("user", "2+2?")
    rows = [
        {"messages": [asked, message("assistant", "<think>\n2 and 2\n</think>\n\n4")]},
        {"messages": [asked, message("assistant", "4", reasoning_content="2 and 2")]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", "thinking": "2 and 2"}]},
        {"instruction": "2+2?", "reasoning": "2 and 2", "output": "4"},
        {"instruction": "2+2?", "thinking": "2 and 2", "output": "4"},
        {"messages": [asked, message("assistant", "2 and 2\n</think>\n\n4")]},  # the generation prompt opened it
    ]
    for item in chat(tmp_path, *rows):
        assert item.fields.messages[-1] == want
        assert item.text == "2+2?\n\n2 and 2\n\n4"
    empty, within, opened = chat(
        tmp_path,
        *({"messages": [asked, message("assistant", text)]}
          for text in ("<think>\n\n</think>\n\n4", "4 <think>no</think>", "<think>2 and")),
    )  # fmt: skip
    assert empty.fields.messages[-1] == Message("assistant", "4")
    assert within.fields.messages[-1] == Message("assistant", "4 <think>no</think>")
    assert opened.reason == "open_thought"


@pytest.mark.parametrize("name", ["loss_weight", "weight", "train"])
def test_what_is_learned(tmp_path, name):
    values = [1.0, 0, True, False, None]
    rows = [{"messages": [message("user", "a"), message("assistant", "b", **{name: value})]} for value in values]
    result = [item.fields.messages[1].trained for item in chat(tmp_path, *rows)]
    assert result == [True, False, True, False, None]


def test_turns_of_one_role_and_unanswered_ones(tmp_path):
    talk = [message(role, text) for role, text in (
        ("system", " "), ("assistant", "hello"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"),
        ("tool", "1"), ("tool", "2"), ("assistant", "e"), ("user", "left"), ("tool", "alone"),
    )]  # fmt: skip
    (record,) = chat(tmp_path, {"messages": talk})
    assert turns(record) == [
        ("assistant", "hello"), ("user", "a\n\nb"), ("assistant", "c\n\nd"), ("tool", "1"), ("tool", "2"),
        ("assistant", "e"),
    ]  # fmt: skip
    assert record.group == "a\n\nb"


def test_fill_and_mapping(tmp_path):
    row = {"q": "I am {{ who }}", "data": {"answer": "{{who}} is {{unknown}}"}, "output": "not this"}
    (record,) = chat(tmp_path, row, mapping={"instruction": "q", "output": "data.answer"}, fill={"who": "Артель"})
    assert turns(record) == [("user", "I am Артель"), ("assistant", "Артель is {{unknown}}")]
    talk = [{"speaker": "human", "text": "who?"}, {"speaker": "bot", "text": "me"}]
    mapping = {"messages": "talk", "role": "speaker", "content": "text"}
    assert turns(*chat(tmp_path, {"talk": talk}, mapping=mapping)) == ASKED
    columns = {"speaker": ["user", "bot"], "text": ["who?", "me"]}
    assert turns(*chat(tmp_path, columns, mapping=mapping)) == ASKED
    (lacking,) = chat(tmp_path, {"instruction": "who?", "output": "me"}, mapping={"output": "answer"})
    assert lacking.reason == "no_field"
    assert "has no field 'answer' (it has: instruction)" in lacking.detail


# What is wrong with conversations


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ("[1]", "bad_json", "is list; write an object"),
        ('{"messages": [', "bad_json", "not JSON"),
        ({}, "unknown_form", r"it has: none\); .*mapping"),
        ({"question": "a", "answer": "b"}, "unknown_form", r"it has: question, answer\).*converter: module:function"),
        ({"messages": "who?"}, "no_messages", "messages is str; write a list"),
        ({"messages": []}, "empty_conversation", "no messages"),
        ({"messages": [1]}, "no_messages", r"messages\[0\] is int"),
        ({"messages": {"role": "user"}}, "no_messages", "without lists"),
        ({"messages": {"role": ["user"], "content": []}}, "uneven_columns", "1 role, 0 content"),
        ({"messages": [{"who": "user", "content": "a"}]}, "no_field",
         r"messages\[0\] has no field 'role' \(it has: who, content\); write mapping: \{role: NAME\}"),
        ({"messages": [message("user", 3)]}, "no_text", "content of message 1 is int"),
        ({"messages": [message("user", [{"type": "image_url"}])]}, "not_text", "image_url"),
        ({"messages": [*MESSAGES, message("narrator", "x")]}, "unknown_role", "message 3 .*'narrator'; known are syst"),
        ({"messages": [message(None, "x")]}, "unknown_role", "None"),
        ({"messages": [message("system", "a"), message("system", "b"), *MESSAGES]}, "two_systems", "message 2"),
        ({"system": "a", "messages": [message("system", "b"), *MESSAGES]}, "two_systems", "message 2"),
        ({"messages": [*MESSAGES, message("system", "b")]}, "late_system", "message 3.*not the first"),
        ({"messages": [message("user", " \n"), message("assistant", "b")]}, "empty_message", r"message 1 \(user\)"),
        ({"messages": [message("user", "a"), message("assistant", None)]}, "empty_message", "message 2"),
        ({"messages": [message("user", "a"), message("assistant", "<think>b</think>")]}, "empty_message", "message 2"),
        ({"messages": [message("user", "a"), message("assistant", "", tool_calls=[1])]}, "bad_tool_call", "message 2"),
        ({"messages": [message("user", "a"), message("assistant", "b"), message("user", None, tool_calls=[CALL])]},
         "calls_of_user", r"message 3 has tool_calls, but its role is user; are the roles swapped\?"),
        ({"messages": [message("user", "a", function_call=CALL["function"]), message("assistant", "b")]},
         "calls_of_user", "message 1 has function_call"),
        ({"messages": [message("user", "a", weight="1")]}, "bad_weight", "weight of message 1 is '1'; write 1"),
        ({"messages": [message("user", "a"), message("assistant", "b", weight=0), message("assistant", "c")]},
         "mixed_weights", "message 3"),
        ({"messages": [message("system", "a"), message("assistant", "b")]}, "no_question", "user"),
        ({"messages": [message("system", "a"), message("user", "b")]}, "no_answer", "no answer"),
        ({"messages": [message("assistant", "hello"), message("user", "b")]}, "no_answer", "no answer"),
        ({"instruction": "a"}, "no_field", r"no field 'output' \(it has: instruction\); write mapping: \{output: NAME"),
        ({"instruction": "a", "output": 3}, "no_text", "'output' is int"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "bad_history", "question, answer"),
        ({"instruction": "a", "instances": []}, "empty_conversation", "'instances' is empty"),
        ({"prompt": {"role": "prompter", "replies": 3}}, "no_field", "message 1 of .* no field 'text'"),
    ],
)  # fmt: skip
def test_bad_conversations_cost_themselves_only(tmp_path, row, reason, said):
    records = chat(tmp_path, {"messages": MESSAGES}, row, {"messages": MESSAGES})
    assert [type(item) for item in records] == [Record, Rejected, Record]
    assert (records[1].origin, records[1].reason, records[1].set_name) == ("a.jsonl:2", reason, "set")
    assert re.search(said, records[1].detail)


def test_a_converter_that_does_not_fit_the_rows(tmp_path):
    (record,) = chat(tmp_path, {"messages": MESSAGES}, converter="sharegpt")
    assert "has no field 'conversations' (it has: messages)" in record.detail
    (record,) = chat(tmp_path, {"messages": MESSAGES}, converter="oasst")
    assert "has no object 'prompt'" in record.detail


# Files


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"])
@pytest.mark.parametrize("array", [False, True])
def test_lines_and_arrays_plain_and_compressed(tmp_path, suffix, array):
    rows = [{"messages": MESSAGES}, {"messages": ["мама?", "раму"]}]
    if array and not suffix.startswith(".json."):
        suffix = ".json"
    text = json.dumps(rows, indent=1) if array else "\n\n".join(map(json.dumps, rows))
    file = tmp_path / f"a{suffix}"
    file.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(file.suffix, bytes)(text.encode()))
    records = read(read_chat, file, format="chat")
    assert [turns(item) for item in records] == [ASKED, [("user", "мама?"), ("assistant", "раму")]]
    assert [item.origin for item in records] == [
        f"{file.name}{place}" for place in (("[0]", "[1]") if array else (":1", ":3"))
    ]


def test_large_rows_and_their_bound(tmp_path):
    large = {"messages": [message("user", "who?"), message("assistant", "x" * 1_000_000)]}
    (record,) = chat(tmp_path, large)
    assert len(record.fields.messages[1].content) == 1_000_000
    with pytest.raises(InputError, match=r"a\.jsonl:1.*data\.max_document"):
        chat(tmp_path, large, max_document=1_000_000)
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(json.dumps([large], indent=1).encode()))
    with pytest.raises(InputError, match=r"a\.json\.gz.*data\.max_document"):
        read(read_chat, packed, format="chat", max_document=1_000_000)


def test_folders_and_tables(tmp_path):
    rows_of(tmp_path, [{"messages": MESSAGES}], "b.json")
    rows_of(tmp_path, [{"messages": MESSAGES}], "a.ndjson")
    (tmp_path / "notes.txt").write_text("not of it")
    kept, _ = documents(sources=[{"path": str(tmp_path), "format": "chat"}], dedup={"exact": False})
    assert [Path(document.record.origin).name for document in kept] == ["a.ndjson:1", "b.json:1"]
    table = tmp_path / "a.csv"
    table.write_text("instruction,output\na,b\n")
    with pytest.raises(InputError, match=r"data\.sources\.0\.path.*a\.csv is a table(.|\n)*JSON lines"):
        check_sources(DataConfig.model_validate({"sources": [{"path": str(table), "format": "chat"}]}))


# From rows to documents


def test_turns_are_cleaned_and_compared_by_role(tmp_path):
    rows = [
        {"messages": [message("user", "who?\r\n"), message("assistant", "<think>t\x00</think> me  ")]},
        {"messages": [message("user", "who?"), message("assistant", "<think>t</think>me")]},
        {"messages": [message("user", "who?"), message("assistant", "t\n\nme")]},
        {"messages": [message("user", "who?"), message("assistant", "\x00")]},
    ]
    kept, ledger = documents(sources=[{"path": str(rows_of(tmp_path, rows)), "format": "chat"}])
    assert kept[0].record.fields == Conversation((Message("user", "who?"), Message("assistant", "me", "t")))
    assert (kept[0].record.text, kept[0].record.group) == ("who?\n\nt\n\nme", "who?")
    assert ledger.changes["control_removed"] == ledger.changes["trailing_space_removed"] == 1
    assert kept[1].record.fields.messages[1] == Message("assistant", "t\n\nme")
    assert ledger.total.dropped == {"duplicate": 1, "empty": 1}


CODE = "    for name in names:\n        print(name)  \n\n\n\n\n    return None"


@pytest.mark.parametrize(
    ("said", "thought", "content"),
    [
        (CODE, "", CODE),
        (f"<think>\n{CODE}\n</think>\n\n{CODE}\n", CODE, CODE),
        (f"<think> \n \n{CODE}\n\n</think> \n{CODE}", CODE, CODE),
        ("<think> why </think> so", "why", "so"),
        ("<think></think>\tx", "", "x"),
        ("\n\n<think>t</think>\n\n  \n\tx", "t", "\tx"),
    ],
)
def test_white_space_within_answers_and_thoughts_stays(tmp_path, said, thought, content):
    rows = [{"messages": [message("user", f"  {CODE}"), message("assistant", said)]}]
    (kept,), _ = documents(sources=[{"path": str(rows_of(tmp_path, rows)), "format": "chat"}])
    assert kept.record.fields.messages == (Message("user", f"  {CODE}"), Message("assistant", content, thought))


def test_preferences_that_cleaning_makes_equal(tmp_path):
    rows = [
        {"prompt": "who?", "chosen": "me\x00", "rejected": "no"},
        {"prompt": "who?", "chosen": "no", "rejected": "me"},
        {"prompt": "who?", "chosen": "me\x00", "rejected": "me"},
        {"prompt": "who?", "completion": "me", "label": True},
        {"prompt": "who?", "completion": "me", "label": False},
    ]
    kept, ledger = documents(sources=[{"path": str(rows_of(tmp_path, rows)), "format": "preference"}])
    assert kept[0].record.fields == Preference(
        (Message("user", "who?"),), Message("assistant", "me"), Message("assistant", "no")
    )
    assert len(kept) == 4
    assert ledger.total.dropped == {"equal_answers": 1}


def test_turns_that_nothing_answers_are_counted(tmp_path):
    file = rows_of(tmp_path, [{"messages": [message("user", "a"), message("assistant", "b"), message("user", "c")]}])
    (document,), ledger = documents(sources=[{"path": str(file), "format": "chat"}])
    assert [turn.content for turn in document.record.fields.messages] == ["a", "b"]
    assert ledger.to_json()["changed"] == {"turns_left_out": 1}
