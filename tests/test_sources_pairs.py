"""Pairs: csv, JSON lines and two files that go row for row; bad rows cost themselves only."""

import gzip

import pyarrow
import pytest
from pyarrow import parquet

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text import Pair, Record
from artel.text.formats.pairs import PAIRS, read_pairs
from artel.text.sources.find import list_sources
from support.reading import bad, read, written


def pairs(folder, content, name="a.csv", **source):
    return read(read_pairs, written(folder, name, content), **source)


def values(items):
    return [(item.fields.input, item.fields.output) for item in items]


def test_csv_with_quoted_commas_quotes_and_line_feeds(tmp_path):
    text = 'id,input,output\r\n1,"a, b","one\r\ntwo"\r\n\r\n2,"say ""hi""",c\r\n3,x,y'
    records = pairs(tmp_path, text)
    assert values(records) == [("a, b", "one\ntwo"), ('say "hi"', "c"), ("x", "y")]
    assert [item.origin for item in records] == ["a.csv:2", "a.csv:5", "a.csv:6"]
    assert records[0] == Record("one\ntwo", "a.csv:2", "set", Pair("a, b", "one\ntwo"), group="a, b")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "windows-1251", "koi8-r", "utf-16"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_csv_in_any_encoding_with_any_line_ends(tmp_path, encoding, ends):
    lines = ["input,output", "мама мыла раму но не пол,«мама мыла раму, но не пол»", 'она сказала,"она,', 'сказала"']
    text = ends.join(lines).replace("«", '"').replace("»", '"')
    records = pairs(tmp_path, text.encode(encoding))
    assert values(records) == [
        ("мама мыла раму но не пол", "мама мыла раму, но не пол"),
        ("она сказала", "она,\nсказала"),
    ]
    assert [item.origin for item in records] == ["a.csv:2", "a.csv:3"]


ROW = '{"input": "a", "output": "b"}'


@pytest.mark.parametrize(
    ("name", "content", "source", "expected"),
    [
        ("a.csv", "\ufeffinput,output\na,b\n", {"encoding": "utf-8"}, [("a", "b")]),
        ("a.tsv", "source\ttarget\na, b\tc\n", {"input": "source", "output": "target"}, [("a, b", "c")]),
        ("a.csv", f"input,output\na,{'x' * 200_000}\n", {}, [("a", "x" * 200_000)]),  # the csv module allows less
        ("a.json", f"\ufeff[{ROW}]", {}, [("a", "b")]),
        ("b.json", "", {}, []),
        ("c.json", "[]", {}, []),
    ],
    ids=["mark", "tsv", "long", "array", "empty", "no rows"],
)
def test_pairs_of_other_files(tmp_path, name, content, source, expected):
    assert values(pairs(tmp_path, content, name, **source)) == expected


@pytest.mark.parametrize(
    ("name", "given", "other", "expected"),
    [
        ("a.csv", "input\na\nb\n", "b.csv", "output\nA\nB\n"),
        ("a.jsonl", '{"input": "a"}\n{"input": "b"}\n', "b.csv", "n,output\n1,A\n2,B\n"),
        ("a.txt", "a\nb\n", "b.txt", "A\nB\n"),
    ],
)
def test_outputs_of_another_file_go_row_for_row(tmp_path, name, given, other, expected):
    file = written(tmp_path, other, expected)
    assert values(pairs(tmp_path, given, name, outputs=str(file))) == [("a", "A"), ("b", "B")]
    file.write_text(expected + expected.splitlines()[-1])
    with pytest.raises(InputError, match=r"has 2 rows and .* has 3") as error:
        pairs(tmp_path, given, name, outputs=str(file))
    assert name in str(error.value)
    assert other in str(error.value)


def test_a_bad_row_of_one_file_keeps_the_rows_of_both_together(tmp_path):
    file = written(tmp_path, "b.csv", "output,n\nA,1\nB\nC,3\n")
    records = pairs(tmp_path, "input\na\nb\nc\n", outputs=str(file))
    assert values(item for item in records if isinstance(item, Record)) == [("a", "A"), ("c", "C")]
    assert bad(records) == [(f"{file}:3", "bad_row")]


def test_outputs_that_name_the_file_itself_and_none(tmp_path):
    assert values(pairs(tmp_path, "input,output\na,b\n", outputs=str(tmp_path / "a.csv"))) == [("a", "b")]
    with pytest.raises(InputError, match="no such file"):
        pairs(tmp_path, "input\na\n", outputs=str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("question,answer\na,b\n", r"a\.csv:1.*no column 'input' \(it has: question, answer\)\n.*input: NAME"),
        ("input,answer\na,b\n", "no column 'output'"),
        ("input,output,output\na,b,c\n", "2 columns 'output'"),
        ("input;output\na;b\n", "not by semicolons"),
        ("", r"a\.csv:1.*it has: none"),
        ('input,"out\na,b\n', "never closed"),
        (f'input,output\na,"b\n{"c,d" * 400}\n', r"a\.csv:3.*data\.max_document"),
        ('input,output\na,"b\n' + "c d\n" * 400, r"a\.csv:2.*data\.max_document"),
        ("input,output\nмама,раму\n".encode("utf-16")[:-1], "UTF-8"),
    ],
)
def test_a_csv_that_is_wrong_as_a_whole(tmp_path, text, said):
    with pytest.raises(InputError, match=said):
        pairs(tmp_path, text, max_document=1000)


