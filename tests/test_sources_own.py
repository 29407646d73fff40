"""Converters of the user's own: module:function."""

import sys

import pytest

from artel.config import DataConfig
from artel.errors import InputError
from artel.text import check_sources, source_fingerprint
from artel.text.formats.chat import read_chat
from artel.text.formats.preferences import read_preferences
from support.reading import PROMPT, read, rows_of, sides, turns


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_rows.py").write_text(
        "number = 3\n"
        "def talk(row):\n"
        "    return [{'role': 'human', 'content': row['q']}, {'role': 'bot', 'content': row['a']}]\n"
        "def wrapped(row):\n"
        "    return {'messages': talk(row)}\n"
        "def nothing(row):\n"
        "    return None\n"
        "def compared(row):\n"
        "    return {'prompt': row['q'], 'chosen': row['a'], 'rejected': 'no'}\n"
    )
    (tmp_path / "my_broken.py").write_text("import sys\nsys.exit(3)\n")
    yield tmp_path
    for name in ("my_rows", "my_broken"):
        sys.modules.pop(name, None)


def test_an_own_converter(own):
    rows = [{"q": "who?", "a": "me"}, {"q": "who?"}]
    for name in ("talk", "wrapped"):
        record, failed = read(read_chat, rows_of(own, rows), format="chat", converter=f"my_rows:{name}")
        assert turns(record) == [("user", "who?"), ("assistant", "me")]
        assert (failed.origin, failed.reason) == ("a.jsonl:2", "converter_failed")
        assert f"my_rows:{name} failed on it: KeyError: 'a', in talk (" in failed.detail
        assert "my_rows.py:" in failed.detail
    (record,) = read(read_chat, rows_of(own, rows[:1]), format="chat", converter="my_rows:nothing")
    assert (record.reason, record.detail[:44]) == ("no_messages", "what my_rows:nothing returned is NoneType; w")
    (pair,) = read(read_preferences, rows_of(own, rows[:1]), format="preference", converter="my_rows:compared")
    assert sides(pair) == (PROMPT, "me", "no")


def test_a_changed_converter_is_another_source(own):
    source = {"path": str(rows_of(own, [{"q": "who?", "a": "me"}])), "format": "chat", "converter": "my_rows:talk"}
    data = DataConfig.model_validate({"sources": [source]})
    before = source_fingerprint(data)
    assert source_fingerprint(data) == before
    (own / "my_rows.py").write_text("def talk(row): ...\n")
    assert source_fingerprint(data) != before


@pytest.mark.parametrize(
    ("kind", "converter", "said"),
    [
        ("chat", "my_rows:none", "'my_rows' has no function 'none'\n.*define none"),
        ("chat", "my_rows:number", "'my_rows' has no function 'number'"),
        ("chat", "my_none:talk", "'my_none' cannot be imported: ModuleNotFoundError"),
        ("chat", "my_broken:talk", "'my_broken' cannot be imported: sys.exit was called: 3"),
        ("chat", ":talk", "cannot be imported"),
        ("chat", "alpca", "no converter 'alpca'.*\n.*write auto, messages, alpaca"),
        ("preference", "character", "no converter 'character' of format preference"),
    ],
)
def test_converters_that_are_not_there(own, kind, converter, said):
    source = {"path": str(rows_of(own, [{}])), "format": kind, "converter": converter}
    with pytest.raises(InputError, match=said) as error:
        check_sources(DataConfig.model_validate({"sources": [source]}))
    assert error.value.problems[0].where == "data.sources.0.converter"
