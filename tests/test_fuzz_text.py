"""Texts of any bytes, whole and damaged, in every format: what cannot be read is told by its place, and nothing else
is ever raised. `ARTEL_FUZZ=2000` runs each test with so many examples."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from artel.config import DataConfig
from artel.errors import InputError
from artel.preparing import prepare
from artel.preparing.verdict import Made
from artel.text import Ledger, Record, Rejected, count_lines, html_to_text, read_documents
from artel.text.encodings import is_text_encoding
from artel.text.sources import check_sources, parts_of, read_part
from reading import items, written
from stores import run_of

often = settings(max_examples=int(os.environ.get("ARTEL_FUZZ", "60")), deadline=None)
PACKS = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
ENCODINGS = ["auto", "auto", "utf-8", "windows-1251", "koi8-r", "cp866", "utf-16", "utf-32-le", "gb18030", "shift_jis"]


# Whole files, small ones, as the formats have them


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def parquet(columns):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


def warc(*entries):
    """Of (type, content type, block) each."""
    head = "WARC/1.0\r\nWARC-Type: {}\r\nWARC-Target-URI: http://a/\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
    return b"".join(head.format(kind, of, len(block)).encode() + block + b"\r\n\r\n" for kind, of, block in entries)


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
MESSAGES = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "<think>hm</think>me"}]
TREE = {"text": "q", "role": "prompter", "replies": [{"text": "a", "role": "assistant", "rank": 0, "replies": []}]}
CHATS = [
    {"messages": MESSAGES, "system": "s"},
    {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]},
    {"instruction": "i", "input": "x", "output": "o", "history": [["a", "b"]]},
    {"instruction": "i", "instances": [{"input": "x", "output": "o"}, {"input": 1}]},
    {"name": "n", "context": "c", "dialogues": [{"chat": MESSAGES}], "example_dialogue": ["a", "b"]},
    {"prompt": TREE},
    {"messages": {"role": ["user", "assistant"], "content": ["a", [{"type": "text", "text": "b"}]]}},
]
PREFERENCES = [
    {"prompt": "p", "chosen": "a", "rejected": "b"},
    {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    {"messages": MESSAGES, "label": True},
    {"instruction": "i", "output": ["a", "b"]},
    {"prompt": MESSAGES[:1], "completion": MESSAGES[1:], "label": 0},
]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Анна Каренина was here",
                    "qas": [
                        {"id": "q1", "question": "who?", "answers": [{"text": "Анна", "answer_start": 0}]},
                        {"id": 2, "question": "where?", "answers": [], "is_impossible": True},
                    ],
                }
            ]
        }
    ]
}
SPAN = {"start_token": 1, "end_token": 3}
NQ = [
    {"question_text": "q", "document_text": "a b c d", "answers": ["b c"], "id": "x"},
    {
        "question_text": "q", "document_text": "a b c d", "example_id": 7,
        "long_answer_candidates": [{**SPAN, "top_level": True}],
        "annotations": [{"yes_no_answer": "NONE", "long_answer": {"candidate_index": 0}, "short_answers": [SPAN]}],
    },
    {
        "question_text": "q", "document_tokens": [{"token": "a"}, {"token": "b"}, {"token": "c"}],
        "annotations": [{"yes_no_answer": "YES", "long_answer": SPAN, "short_answers": []}],
    },
]  # fmt: skip


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
    "squad": Kind(".json", {"format": "squad"}, [json.dumps(SQUAD), json.dumps(SQUAD, indent=1)]),
    "nq": Kind(".jsonl", {"format": "nq"}, [json_lines(NQ)]),
    "warc": Kind(".warc", {}, [ARCHIVE]),
    "parquet": Kind(".parquet", {}, [parquet({"text": ["Привет", None, "b"]}), parquet({"text": [b"\xff", b"a"]})]),
    "parquet chat": Kind(".parquet", {"format": "chat"}, [parquet({"messages": [MESSAGES, None], "n": [1, None]})]),
}  # fmt: skip
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
        found = list(read_documents(DataConfig.model_validate(data), ledger))
    except InputError as error:
        for problem in error.problems:
            assert problem.where
            assert str(problem).encode()
    else:
        ledger.check()
        total = ledger.total
        assert len(found) == total.kept > 0
        assert ledger.rejected <= total.dropped.total()
        assert all(document.record.text.encode() for document in found)
    place = re.compile(re.escape(str(file)) + r"(:[1-9]\d*|\[\d+\])?( .*)?", re.DOTALL)
    for item in ledger.listed:
        assert place.fullmatch(item.origin), item
        assert item.reason.isidentifier()
        assert item.detail
        assert orjson.dumps([item.origin, item.reason, item.detail, item.set_name])  # as a store keeps it


@pytest.mark.parametrize("name", KINDS)
@often
@given(data=st.data())
def test_any_bytes_are_read_or_told(tmp_path_factory, name, data):
    kind = KINDS[name]
    file = tmp_path_factory.getbasetemp() / f"any{kind.suffix}"
    file.write_bytes(data.draw(contents(kind)))
    binary = isinstance(kind.wholes[0], bytes)
    check_read(file, encoding="auto" if binary else data.draw(st.sampled_from(ENCODINGS)), **kind.source)


@pytest.mark.parametrize("name", PACKED)
@often
@given(data=st.data())
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


@often
@given(data=st.data())
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


def lines_told(found, file):
    """(lines of the records, lines of those that were rejected)."""
    good, bad = [], []
    for item in found:
        place = re.fullmatch(re.escape(str(file)) + r":(\d+)", item.origin)
        assert place, item
        (good if isinstance(item, Record) else bad).append(int(place[1]))
    return good, bad


@pytest.mark.parametrize("name", LINES)
@often
@given(data=st.data())
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
    found = [(item.origin, isinstance(item, Record)) for item in items(file)]
    assert found == [(f"{file}[{number}]", row == {"text": "a"}) for number, row in enumerate(rows)]


@often
@given(rows=st.lists(st.sampled_from([b"a", b"\xff", "Ж".encode(), None, "Ж".encode()[:1]]), min_size=1, max_size=20))
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_exactly_the_bad_rows_of_a_table_are_told(tmp_path_factory, kind, rows):
    file = tmp_path_factory.getbasetemp() / "table.parquet"
    column = pyarrow.array(rows, pyarrow.binary()).cast(kind, safe=False) if kind != pyarrow.large_string() else (
        pyarrow.array(rows, pyarrow.large_binary()).view(kind))  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    found = [(item.origin, isinstance(item, Record)) for item in items(file, encoding="utf-8")]
    good = [row in (b"a", "Ж".encode()) for row in rows]
    assert found == [(f"{file}[{number}]", is_good) for number, is_good in enumerate(good)]


# Files in spans


def read_in_spans(file, size, **source):
    """What the parts of a file of about `size` bytes hold, its places as `artel prepare` tells them."""
    data = DataConfig.model_validate({"sources": [{"path": str(file), **source}], "max_document": 50_000})
    found, before, spans = [], 0, 0
    for part in parts_of(data, size):
        made = Made(file, np.empty(0), {}, before)
        found += [(type(item), getattr(item, "text", ""), getattr(item, "detail", ""), made.origin(item.origin))
                  for item in read_part(part, data)]  # fmt: skip
        span = part.inputs[0].span
        before += count_lines(file, span) if span else 0
        spans += span is not None
    return found, spans


@pytest.mark.parametrize("name", ["jsonl", "json", "line"])
@often
@given(data=st.data())
def test_spans_hold_what_the_file_holds(tmp_path_factory, name, data):
    kind = KINDS[name]
    file = tmp_path_factory.getbasetemp() / f"spans{kind.suffix}"
    file.write_bytes(data.draw(contents(kind) | contents(kind).map(lambda content: content * 3)))
    encoding = data.draw(st.sampled_from(ENCODINGS))
    whole, spans = read_in_spans(file, 1_000_000, encoding=encoding, **kind.source)
    assert spans == 0
    for size in data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)):
        assert read_in_spans(file, size, encoding=encoding, **kind.source)[0] == whole


@pytest.mark.parametrize("name", ["jsonl", "line"])
@often
@given(data=st.data())
def test_exactly_the_bad_lines_of_spans_are_told(tmp_path_factory, name, data):
    content, good, bad = data.draw(rows_of(name))
    file = tmp_path_factory.getbasetemp() / f"spans{KINDS[name].suffix}"
    file.write_bytes(content)
    found, spans = read_in_spans(file, data.draw(st.integers(1, 100)), encoding="utf-8", **KINDS[name].source)
    assert lines_told([kind("", where, "set") if kind is Record else Rejected(where, "", "", "set")
                       for kind, _, _, where in found], file) == (good, bad)  # fmt: skip
    assert spans or len(content) <= 100


# artel prepare: what is kept of bad lines, and how many are borne


def rows(count, bad=(), text="строка"):
    """JSON lines, those with the numbers given bad."""
    return "".join("{oops\n" if line in bad else f'{{"text": "{text} {line}"}}\n' for line in range(1, count + 1))


def kept(folder):
    """RUN/rejected.jsonl as (file:line, reason, set) each; None where there is no such file."""
    file = folder / "run" / "rejected.jsonl"
    if not file.exists():
        return None
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(each.keys() == {"origin", "reason", "detail", "set"} and each["detail"] for each in told)
    return [(each["origin"].removeprefix(f"{folder}/"), each["reason"], each["set"]) for each in told]


@pytest.mark.parametrize("bad", [[7], [7, 1900], [1, 7, 2000]])
def test_one_bad_line_in_a_thousand_is_borne(tmp_path, bad):
    file = written(tmp_path, "a.jsonl", rows(2000, bad))
    run = run_of(tmp_path, data={"sources": [{"path": str(file), "name": "news"}]})
    told = [(f"a.jsonl:{line}", "bad_json", "news") for line in bad]
    if len(bad) <= 2:
        assert prepare(run).ledger()["documents"] == {
            "read": 2000, "kept": 2000 - len(bad), "dropped": {"bad_json": len(bad)}
        }  # fmt: skip
        assert kept(tmp_path) == told
        return
    with pytest.raises(InputError) as stopped:
        prepare(run)
    *lines, share = stopped.value.problems
    assert [problem.where for problem in lines] == [f"{file}:{line}" for line in bad]
    assert share.what == "3 of 2,000 records cannot be used, more than data.max_bad (0.001)"
    assert kept(tmp_path) == told


@pytest.mark.parametrize("tokenizer", [None, {"train": {"vocab": 270}}])
def test_a_run_that_stopped_goes_on_when_more_is_borne_or_the_lines_are_mended(tmp_path, tokenizer):
    file = written(tmp_path, "a.jsonl", rows(200, [3]))
    sections = {"tokenizer": tokenizer} if tokenizer else {}

    def prepared(**data):
        news = []
        made = prepare(run_of(tmp_path, data={"sources": [{"path": str(file), "name": "a"}], **data}, **sections),
                       news.append)  # fmt: skip
        return made, news

    with pytest.raises(InputError, match=r"a\.jsonl:3: (.|\n)*1 of 200 records cannot be used"):
        prepared()
    assert kept(tmp_path) == [("a.jsonl:3", "bad_json", "a")]
    made, news = prepared(max_bad=0.01)
    assert made.ledger()["documents"]["dropped"] == {"bad_json": 1}
    if tokenizer is None:
        assert "turning text into tokens" not in news  # the first start did that
    assert kept(tmp_path) == [("a.jsonl:3", "bad_json", "a")]
    file.write_text(rows(200))
    made, _ = prepared()
    assert made.ledger()["documents"] == {"read": 200, "kept": 200, "dropped": {}}
    assert kept(tmp_path) is None


def test_bad_lines_of_parts_and_formats_are_kept_by_their_places(tmp_path):
    bad = list(range(5, 400, 9))
    files = {
        "a.jsonl": rows(400, bad).encode(),
        "b.jsonl.zst": zstandard.compress(rows(50, [50]).encode()),
        "c.csv": b'text\n"of two\nlines"\nwide,r\nc\n',
        "d.txt": b"one\n\xff\n\nfour\n" + b"text\n" * 200 + b"\xfe",
        "e.html": b"\0\1\2",
    }
    for name, content in files.items():
        written(tmp_path, name, content)
    more = {"c.csv": {"format": "csv"}, "d.txt": {"document": "line", "encoding": "utf-8"}}
    sources = [{"path": str(tmp_path / name), "name": name[0], **more.get(name, {})} for name in files]
    again = {"path": str(tmp_path / "a.jsonl"), "name": "again"}
    told = [
        *[(f"a.jsonl:{line}", "bad_json", "a") for line in bad],
        ("b.jsonl.zst:50", "bad_json", "b"),
        ("c.csv:4", "bad_row", "c"),
        ("d.txt:2", "unreadable", "d"),
        ("d.txt:205", "unreadable", "d"),
        ("e.html", "binary", "e"),
        *[(f"a.jsonl:{line}", "bad_json", "again") for line in bad],
    ]
    ledgers = []
    for part in ("1G", 700):
        data = {"sources": [*sources, again], "max_bad": 0.5, "store": str(tmp_path / f"stores {part}")}
        ledgers.append(prepare(run_of(tmp_path, data=data, prepare={"part": part})).ledger())
        assert kept(tmp_path) == told
        (tmp_path / "run" / "rejected.jsonl").unlink()
    assert ledgers[0] == ledgers[1]


# What was found so


def test_a_line_that_is_too_long_is_told_by_its_place_in_the_file_and_not_in_its_span(tmp_path):
    file = written(tmp_path, "a.jsonl", rows(100) + json.dumps({"text": "x" * 60_000}))
    with pytest.raises(InputError, match=r"a\.jsonl:101: the line is over 50,000 bytes"):
        read_in_spans(file, 500)


@pytest.mark.parametrize("before", ["\u00a0\n", "\x1c\n", "\n\ufeff", " " * 1_100_000 + "\n"])
def test_what_is_no_line_of_its_own_is_never_divided(tmp_path, before):
    file = written(tmp_path, "a.json", before + json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    whole, _ = read_in_spans(file, 10_000_000)
    assert read_in_spans(file, 20) == (whole, 0)


@pytest.mark.parametrize("encoding", ["utf-7", "U7", "unicode_escape", "raw-unicode-escape", "punycode"])
def test_notations_that_no_file_is_in_are_no_encodings(tmp_path, encoding):
    assert not is_text_encoding(encoding)
    halves = b"+2AA- \\ud800 Anna"
    file = written(tmp_path, "a.txt", halves)
    with pytest.raises(InputError, match=r"data\.sources\.0\.encoding: there is no encoding"):
        check_sources(DataConfig.model_validate({"sources": [{"path": str(file), "encoding": encoding}]}))
    page = b"<meta charset=%s><p>%s" % (encoding.encode(), halves)
    assert html_to_text(page) == html_to_text(page, f"text/html; charset={encoding}") == halves.decode()
    archive = written(tmp_path, "a.warc", warc(("resource", f"text/plain; charset={encoding}", halves)))
    assert [item.text for item in items(archive)] == [halves.decode()]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([2**30], pyarrow.int32()).cast(pyarrow.date32()),
        pyarrow.array([2**62], pyarrow.int64()).cast(pyarrow.timestamp("us")),
        pyarrow.array([0], pyarrow.int64()).cast(pyarrow.timestamp("us", tz="Nowhere/Land")),
        pyarrow.StructArray.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]),
    ],
    ids=["date", "time", "zone", "names"],
)
def test_values_that_python_has_not_cost_their_row_only(tmp_path, column):
    empty = pyarrow.nulls(1, column.type)
    columns = {"messages": [MESSAGES] * 2, "more": pyarrow.chunked_array([column, empty])}
    found = items(written(tmp_path, "a.parquet", parquet(columns)), format="chat")
    assert isinstance(found[0], Rejected)
    assert found[0].detail.startswith("holds a value that cannot be read: ")
    assert isinstance(found[1], Record)


def test_names_of_columns_in_another_encoding_are_shown(tmp_path):
    file = written(tmp_path, "a.csv", "текст\na\n".encode("cp1251"))
    with pytest.raises(InputError, match=r"a\.csv:1: the header has no column 'text' \(it has: \\xf2\\xe5"):
        items(file, format="csv", encoding="utf-8")


def test_outputs_that_are_no_text_are_told_of_their_own_file(tmp_path):
    file, other = written(tmp_path, "a.txt", "a\nb\n"), written(tmp_path, "b.txt", b"\0\1\2\n\3")
    with pytest.raises(InputError, match=r"b\.txt: holds binary data"):
        items(file, format="pairs", outputs=str(other))


@pytest.mark.parametrize("given", ["", "*", "{name}"])
def test_files_whose_names_are_no_text_are_told(tmp_path, given):
    name = os.fsdecode(b"a\xff.jsonl")
    written(tmp_path, name, rows(2))
    path = f"{tmp_path}/{given.format(name=name)}"
    with pytest.raises(InputError, match=r"data\.sources\.0\.path: the name of .*/a\\xff\.jsonl is not UTF-8") as error:
        prepare(run_of(tmp_path, data={"sources": [{"path": path}]}))
    assert str(error.value).encode()
