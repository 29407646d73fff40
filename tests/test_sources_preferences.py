"""Preferences in every form that data sets have, paired and not."""

import re
from functools import partial

import pytest

from artel.text import Record, Rejected
from artel.text.formats.preferences import read_preferences
from support.reading import PROMPT, SHAREGPT, message, read_rows, sides

preferences = partial(read_rows, read_preferences, "preference")


USER, GOOD, BAD = message("user", "who?"), message("assistant", "me"), message("assistant", "no")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "who?", "chosen": "me", "rejected": "no"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": USER, "chosen": GOOD, "rejected": BAD},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "who?", "prompt_id": 3, "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "no"}},
        {"instruction": "who?", "input": "", "chosen": "me", "rejected": "no"},
        {"instruction": "who?", "output": ["me", "no"]},
        {"chosen": "\n\nHuman: who?\n\nAssistant: me", "rejected": "\n\nHuman: who?\n\nAssistant: no"},
    ],
)
def test_every_form_of_preferences(tmp_path, row):
    (record,) = preferences(tmp_path, row)
    assert sides(record) == (PROMPT, "me", "no")
    assert (record.text, record.group, record.origin) == ("who?\n\nme\n\nno", "who?", "a.jsonl:1")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "who?", "completion": "me", "label": True}, ("me", None)),
        ({"prompt": "who?", "completion": "me", "label": False}, (None, "me")),
        ({"prompt": [USER], "completion": [GOOD], "label": 1}, ("me", None)),
        ({"messages": [USER, GOOD], "label": False}, (None, "me")),
        ({"conversations": SHAREGPT, "label": True}, ("me", None)),
    ],
)
def test_unpaired_preferences(tmp_path, row, expected):
    (record,) = preferences(tmp_path, row)
    assert sides(record) == (PROMPT, *expected)
    assert (record.text, record.group) == ("who?\n\nme", "who?")


def test_preferences_with_system_history_thoughts_and_names(tmp_path):
    longer = [message("system", "s"), message("user", "a"), message("assistant", "b"), USER]
    rows = [
        {"system": "s", "prompt": longer[1:], "chosen": "<think>t</think>me", "rejected": "no"},
        {"chosen": [*longer, message("assistant", "<think>t</think>me")], "rejected": [*longer, BAD]},
        {"system": "s", "chosen": [*longer[1:], {**GOOD, "thinking": "t"}], "rejected": [*longer[1:], BAD]},
        {"system": "s", "history": [["a", "b"]], "instruction": "who?", "output": ["<think>t</think>me", "no"]},
    ]
    prompt = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "who?")]
    for record in preferences(tmp_path, *rows):
        assert sides(record) == (prompt, "me", "no")
        assert record.fields.chosen.thought == "t"
    named = {"question": "{{x}}?", "good": {"text": "me"}, "bad": "no"}
    mapping = {"prompt": "question", "chosen": "good.text", "rejected": "bad"}
    assert sides(*preferences(tmp_path, named, mapping=mapping, fill={"x": "who"})) == (PROMPT, "me", "no")


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "no_field", r"it has: prompt, chosen\); .*mapping: \{chosen: NAME"),
        ({"prompt": "a", "chosen": "b", "rejected": "b "}, "equal_answers", "same"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "equal_answers", "same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "empty_message", "rejected: message 1"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "no_answer", "rejected is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "no_messages", "rejected is int"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "empty_message", "prompt: message 1"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "no_prompt", r"'prompt' \(it has: question, chosen, rej"),
        ({"prompt": [USER, GOOD], "chosen": "b", "rejected": "c"}, "no_question", "ends with the assistant"),
        ({"chosen": [USER, GOOD], "rejected": [message("user", "else"), BAD]}, "no_single_answer", "user, assistant"),
        ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, GOOD]}, "no_single_answer", "cut both"),
        ({"prompt": "a", "chosen": USER, "rejected": BAD}, "no_single_answer", "chosen is user"),
        ({"system": "s", "chosen": [message("system", "t"), USER, GOOD],
          "rejected": [message("system", "t"), USER, BAD]}, "two_systems", "'system'"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "bad_label", "label is 'good'; write true"),
        ({"prompt": "a", "label": True}, "no_answer", "no answer"),
        ("3", "bad_json", "is int"),
    ],
)  # fmt: skip
def test_bad_preferences(tmp_path, row, reason, said):
    records = preferences(tmp_path, {"prompt": "who?", "chosen": "me", "rejected": "no"}, row)
    assert [type(item) for item in records] == [Record, Rejected]
    assert (records[1].origin, records[1].reason) == ("a.jsonl:2", reason)
    assert re.search(said, records[1].detail)
