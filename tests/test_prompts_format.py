"""Prompts for learning from rewards, in every form that data sets have, with their other columns."""

import datetime
import json
import re
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from artel.errors import InputError
from artel.text import Message, Prompt, Record, Rejected, ToolCall
from artel.text.formats.prompts import read_prompts
from support.reading import (
    PROMPT,
    SHAREGPT,
    checked,
    documents,
    message,
    parquet,
    read,
    read_rows,
    rows_of,
    turns,
    written,
)

prompts = partial(read_rows, read_prompts, "prompts")

USER, ANSWER, SYSTEM = message("user", "who?"), message("assistant", "me"), message("system", "s")
TOOL = {"name": "get", "parameters": {"type": "object", "properties": {}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "get", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": [USER]}, {}),
        ({"prompt": USER, "answer": 3}, {"answer": 3}),
        ({"prompt": json.dumps([USER])}, {}),
        ({"messages": [USER], "prompt": "who?"}, {"prompt": "who?"}),
        ({"prompt": [USER], "messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
        ({"conversations": SHAREGPT[:1], "id": None}, {"id": None}),
        ({"question": "who?", "answer": "me #### 1"}, {"answer": "me #### 1"}),
        ({"problem": "who?", "solution": "me", "level": 5}, {"solution": "me", "level": 5}),
        ({"query": "who?", "tests": [{"in": 1, "out": None}]}, {"tests": [{"in": 1, "out": None}]}),
        ({"instruction": "who?", "input": "", "output": "me", "system": ""}, {"output": "me"}),
    ],
)
def test_every_form_of_conversations(tmp_path, row, columns):
    (record,) = prompts(tmp_path, row)
    assert turns(record) == PROMPT
    assert (record.fields.columns, record.fields.text, record.fields.changes) == (columns, "", {})
    assert (record.text, record.group, record.origin) == ("who?", "who?", "a.jsonl:1")


def test_rows_of_verl_trl_and_gsm8k(tmp_path):
    verl = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0, "answer": "2+3=5\n#### 5"},
    }
    trl = {"prompt": "The sky is", "ground_truth": ["blue"], "length": 3}
    gsm8k = {"question": "2+3?", "answer": "2+3=5\n#### 5"}
    found = [record.fields for record in prompts(tmp_path, verl, trl, gsm8k)]
    asked = (Message("user", "2+3?"),)
    assert found == [
        Prompt(asked, columns={name: value for name, value in verl.items() if name != "prompt"}),
        Prompt(text="The sky is", columns={"ground_truth": ["blue"], "length": 3}),
        Prompt(asked, columns={"answer": "2+3=5\n#### 5"}),
    ]
    file = written(tmp_path, "a.parquet", parquet({name: [value, value] for name, value in verl.items()}))
    assert [record.fields for record in read(read_prompts, file, format="prompts")] == [found[0]] * 2


def test_systems_histories_and_inputs_belong_to_the_conversation(tmp_path):
    history = [["a", "b"]]
    rows = [
        {"system": "s", "prompt": [message("user", "a"), message("assistant", "b"), USER]},
        {"system": "s", "history": history, "instruction": "who?"},
        {"messages": [SYSTEM, message("user", "a"), message("assistant", "b"), USER]},
    ]
    expected = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "who?")]
    for record in prompts(tmp_path, *rows):
        assert turns(record) == expected
        assert (record.text, record.fields.columns) == ("s\n\na\n\nb\n\nwho?", {})
    (record,) = prompts(tmp_path, {"instruction": "Translate", "input": "{{x}}", "output": "y"}, fill={"x": "who?"})
    assert (turns(record), record.fields.columns) == ([("user", "Translate\n\nwho?")], {"output": "y"})


def test_fields_are_renamed(tmp_path):
    row = {"text": "{{x}} is", "gold": {"value": 5}, "prompt": "unused"}
    mapping = {"prompt": "text", "answer": "gold.value"}
    (record,) = prompts(tmp_path, row, mapping=mapping, fill={"x": "Sky"})
    assert record.fields == Prompt(text="Sky is", columns={"gold": {"value": 5}, "answer": 5})
    (record,) = prompts(tmp_path, {"prompt": "who?", "system": "s"}, mapping={"question": "prompt"})
    assert turns(record) == [("system", "s"), *PROMPT]
    row = {"prompt": "a", "conversations": SHAREGPT[:1], "instruction": "c"}
    assert prompts(tmp_path, row, converter="messages")[0].fields.text == "a"
    assert turns(*prompts(tmp_path, row, converter="sharegpt")) == PROMPT
    assert turns(*prompts(tmp_path, row, converter="alpaca")) == [("user", "c")]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"messages": [USER, ANSWER]}, "me"),
        ({"prompt": "who?", "messages": [USER, ANSWER], "answer": None}, "me"),
        ({"messages": [USER, ANSWER], "answer": "you"}, "you"),
        ({"messages": [USER, message("assistant", "<think>t</think>me")]}, "me"),
        ({"conversations": SHAREGPT}, "me"),
        ({"messages": [USER, CALL, message("tool", "3"), ANSWER], "tools": [TOOL]},
         '{"name": "get", "arguments": {}}\n\nme'),
    ],
)  # fmt: skip
def test_what_the_assistant_says_last_becomes_the_answer(tmp_path, row, answer):
    (record,) = prompts(tmp_path, row)
    assert (turns(record), record.text) == (PROMPT, "who?")
    assert record.fields.columns["answer"] == answer
    assert record.fields.changes == {"answers_cut": 1}


