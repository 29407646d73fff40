"""Bad lines and names: what `artel prepare` keeps of them, how many are borne, and that each is told by its place."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from artel.config import DataConfig
from artel.errors import InputError
from artel.preparing import prepare
from artel.text import Ledger, Record, Rejected, check_sources, html_to_text, read_documents
from artel.text.reading.encodings import is_text_encoding
from support.messages import logged
from support.reading import MESSAGES, items, parquet, read_in_spans, warc, written
from support.stores import run_of


def rows(count, bad=(), text="строка"):
    """JSON lines, those with the numbers given bad."""
    return "".join("{oops\n" if line in bad else f'{{"text": "{text} {line}"}}\n' for line in range(1, count + 1))


def kept(folder):
    """RUN/rejected.jsonl as (file:line, reason, set) each; None where there is no such file."""
    file = folder / "run" / "rejected.jsonl"
    if not file.exists():
        return None
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(each.keys() == {"origin", "reason", "detail", "set"} and each["detail"] for each in entries)
    return [(each["origin"].removeprefix(f"{folder}/"), each["reason"], each["set"]) for each in entries]


@pytest.mark.parametrize("bad", [[7], range(1, 2000, 100), [*range(1, 2000, 100), 2000]], ids=len)
def test_one_bad_line_in_a_hundred_is_borne(tmp_path, bad):
    file = written(tmp_path, "a.jsonl", rows(2000, bad))
    run = run_of(tmp_path, data={"sources": [{"path": str(file), "name": "news"}]})
    expected = [(f"a.jsonl:{line}", "bad_json", "news") for line in bad]
    if len(bad) <= 20:
        news = logged()
        assert prepare(run).ledger()["documents"] == {
            "read": 2000,
            "kept": 2000 - len(bad),
            "dropped": {"bad_json": len(bad)},
        }
        assert kept(tmp_path) == expected
        (line,) = [line for line in news if "cannot be used" in line]
        assert f"{len(bad):,} of 2,000 records ({len(bad) / 2000:.2%}) cannot be used" in line
        assert f"a.jsonl:{bad[0]}: " in line
        return
    with pytest.raises(InputError) as stopped:
        prepare(run)
    first, share = stopped.value.problems
    assert first.where == f"{file}:1"
    assert first.fix == f"20 more like this: {', '.join(f'{file}:{line}' for line in bad[1:4])} …"
    assert share.what == "21 of 2,000 records (1.05%) cannot be used, more than data.max_bad (0.01)"
    assert kept(tmp_path) == expected


def test_of_many_mistakes_ten_are_told_and_where_the_others_are(tmp_path):
    """Thirteen mistakes, of which one comes twice; mistakes that differ in a number only count as one."""
    mistakes = [f'{{"{name}": "no text"}}\n' for name in "abcdefghijklm"]
    file = written(tmp_path, "a.jsonl", rows(20) + "".join([*mistakes, mistakes[2]]))
    with pytest.raises(InputError) as stopped:
        prepare(run_of(tmp_path, data={"sources": [{"path": str(file)}]}))
    *lines, more, share = stopped.value.problems
    assert [problem.where for problem in lines] == [f"{file}:{line}" for line in range(21, 31)]
    assert [problem.fix for problem in lines if problem.fix] == [f"1 more like this: {file}:34"]
    assert more.lines == ["… and 3 more: run/rejected.jsonl"]
    assert len(kept(tmp_path)) == 14
    assert share.where == "data"
    with pytest.raises(InputError) as stopped:  # nothing is written: there is no run
        list(read_documents(DataConfig.model_validate({"sources": [{"path": str(file)}], "validation": 0.0}), Ledger()))
    assert stopped.value.problems[-2].lines == ["… and 3 more"]
    file.write_text(rows(20) + "".join(f'{{"text": "a", "{"x" * number}": oops}}\n' for number in range(1, 14)))
    with pytest.raises(InputError) as stopped:
        prepare(run_of(tmp_path, data={"sources": [{"path": str(file)}]}))
    line, share = stopped.value.problems
    assert line.where == f"{file}:21"
    assert line.fix == f"12 more like this: {file}:22, {file}:23, {file}:24 …"


@pytest.mark.parametrize("tokenizer", [None, {"train": {"vocab": 270}}])
def test_a_run_that_stopped_goes_on_when_more_is_borne_or_the_lines_are_mended(tmp_path, tokenizer):
    file = written(tmp_path, "a.jsonl", rows(200, [3, 5, 9]))
    sections = {"tokenizer": tokenizer} if tokenizer else {}

    def prepared(**data):
        news = logged()
        made = prepare(run_of(tmp_path, data={"sources": [{"path": str(file), "name": "a"}], **data}, **sections))
        return made, news

    with pytest.raises(InputError, match=r"a\.jsonl:3: (.|\n)*3 of 200 records \(1\.50%\) cannot be used"):
        prepared()
    expected = [(f"a.jsonl:{line}", "bad_json", "a") for line in (3, 5, 9)]
    assert kept(tmp_path) == expected
    made, news = prepared(max_bad=0.02)
    assert made.ledger()["documents"]["dropped"] == {"bad_json": 3}
    if tokenizer is None:
        assert "turning text into tokens" not in news  # the first start did that
    assert kept(tmp_path) == expected
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
    expected = [
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
        assert kept(tmp_path) == expected
        (tmp_path / "run" / "rejected.jsonl").unlink()
    assert ledgers[0] == ledgers[1]


# What was found so


def test_a_line_that_is_too_long_is_told_by_its_place_in_the_file_and_not_in_its_span(tmp_path):
    file = written(tmp_path, "a.jsonl", rows(100) + json.dumps({"text": "x" * 60_000}))
    with pytest.raises(InputError, match=r"a\.jsonl:101: the line is over 50,000 bytes"):
        read_in_spans(file, 500)


@pytest.mark.parametrize("before", ["\x1c\n", "\n\ufeff", " " * 1_100_000 + "\n"])
def test_what_is_no_line_of_its_own_is_never_divided(tmp_path, before):
    file = written(tmp_path, "a.json", before + json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    whole, _ = read_in_spans(file, 10_000_000)
    assert read_in_spans(file, 20) == (whole, 0)


@pytest.mark.parametrize("size", [10_000_000, 20])
def test_an_array_after_a_space_that_json_does_not_know_is_an_error_whole_and_divided(tmp_path, size):
    file = written(tmp_path, "a.json", "\u00a0\n" + json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    with pytest.raises(InputError, match=r"a\.json:1:1: is not JSON: unexpected character"):
        read_in_spans(file, size)


@pytest.mark.parametrize("encoding", ["utf-7", "U7", "unicode_escape", "raw-unicode-escape", "punycode"])
def test_notations_that_no_file_is_in_are_no_encodings(tmp_path, encoding):
    assert not is_text_encoding(encoding)
    halves = b"+2AA- \\ud800 Anna"
    file = written(tmp_path, "a.txt", halves)
    with pytest.raises(InputError, match=r"data\.sources\.0\.encoding: unknown encoding"):
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
    records = items(written(tmp_path, "a.parquet", parquet(columns)), format="chat")
    assert isinstance(records[0], Rejected)
    assert records[0].detail.startswith("holds a value that cannot be read: ")
    assert isinstance(records[1], Record)


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
    message = r"the name of .*/a\\xff\.jsonl is not UTF-8"
    if given == "{name}":  # a run file that names it can itself not be written down
        message = "has .* a surrogate"
    with pytest.raises(InputError, match=rf"data\.sources\.0\.path: {message}") as error:
        prepare(run_of(tmp_path, data={"sources": [{"path": path}]}))
    assert str(error.value).encode()
