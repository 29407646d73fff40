"""Two fields of a JSON line: what simdjson gives is what orjson gives."""

import importlib.util
import sys

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from artel.text.formats.jsonl import line_parser

with_simdjson = pytest.mark.skipif(
    sys.version_info >= (3, 14) and importlib.util.find_spec("simdjson") is None, reason="no wheel for this Python"
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text() | VALUES,
        "meta": st.dictionaries(st.just("pile_set_name"), VALUES) | VALUES,
        "other": VALUES,
    },
)
PARSE = line_parser("text", "meta")


@with_simdjson
@given(ENTRIES | VALUES)
@example({"text": "Привет, 世界 😀 \0", "meta": {"pile_set_name": "Книги", "deep": [{"a": [1, 2.5, None]}]}})
@example({"text": "a", "meta": "web"})
@example({"meta": {}})
@example([{"text": "a"}])
def test_the_fields_asked_for_are_those_of_orjson(entry):
    for line in (orjson.dumps(entry), orjson.dumps(entry, option=orjson.OPT_INDENT_2), orjson.dumps(entry) + b"\r\n"):
        whole, result = orjson.loads(line), PARSE(line)
        if isinstance(whole, dict) and isinstance(whole.get("text"), str):
            assert result.keys() <= whole.keys()
            assert result["text"] == whole["text"]
            assert ("meta" in result) == ("meta" in whole)
            assert result.get("meta") == whole.get("meta")
        else:
            assert result == whole


@with_simdjson
@given(st.binary() | st.text().map(lambda text: b'{"text":"' + text.encode("utf-8", "surrogatepass") + b'"}'))
@example(b'{"text":"\\ud800"}')
@example(b'{"text":"\xed\xa0\x80"}')
@example(b'{"text":"a","text":"b"}')
@example(b'{"text":"a","meta":{"pile_set_name":"a","pile_set_name":"b"}}')
@example(b'{"text":"a","n":123456789012345678901234567890}')
@example(b'{"text":"a","n":1e999}')
@example(b'{"text":"a",}')
@example(b'{"text":"a"} {"text":"b"}')
@example(b'{"text":"a","deep":' + 1100 * b"[" + 1100 * b"]" + b"}")
def test_what_orjson_refuses_is_refused_in_its_words(line):
    whole, partial_values = (_told(parse, line) for parse in (orjson.loads, PARSE))
    if isinstance(whole, dict) and isinstance(whole.get("text"), str):
        assert partial_values["text"] == whole["text"]
        assert partial_values.get("meta") == whole.get("meta")
    else:
        assert partial_values == whole


def _told(parse, line):
    """The value, or what is said of the line."""
    try:
        return parse(line)
    except orjson.JSONDecodeError as error:
        return str(error)


def test_without_simdjson_it_is_orjson(monkeypatch):
    monkeypatch.setitem(sys.modules, "simdjson", None)
    assert line_parser("text", "meta") is orjson.loads


@with_simdjson
def test_other_fields_are_left_out_where_simdjson_reads():
    assert PARSE(b'{"text":"a","url":"b","meta":{"pile_set_name":"c"}}') == {
        "text": "a",
        "meta": {"pile_set_name": "c"},
    }
    assert line_parser("text", "")(b'{"text":"a","meta":"b"}') == {"text": "a"}