def test_cut_answers_are_counted_once(tmp_path):
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]}, {"messages": [message("user", "a")]}]
    kept, ledger = documents(sources=[{"path": str(rows_of(tmp_path, rows)), "format": "prompts"}])
    assert [document.record.fields.changes for document in kept] == [{}, {}]
    assert ledger.to_json()["changed"] == {"answers_cut": 1}


def test_tools_of_the_row_and_the_source(tmp_path):
    rows = [
        {"prompt": [USER], "tools": [TOOL], "id": 1},
        {"prompt": [USER], "tools": json.dumps([TOOL]), "id": 1},
        {"prompt": [message("system", f"You are a function calling AI model. {json.dumps([TOOL])}"), USER], "id": 1},
        {"prompt": [USER], "id": 1},
    ]  # fmt: skip
    for record in prompts(tmp_path, *rows, tools=[TOOL]):
        assert record.fields == Prompt(
            (Message("user", "who?"),), "", ({"type": "function", "function": TOOL},), {"id": 1}
        )
    (record,) = prompts(tmp_path, {"messages": [USER, CALL, message("tool", "3")], "tools": [TOOL]})
    assert record.fields.messages[1] == Message("assistant", "", tool_calls=(ToolCall("get", {}),))
    assert turns(record)[-1] == ("tool", "3")


def test_functions_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "prompt_functions.py").write_text(
        "def text(row): return row['a'] + ' is'\n"
        "def messages(row): return [{'role': 'user', 'content': row['a']}]\n"
        "def row(row): return {'question': row['a'], 1: (2, 3)}\n"
        "def nothing(row): pass\n"
        "def fails(row): return row['c']\n"
    )
    monkeypatch.chdir(tmp_path)
    row = {"a": "who?", "messages": [USER, ANSWER]}

    def converted(name):
        (item,) = prompts(tmp_path, row, converter=f"prompt_functions:{name}")
        return item

    assert converted("text").fields == Prompt(text="who? is", columns=row)
    assert converted("messages").fields == Prompt((Message("user", "who?"),), columns=row)
    assert converted("row").fields == Prompt((Message("user", "who?"),), columns={"1": [2, 3]})
    assert (converted("nothing").reason, converted("fails").reason) == ("no_messages", "converter_failed")
    with pytest.raises(InputError, match="no function 'zzz'"):
        checked(tmp_path / "a.jsonl", format="prompts", converter="prompt_functions:zzz")
    with pytest.raises(InputError, match="write auto, messages, sharegpt, alpaca, or module:function"):
        checked(tmp_path / "a.jsonl", format="prompts", converter="zzz")


def test_columns_of_parquet_become_json(tmp_path):
    columns = {
        "question": ["who?", "what?", None],
        "day": [datetime.date(2024, 2, 3)] * 3,
        "time": [datetime.datetime(2024, 2, 3, 4, 5)] * 3,
        "took": [datetime.timedelta(seconds=5)] * 3,
        "price": [Decimal("1.50")] * 3,
        "data": ["да".encode(), b"\xff", b""],
        "score": [float("nan"), None, 1.0],
        "tests": [[{"in": 1, "out": None}], [], None],
    }
    file = written(tmp_path, "a.parquet", parquet(columns))
    first, second, third = read(read_prompts, file, format="prompts")
    assert first.fields.columns == {
        "day": "2024-02-03", "time": "2024-02-03T04:05:00", "took": "0:00:05", "price": "1.50", "data": "да",
        "score": None, "tests": [{"in": 1, "out": None}],
    }  # fmt: skip
    assert (second.origin, second.reason) == ("a.parquet[1]", "bad_column")
    assert re.search("'data' is not JSON: it holds bytes that are not text in UTF-8; convert it, or", second.detail)
    assert (third.origin, third.reason) == ("a.parquet[2]", "no_prompt")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json"])
