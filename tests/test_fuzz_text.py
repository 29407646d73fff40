"""Texts of any bytes, whole and damaged, in every format: what cannot be read is told by its place, and nothing else
is ever raised. `ARTEL_FUZZ=2000` runs each test with so many examples."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import re
from typing import NamedTuple

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from artel.config import DataConfig
from artel.errors import InputError
from artel.text import Ledger, Record, Rejected, read_documents
from support.reading import items, parquet, read_in_spans, warc

often = settings(max_examples=int(os.environ.get("ARTEL_FUZZ", "60")))


def fuzzed(test):
    """The test draws its examples itself."""
    return often(given(data=st.data())(test))


PACKS = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
ENCODINGS = ["auto", "auto", "utf-8", "windows-1251", "koi8-r", "cp866", "utf-16", "utf-32-le", "gb18030", "shift_jis"]


# Whole files, small ones, as the formats have them


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


TEXT = "Все счастливые семьи похожи\n\ncafé “quoted”, 𝄞 and\ttab\r\nend\n"
PAGE = (
    "<html><head><meta charset=utf-8><title>t</title></head><body><!-- c --><p>Анна&nbsp;&#1;&#xD800;<br>b</p>"
    "<pre> a\n  b</pre><ul><li>x<li>y</ul><script>s</script><table><tr><td>1<td>2</table></body></html>"
)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=koi8-r\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ntext\r\n0"
)
ZIPPED = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(PAGE.encode())
ARCHIVE = warc(
    ("warcinfo", "application/warc-fields", b"software: x\r\n"),
    ("response", "application/http; msgtype=response", CHUNKED),
    ("response", "application/http; msgtype=response", ZIPPED),
    ("conversion", "text/plain", TEXT.encode()),
)
ROWS = [{"text": "Привет", "meta": {"pile_set_name": "a"}}, {"text": "two\nlines"}, {"text": 5}, {"other": None}]
PAIRS = [{"input": "a", "output": "Б"}, {"input": "c", "output": ""}, ["no object"]]
THOUGHTFUL = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "<think>hm</think>me"}]
TREE = {"text": "q", "role": "prompter", "replies": [{"text": "a", "role": "assistant", "rank": 0, "replies": []}]}
CHATS = [
    {"messages": THOUGHTFUL, "system": "s"},
    {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]},
    {"instruction": "i", "input": "x", "output": "o", "history": [["a", "b"]]},
    {"instruction": "i", "instances": [{"input": "x", "output": "o"}, {"input": 1}]},
    {"name": "n", "context": "c", "dialogues": [{"chat": THOUGHTFUL}], "example_dialogue": ["a", "b"]},
    {"prompt": TREE},
    {"messages": {"role": ["user", "assistant"], "content": ["a", [{"type": "text", "text": "b"}]]}},
]
PREFERENCES = [
    {"prompt": "p", "chosen": "a", "rejected": "b"},
    {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    {"messages": THOUGHTFUL, "label": True},
    {"instruction": "i", "output": ["a", "b"]},
    {"prompt": THOUGHTFUL[:1], "completion": THOUGHTFUL[1:], "label": 0},
]
ASKED = [
    {"id": "q1", "question": "who?", "answers": [{"text": "Анна", "answer_start": 0}]},
    {"id": 2, "question": "where?", "answers": [], "is_impossible": True},
]
SQUAD = {"data": [{"paragraphs": [{"context": "Анна Каренина was here", "qas": ASKED}]}]}
SPAN = {"start_token": 1, "end_token": 3}
LONG = [{**SPAN, "top_level": True}]
SHORT = {"yes_no_answer": "NONE", "long_answer": {"candidate_index": 0}, "short_answers": [SPAN]}
YES = {"yes_no_answer": "YES", "long_answer": SPAN, "short_answers": []}
TEXT_OF_NQ = {"question_text": "q", "document_text": "a b c d"}
NQ = [
    {**TEXT_OF_NQ, "answers": ["b c"], "id": "x"},
    {**TEXT_OF_NQ, "example_id": 7, "long_answer_candidates": LONG, "annotations": [SHORT]},
    {"question_text": "q", "document_tokens": [{"token": token} for token in "abc"], "annotations": [YES]},
]


class Kind(NamedTuple):
    """A way to read a file, and whole files of it: as text, to be written in any encoding, or as bytes."""

    suffix: str
    source: dict
    wholes: list


KINDS = {
    "jsonl": Kind(".jsonl", {}, [json_lines(ROWS)]),
    "json": Kind(".json", {"set_field": "auto"}, [json.dumps(ROWS, indent=1), json_lines(ROWS)]),
    "file": Kind(".txt", {}, [TEXT]),
    "line": Kind(".txt", {"document": "line"}, [TEXT]),
    "paragraph": Kind(".txt", {"document": "paragraph"}, [TEXT]),
    "html": Kind(".html", {}, [PAGE]),
    "html lines": Kind(".html", {"document": "line", "profile": "lib.ru"}, [PAGE]),
    "html main": Kind(".html", {"extract": "main"}, [PAGE]),
    "csv": Kind(".csv", {"format": "csv"}, ['id,text\n1,Привет\n2,"two\nlines, ""quoted"""\n\n3,a,b\n4\n']),
    "tsv": Kind(".tsv", {"format": "csv", "set_field": "id"}, ["id\ttext\n1\tПривет\n2\tb\n\tc\n"]),
    "pairs": Kind(".csv", {"format": "pairs"}, ["input,output\na,Б\nc,\n"]),
    "json pairs": Kind(".jsonl", {"format": "pairs"}, [json_lines(PAIRS)]),
    "chat": Kind(".jsonl", {"format": "chat"}, [json_lines(CHATS)]),
    "preference": Kind(".jsonl", {"format": "preference"}, [json_lines(PREFERENCES)]),
    "prompts": Kind(".jsonl", {"format": "prompts"}, [json_lines(PREFERENCES), json_lines(CHATS)]),
    "prompts csv": Kind(
        ".csv", {"format": "prompts"}, ['prompt,n\na,1\n"[{""role"": ""user"", ""content"": ""b""}]",2\n']
    ),
    "squad": Kind(".json", {"format": "squad"}, [json.dumps(SQUAD), json.dumps(SQUAD, indent=1)]),
    "nq": Kind(".jsonl", {"format": "nq"}, [json_lines(NQ)]),
    "warc": Kind(".warc", {}, [ARCHIVE]),
    "parquet": Kind(".parquet", {}, [parquet({"text": ["Привет", None, "b"]}), parquet({"text": [b"\xff", b"a"]})]),
    "parquet chat": Kind(".parquet", {"format": "chat"}, [parquet({"messages": [THOUGHTFUL, None], "n": [1, None]})]),
}
PACKED = ["jsonl", "file", "line", "csv", "json pairs", "warc", "nq"]