def test_a_column_that_is_not_there_is_known_before_the_rows_are_read(tmp_path):
    tables = {"a.csv": b"input,output\na,b\n", "a.tsv": b"input\toutput\na\tb\n"}
    files = [written(tmp_path, name, content) for name, content in tables.items()]
    parquet.write_table(pyarrow.table({"input": ["a"], "output": ["b"]}), tmp_path / "a.parquet")
    for file in [*files, tmp_path / "a.parquet"]:
        for keys, lacking in (({}, 0), ({"input": "wrong", "output": "none"}, 2)):
            source = SourceConfig.model_validate({"path": str(file), "format": "pairs", **keys})
            problems = PAIRS.check(file, source, "data.sources.0", DataConfig())
            assert [f"{name!r} (it has: input, output)" in problem.what for name, problem in
                    zip(keys.values(), problems, strict=True)] == [True] * lacking  # fmt: skip
    assert values(read(read_pairs, tmp_path / "a.parquet")) == [("a", "b")]
    keys = {"path": str(files[0]), "format": "pairs", "outputs": str(files[1]), "output": "none"}
    outputs = SourceConfig.model_validate(keys)
    assert len(PAIRS.check(files[0], outputs, "data.sources.0", DataConfig())) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a", "bad_row"),
        ("a,b,c", "bad_row"),
        ('"a"b,c', "bad_row"),
        (",b", "empty_side"),
        ("a, ", "empty_side"),
        (b"\xd0\xbf\xd1\x80\xff,b", "unreadable"),
        (b'"a\nb \xff",b', "unreadable"),
    ],
)
def test_bad_rows_cost_themselves_only(tmp_path, row, reason):
    row = row if isinstance(row, bytes) else row.encode()
    good = "привет мир,привет всем\n" * 20
    records = pairs(tmp_path, b"input,output\n" + good.encode() + row + b"\nlast,row\n")
    assert bad(records) == [("a.csv:22", reason)]
    assert len(records) == 22
    assert values(records[-1:]) == [("last", "row")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"input": "a"}', "no_field"),
        ('{"input": "a", "output": 3}', "no_text"),
        ('{"input": "a", "output"', "bad_json"),
        ("[1]", "bad_json"),
        ('{"input": "a", "output": " \\n"}', "empty_side"),
    ],
)
def test_bad_json_lines_of_pairs(tmp_path, line, reason):
    records = pairs(tmp_path, f'{{"input": "a", "output": "b"}}\n{line}\n', "a.jsonl")
    assert values(records[:1]) == [("a", "b")]
    assert bad(records) == [("a.jsonl:2", reason)]


@pytest.mark.parametrize(
    ("content", "place", "says"),
    [
        (f"[\n{ROW},\n{ROW[:-3]}", "3:27", "cut off"),
        (f"[{ROW},\n", "1:32", "cut off"),
        (f"[{ROW},\n{ROW},\n]", "2:30", "trailing comma"),
        ('[{"input": "a", "output": "b", "score": NaN}]', "1:41", "at 'NaN"),
        (f"[{ROW}]\n[{ROW}]\n", "2:1", r"at '\["),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_an_array_that_is_not_json_is_no_bad_row(tmp_path, content, place, says, suffix):
    """Without it all rows of the file would be lost, and among many files stay under data.max_bad."""
    packed = gzip.compress(content.encode()) if suffix == ".json.gz" else content
    with pytest.raises(InputError, match=says) as error:
        pairs(tmp_path, packed, f"a{suffix}")
    assert f"a{suffix}:{place}: " in str(error.value)


def test_pairs_in_a_file_of_the_wrong_kind(tmp_path):
    (record,) = pairs(tmp_path, '[{"input": "a", "output": "b"}]', "a.json")
    assert (record.fields, record.origin) == (Pair("a", "b"), "a.json[0]")
    with pytest.raises(InputError, match="unpack it"):
        pairs(tmp_path, gzip.compress(b"input,output\na,b\n"), "a.csv.gz")
    (record,) = pairs(tmp_path, b"\0\1\2" * 100)
    assert (record.origin, record.reason) == ("a.csv", "binary")


def test_validation_pairs_are_not_read_with_the_outputs_of_training(tmp_path):
    config = DataConfig.model_validate(
        {"sources": [{"path": "in.txt", "format": "pairs", "outputs": "out.txt"}], "validation": "held.csv"}
    )
    (_, held), (_, training) = list_sources(config)
    assert (held.path, held.outputs, training.outputs) == (["held.csv"], "", "out.txt")