def test_tables_and_arrays(tmp_path, name):
    delimiter = "\t" if name == "a.tsv" else ","
    content = json.dumps([{"question": "who?", "answer": "5"}]) if name == "a.json" else (
        f"question{delimiter}answer\nwho?{delimiter}5\n"
    )  # fmt: skip
    file = written(tmp_path, name, content)
    checked(file, format="prompts")
    (record,) = read(read_prompts, file, format="prompts")
    assert (turns(record), record.fields.columns) == (PROMPT, {"answer": "5"})


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"text": "a", "label": "b"}, "no_prompt",
         r"no field 'prompt' \(it has: text, label\); .*mapping: \{question: NAME\}, or \{prompt: NAME\} for a text"),
        ({"prompt": None}, "no_prompt", "no field 'prompt'"),
        ({"prompt": " "}, "no_prompt", "the prompt is empty; fill it in"),
        ({"prompt": []}, "no_question", "the prompt is empty; end it"),
        ({"prompt": 3}, "no_messages", "prompt is int; write a list"),
        ({"question": ""}, "empty_message", "prompt: message 1"),
        ({"question": 3}, "no_text", "'question' is int; write it as text"),
        ({"messages": [SYSTEM]}, "no_question", "ends with the system; end it with what the user asks"),
        ({"messages": [SYSTEM, ANSWER]}, "no_question", "ends with the assistant"),
        ({"system": "s", "messages": [SYSTEM, USER]}, "two_systems", "message 2 is a second system message"),
        ({"prompt": "a", "system": "s"}, "no_conversation", r"a system message, but .*mapping: \{question: prompt\}"),
        ({"prompt": "a", "tools": [TOOL]}, "no_conversation", "tools, but its prompt is a text to continue"),
        ({"prompt": "[{"}, "bad_json", "prompt is not JSON"),
        ({"prompt": [USER], "tools": 3}, "bad_tools", "not a function"),
        ("3", "bad_json", "is int"),
    ],
)  # fmt: skip
def test_bad_prompts(tmp_path, row, reason, said):
    records = prompts(tmp_path, {"question": "who?"}, row)
    assert [type(item) for item in records] == [Record, Rejected]
    assert (records[1].origin, records[1].reason) == ("a.jsonl:2", reason)
    assert re.search(said, records[1].detail)


def test_prompts_are_cleaned_and_columns_stay(tmp_path):
    rows = [
        {"prompt": "a\x00 \r\nb", "x": "a\x00"},
        {"question": "who\x00?", "x": "mail@example.com"},
        {"question": "mail@example.com", "x": "mail@example.com"},
    ]
    source = {"path": str(rows_of(tmp_path, rows)), "format": "prompts"}
    kept, _ = documents(sources=[source], clean={"pii": {"mask": True}})
    assert [document.record.text for document in kept] == ["a \nb", "who?", "[EMAIL]"]
    assert [document.record.fields.columns["x"] for document in kept] == ["a\x00", *["mail@example.com"] * 2]
    assert kept[0].record.fields.text == "a \nb"
    assert kept[1].record.fields.messages == (Message("user", "who?"),)


def test_equal_prompts_are_duplicates_whatever_their_columns(tmp_path):
    rows = [
        {"question": "who?", "answer": 1},
        {"question": "who?", "answer": 2},
        {"question": "who?", "tools": [TOOL]},
        {"prompt": "who?"},
        {"prompt": "who?", "answer": 1},
    ]
    source = {"path": str(rows_of(tmp_path, rows)), "format": "prompts"}
    kept, ledger = documents(sources=[source])
    assert [document.record.origin.rpartition(":")[2] for document in kept] == ["1", "3", "4"]
    assert ledger.total.dropped == {"duplicate": 2}
    kept, _ = documents(sources=[source], dedup={"exact": False})
    assert len(kept) == 5


def test_equal_prompts_go_into_the_same_split(tmp_path):
    rows = [{"question": f"who is {number % 20}?", "answer": number} for number in range(40)]
    source = {"path": str(rows_of(tmp_path, rows)), "format": "prompts"}
    kept, _ = documents(sources=[source], dedup={"exact": False}, validation=0.5)
    splits = [document.split for document in kept]
    assert splits[:20] == splits[20:]
    assert set(splits) == {"train", "validation"}


def test_prompts_as_rows_of_a_benchmark(tmp_path):
    from artel.text.benchmark_rows import query_and_labels

    answered, unanswered = prompts(tmp_path, {"question": "who?", "answer": "me"}, {"prompt": "a", "answer": 3})
    assert query_and_labels(answered) == ("who?", ["me"])
    assert query_and_labels(unanswered) == ("a", [])


def test_an_objective_that_learns_from_other_records_is_refused(tmp_path):
    from artel.config import parse_run

    rows_of(tmp_path, [{"question": "who?"}])
    tree = {"data": {"sources": [{"path": str(Path(tmp_path, "a.jsonl")), "format": "prompts"}]}, "objective": "chat"}
    with pytest.raises(InputError, match=r"yields prompts, but objective chat learns from conversations"):
        parse_run(tree, {}, {})