@st.composite
def damaged(draw, wholes, pieces=st.binary(max_size=12)):
    """Some of the bytes given with a few places changed, cut out, put in or doubled."""
    data = draw(st.sampled_from(wholes))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "end"])):
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
            case "cut":
                data = data[:at] + data[end:]
            case "insert":
                data = data[:at] + draw(pieces) + data[at:]
            case "double":
                data = data[:end] + data[at:]
            case "end":
                data = data[:at]
    return data


@st.composite
def contents(draw, kind):
    """The content of a file of a kind: any bytes, or a whole one in some encoding that is damaged."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=120))
    of = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "cp1251", "koi8-r", "cp1252", "utf-16", "utf-32"]))
    # What has a meaning somewhere: marks, line ends, quotes, brackets, numbers, notations of characters.
    signs = [b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\r", b"\n", b'"', b"[", b"{}", b"null", b"-1e400", b"\\ud800", b",",
             b"<!--", b"&#0;", b"<pre>", b"charset=utf-7 ", b"charset=hex ", b"+2AA-", b"\x85", b"\xa0", b"\x1c",
             b"99999999999", b"WARC/1.0\r\n", b"\r\n\r\n"]  # fmt: skip
    wholes = [whole if isinstance(whole, bytes) else whole.encode(of, "replace") for whole in kind.wholes]
    return draw(damaged(wholes, st.sampled_from(signs) | st.binary(max_size=12)))


def check_read(file, **source):
    """Read a file as a run does: the only error is one for people, and what is rejected is told by its place in it."""
    data = {"validation": 0.0, "max_bad": 1.0, "max_document": 50_000, "sources": [{"path": str(file), **source}]}
    ledger = Ledger()
    try:
        documents = list(read_documents(DataConfig.model_validate(data), ledger))
    except InputError as error:
        for problem in error.problems:
            assert problem.where
            assert str(problem).encode()
    else:
        ledger.check()
        total = ledger.total
        assert len(documents) == total.kept > 0
        assert ledger.num_rejected <= total.dropped.total()
        assert all(document.record.text.encode() for document in documents)
    place = re.compile(re.escape(str(file)) + r"(:[1-9]\d*|\[\d+\])?( .*)?", re.DOTALL)
    for item in ledger.rejected_records:
        assert place.fullmatch(item.origin), item
        assert item.reason.isidentifier()
        assert item.detail
        assert orjson.dumps([item.origin, item.reason, item.detail, item.set_name])  # as a store keeps it


@pytest.mark.parametrize("name", KINDS)
@fuzzed
def test_any_bytes_are_read_or_told(tmp_path_factory, name, data):
    kind = KINDS[name]
    file = tmp_path_factory.getbasetemp() / f"any{kind.suffix}"
    file.write_bytes(data.draw(contents(kind)))
    binary = isinstance(kind.wholes[0], bytes)
    check_read(file, encoding="auto" if binary else data.draw(st.sampled_from(ENCODINGS)), **kind.source)


@pytest.mark.parametrize("name", PACKED)
@fuzzed
def test_any_packed_bytes_are_read_or_told(tmp_path_factory, name, data):
    kind = KINDS[name]
    suffix = data.draw(st.sampled_from(list(PACKS)))
    content = data.draw(contents(kind))
    packed = PACKS[suffix](content)
    if data.draw(st.booleans()):
        packed = data.draw(damaged([packed, packed + PACKS[suffix](content)]))
    file = tmp_path_factory.getbasetemp() / f"any{kind.suffix}{suffix}"
    file.write_bytes(packed)
    check_read(file, **kind.source)


@fuzzed
def test_any_outputs_of_another_file(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    kinds = [Kind(".txt", {}, ["a\nБ\n\nc\n"]), Kind(".csv", {}, ["input,output\na,b\n"]), KINDS["json pairs"]]
    one, other = data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from(kinds))
    files = [folder / f"one{one.suffix}", folder / f"other{other.suffix}"]
    for file, kind in zip(files, (one, other), strict=True):
        file.write_bytes(data.draw(contents(kind)))
    with contextlib.suppress(InputError):
        for item in items(files[0], format="pairs", outputs=str(files[1])):
            assert item.origin.startswith((str(files[0]), str(files[1])))


# Good and bad lines at known places: exactly the bad ones are told


class Line(NamedTuple):
    """A row of a file, as it is written."""

    content: bytes
    good: bool | None
    """None where it is none, as a blank line."""


BLANK = [Line(b"", None), Line(b" \t", None)]
JSON_BAD = [Line(line, False) for line in (b"{", b'"', b"5", b"null", b'{"text": "a\xff"}', b"\xff", b"{}", b"nul\0l")]
LINES = {
    "jsonl": [Line(b'{"text": "\xd0\x96 %d"}', True), Line(b'{"text": 5}', False), *JSON_BAD, *BLANK],
    "line": [Line("Ж %d".encode(), True), Line(b"\xff %d", False), Line("чужая".encode("koi8-r"), False), *BLANK],
    "json pairs": [Line(b'{"input": "a", "output": "b %d"}', True), Line(b'{"input": "", "output": "b"}', False),
                   *JSON_BAD, *BLANK],
    "chat": [Line(b'{"instruction": "a", "output": "b %d"}', True), Line(b'{"messages": []}', False), *JSON_BAD,
             *BLANK],
    "preference": [Line(b'{"prompt": "a", "chosen": "b %d", "rejected": "c"}', True), *JSON_BAD, *BLANK,
                   Line(b'{"prompt": "a", "chosen": "b", "rejected": "b"}', False)],
    "nq": [Line(b'{"question_text": "a", "document_text": "b %d", "answers": []}', True), *JSON_BAD, *BLANK],
    "csv": [Line(b"1,text %d", True), Line(b'2,"two\nlines %d"', True), Line(b"", None), Line(b"3,a,b", False),
            Line(b"4", False), Line(b"5,\xff", False), Line(b'6,"two\nli\xffnes"', False), Line(b'7,"a"b', False)],
}  # fmt: skip


@st.composite
def rows_of(draw, name):
    """(content of a file, its good and its bad lines by number). A row with two lines counts by its first one."""
    chosen = draw(st.lists(st.sampled_from(LINES[name]), max_size=25))
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    content = b"id,text\n" if name == "csv" else b""
    good, bad = [], []
    for number, line in enumerate(chosen):
        if line.good is not None:
            (good if line.good else bad).append(content.count(b"\n") + 1)
        row = line.content % number if b"%d" in line.content else line.content
        content += row + (b"" if number == len(chosen) - 1 and draw(st.booleans()) else end)
    return content, good, bad


def lines_told(items_read, file):
    """(lines of the records, lines of those that were rejected)."""
    good, bad = [], []
    for item in items_read:
        place = re.fullmatch(re.escape(str(file)) + r":(\d+)", item.origin)
        assert place, item
        (good if isinstance(item, Record) else bad).append(int(place[1]))
    return good, bad


@pytest.mark.parametrize("name", LINES)
@fuzzed
def test_exactly_the_bad_lines_are_told(tmp_path_factory, name, data):
    content, good, bad = data.draw(rows_of(name))
    pack = data.draw(st.sampled_from(["", *PACKS]))
    file = tmp_path_factory.getbasetemp() / f"lines{KINDS[name].suffix}{pack}"
    file.write_bytes(PACKS[pack](content) if pack else content)
    assert lines_told(items(file, encoding="utf-8", **KINDS[name].source), file) == (good, bad)


@often
@given(rows=st.lists(st.sampled_from([{"text": "a"}, {"text": 1}, {}, None, [], 5.0, "text"]), min_size=1, max_size=20))
def test_exactly_the_bad_entries_of_an_array_are_told(tmp_path_factory, rows):
    file = tmp_path_factory.getbasetemp() / "array.json"
    file.write_text(json.dumps(rows, indent=1))
    result = [(item.origin, isinstance(item, Record)) for item in items(file)]
    assert result == [(f"{file}[{number}]", row == {"text": "a"}) for number, row in enumerate(rows)]


@often
@given(rows=st.lists(st.sampled_from([b"a", b"\xff", "Ж".encode(), None, "Ж".encode()[:1]]), min_size=1, max_size=20))
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_exactly_the_bad_rows_of_a_table_are_told(tmp_path_factory, kind, rows):
    file = tmp_path_factory.getbasetemp() / "table.parquet"
    column = pyarrow.array(rows, pyarrow.binary()).cast(kind, safe=False) if kind != pyarrow.large_string() else (
        pyarrow.array(rows, pyarrow.large_binary()).view(kind))  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    result = [(item.origin, isinstance(item, Record)) for item in items(file, encoding="utf-8")]
    good = [row in (b"a", "Ж".encode()) for row in rows]
    assert result == [(f"{file}[{number}]", is_good) for number, is_good in enumerate(good)]


# Files in spans


@pytest.mark.parametrize("name", ["jsonl", "json", "line"])
@fuzzed
def test_spans_hold_what_the_file_holds(tmp_path_factory, name, data):
    kind = KINDS[name]
    file = tmp_path_factory.getbasetemp() / f"spans{kind.suffix}"
    file.write_bytes(data.draw(contents(kind) | contents(kind).map(lambda content: content * 3)))
    encoding = data.draw(st.sampled_from(ENCODINGS))
    sizes = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    try:
        whole, spans = read_in_spans(file, 1_000_000, encoding=encoding, **kind.source)
    except InputError as error:  # an array that is not JSON, which only a .json file can be
        assert name == "json"
        for size in sizes:
            with pytest.raises(InputError, match=f"^{re.escape(str(error))}$"):
                read_in_spans(file, size, encoding=encoding, **kind.source)
        return
    assert spans == 0
    for size in sizes:
        assert read_in_spans(file, size, encoding=encoding, **kind.source)[0] == whole


@pytest.mark.parametrize("name", ["jsonl", "line"])
@fuzzed
def test_exactly_the_bad_lines_of_spans_are_told(tmp_path_factory, name, data):
    content, good, bad = data.draw(rows_of(name))
    file = tmp_path_factory.getbasetemp() / f"spans{KINDS[name].suffix}"
    file.write_bytes(content)
    result, spans = read_in_spans(file, data.draw(st.integers(1, 100)), encoding="utf-8", **KINDS[name].source)
    assert lines_told([kind("", where, "set") if kind is Record else Rejected(where, "", "", "set")
                       for kind, _, _, where in result], file) == (good, bad)  # fmt: skip
    assert spans or len(content) <= 100
