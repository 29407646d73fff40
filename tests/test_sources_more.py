"""Parquet, tables, compressed files, sets inside a source, S3 and the hub: the same records, each accounted for."""

import bz2
import functools
import gzip
import json
import lzma
import os
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text.records import Record, Rejected
from support.reading import checked, items, items_of, read_texts
from support.servers import LINES, TEXTS

PACKERS = {"gz": gzip.compress, "zst": zstandard.compress, "xz": lzma.compress, "bz2": bz2.compress}


def parquet(file: Path, columns, **more) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **more)
    return file


# Parquet


def test_parquet_of_several_row_groups_is_read_by_suffix_with_the_row_as_origin(tmp_path):
    file = parquet(tmp_path / "a.parquet", {"id": range(500), "text": TEXTS}, row_group_size=64)
    records = items(file)
    assert records == [Record(text, f"{file}[{row}]", str(file)) for row, text in enumerate(TEXTS)]
    parquet(tmp_path / "b.parquet", {"body": ["one"]})
    with pytest.raises(InputError, match=r"b\.parquet has no column 'text' \(it has: body\)"):
        checked(tmp_path)  # the folder holds both
    assert read_texts(tmp_path / "b.parquet", field="body")[0] == ["one"]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.large_binary(),
     pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("compression", ["none", "zstd", "snappy"])
def test_parquet_of_every_kind_of_text(tmp_path, kind, compression):
    array = pyarrow.array([text.encode() for text in TEXTS] if "binary" in str(kind) else TEXTS).cast(kind)
    assert read_texts(parquet(tmp_path / "a.parquet", {"text": array}, compression=compression))[0] == TEXTS


def test_parquet_rows_that_are_no_text_cost_themselves_only(tmp_path):
    wrong = pyarrow.array([b"one", b"\xff\xfe\x00", None, "слово".encode()]).cast(pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(4, *wrong.buffers()[1:], wrong.buffers()[0])  # says it is UTF-8, and is not
    texts, ledger = read_texts(parquet(tmp_path / "a.parquet", {"text": text}), max_bad=0.5)
    assert texts == ["one", "слово"]
    bad = [(entry["origin"][-3:], entry["reason"]) for entry in ledger["rejected"]]
    assert bad == [("[1]", "unreadable"), ("[2]", "no_text")]
    cyrillic = parquet(tmp_path / "b.parquet", {"text": [text.encode("koi8-r") for text in TEXTS]})
    assert read_texts(cyrillic, encoding="koi8-r")[0] == TEXTS


def test_a_text_that_is_too_large_is_told_with_its_row(tmp_path):
    file = parquet(tmp_path / "a.parquet", {"text": ["one", "x" * 2000]})
    with pytest.raises(InputError, match=r"a\.parquet\[1\].*1,000 bytes \(data\.max_document\)"):
        items(file, max_document=1000)


@pytest.mark.parametrize(
    ("columns", "field", "said"),
    [
        ({"text": [1, 2]}, "text", "has int64, not text, in the column 'text'"),
        ({"text": [["a"], []]}, "text", "has list<element: string>, not text, in the column 'text'"),
        ({"body": ["a"], "id": [1]}, "text", r"has no column 'text' \(it has: body, id\)"),
        ({}, "text", r"has no column 'text' \(it has: none\)"),
    ],
)
def test_a_wrong_column_is_told_before_reading_and_at_reading(tmp_path, columns, field, said):
    file = parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(InputError, match=rf"data\.sources\.0\.field: .*a\.parquet {said}\n.*field:"):
        checked(file, field=field)
    with pytest.raises(InputError, match=rf"a\.parquet: {said}\n.*field:"):
        items(file, field=field)


def test_without_the_packages_it_says_what_to_install(tmp_path, monkeypatch):
    file = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it fails, as where it is not installed
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"needs the package pyarrow.*\n.*pip install 'artel-lm\[parquet\]'"):
        checked(file)
    with pytest.raises(InputError, match=r"needs the package s3fs.*\n.*pip install 'artel-lm\[s3\]'"):
        checked("s3://bucket/a.jsonl")


@pytest.mark.parametrize("cut", [0, 3, 8, 100, -1, -9])
def test_truncated_parquet(tmp_path, cut):
    file = parquet(tmp_path / "a.parquet", {"text": TEXTS})
    file.write_bytes(file.read_bytes()[:cut])
    for action in (checked, items, functools.partial(items, format="chat")):
        with pytest.raises(InputError, match=r"a\.parquet: cannot be read as parquet: .*\n.*download"):
            action(file)


def test_parquet_with_a_column_name_that_is_no_text(tmp_path):
    file = parquet(tmp_path / "a.parquet", {"text": ["one"], "name": [1]}, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"name", b"n\xffme"))
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as parquet: 'utf-8' codec"):
        checked(file)


def test_parquet_damaged_in_the_middle_yields_what_stands_before_and_tells(tmp_path):
    file = parquet(tmp_path / "a.parquet", {"text": TEXTS * 20}, row_group_size=1000, compression="zstd",
                   use_dictionary=False)  # fmt: skip
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    file.write_bytes(content)
    results = []
    reader = items_of(DataConfig(sources=[SourceConfig(path=[str(file)])]))
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as parquet"):
        results.extend(item.text for item in reader)
    assert 1000 <= len(results) < 9000
    assert results == (TEXTS * 20)[: len(results)]


def test_chat_and_preferences_in_parquet_are_those_in_json_lines(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
            for n in range(300)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checked(tmp_path / "a.parquet", format="chat")
    of_parquet, of_lines = (items(tmp_path / name, format="chat") for name in ("a.parquet", "a.jsonl"))
    assert [item.fields for item in of_parquet] == [item.fields for item in of_lines]
    assert of_parquet[299].origin.endswith("a.parquet[299]")
    parquet(tmp_path / "p.parquet", {"prompt": ["q"], "chosen": ["yes"], "rejected": ["no"]})
    (record,) = items(tmp_path / "p.parquet", format="preference")
    assert (record.fields.chosen.content, record.fields.rejected.content) == ("yes", "no")


# Tables


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".xz", ".bz2"])
def test_texts_in_csv_and_tsv_plain_and_compressed(tmp_path, suffix):
    pack = PACKERS.get(suffix[1:], bytes)
    (tmp_path / f"a.csv{suffix}").write_bytes(pack('id,body\n1,"one, ""two""\nthree"\n2,слово\n'.encode()))
    (tmp_path / f"b.tsv{suffix}").write_bytes(pack("body\tid\nчетыре, пять\t3\n".encode()))
    records = items(tmp_path, format="csv", field="body")
    assert [item.text for item in records] == ['one, "two"\nthree', "слово", "четыре, пять"]
    assert [Path(item.origin).name for item in records] == [f"a.csv{suffix}:2", f"a.csv{suffix}:4", f"b.tsv{suffix}:2"]


def test_a_table_says_what_to_write(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"id,body\n1,one\n"))
    with pytest.raises(InputError, match=r"a\.csv\.gz is a table, not text\n.*format: csv and field: COLUMN"):
        checked(tmp_path / "a.csv.gz")
    with pytest.raises(InputError, match=r"no column 'text' \(it has: id, body\)\n.*field: NAME"):
        checked(tmp_path / "a.csv.gz", format="csv")


@pytest.mark.slow
def test_hostile_tables(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"text\none\nt\0wo\n")
    (record,) = items(file, format="csv")
    assert (record.origin, record.reason) == (str(file), "binary")
    checked(file, format="csv")
    file.write_bytes(b"text\n" + b"word\n" * 300_000 + b"t\0wo\n")  # beyond the sample
    assert read_texts(file, format="csv")[0] == ["word", "two"]  # cleaned of it
    file.write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.csv:1: the header has no column 'text' \(it has: none\)"):
        checked(file, format="csv")
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(b"text\n" + os.urandom(300_000).hex().encode())[:-40])
    with pytest.raises(InputError, match=r"b\.csv\.gz:\d: the compressed file is damaged here"):
        items(packed, format="csv")


# Compressed files


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_lines_whole_in_members_cut_and_empty(tmp_path, suffix):
    pack = PACKERS[suffix]
    file = tmp_path / f"a.jsonl.{suffix}"
    file.write_bytes(pack(LINES))
    assert read_texts(file)[0] == TEXTS
    file.write_bytes(pack(LINES[:1000]) + pack(LINES[1000:]))
    assert read_texts(file)[0] == TEXTS
    file.write_bytes(pack(LINES[:1000]) + pack(LINES[1000:])[:-30])
    with pytest.raises(InputError, match=rf"\.{suffix}:\d+: the compressed file is damaged here: .*pack it again"):
        read_texts(file)
    for content in (pack(LINES) + b"no such thing as this", b"nonsense"):
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"a\.jsonl\.{suffix}:\d+: the compressed file is damaged here"):
            read_texts(file)
    file.write_bytes(b"")
    with pytest.raises(InputError, match="no document is left"):
        read_texts(file)


def test_padding_of_xz_is_no_damage(tmp_path):
    content = lzma.compress(LINES[:1000]) + bytes(8) + lzma.compress(LINES[1000:]) + bytes(4)
    (tmp_path / "a.jsonl.xz").write_bytes(content)
    assert read_texts(tmp_path / "a.jsonl.xz")[0] == TEXTS


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_text_is_a_document_or_lines(tmp_path, suffix):
    file = tmp_path / f"a.txt.{suffix}"
    file.write_bytes(PACKERS[suffix]("\n".join(TEXTS).encode("cp1251")))
    assert read_texts(tmp_path)[0] == ["\n".join(TEXTS)]
    assert read_texts(file, document="line")[0] == TEXTS
    with pytest.raises(InputError, match=r"its unpacked bytes are more than data\.max_document"):
        items(file, max_document=1000)
    file.write_bytes(file.read_bytes()[:-20])
    (record,) = items(file)
    assert (record.origin, record.reason) == (str(file), "truncated")


# Sets


def pile_counts(shared_data: Path) -> tuple[Counter, list[str]]:
    """Documents of each set, counted apart from the readers under test."""
    counts, files = Counter(), sorted((shared_data / "pile").glob("*.jsonl.zst"))
    for file in files:
        with zstandard.open(file, "rt", encoding="utf-8") as stream:
            counts.update(json.loads(line)["meta"]["pile_set_name"] for line in stream)
    return counts, [str(file) for file in files]


def test_the_piles_documents_are_counted_by_their_sets(shared_data):
    counts, _ = pile_counts(shared_data)
    assert len(counts) == 6
    _, ledger = read_texts(shared_data / "pile" / "*.jsonl.zst", set_field="auto")
    assert {name: entry["read"] for name, entry in ledger["sets"].items()} == counts
    _, ledger = read_texts(shared_data / "pile" / "*.jsonl.zst", set_field="meta.pile_set_name", name="pile")
    assert {name: entry["read"] for name, entry in ledger["sets"].items()} == counts
    _, ledger = read_texts(shared_data / "pile" / "*.jsonl.zst", name="pile")
    assert ledger["sets"]["pile"]["read"] == counts.total()


def test_sets_are_included_or_excluded(shared_data):
    counts, _ = pile_counts(shared_data)
    (one, _), (two, _) = counts.most_common(2)
    _, ledger = read_texts(shared_data / "pile" / "*.jsonl.zst", set_field="auto", include=[one, two])
    assert {name: entry["read"] for name, entry in ledger["sets"].items()} == counts
    assert {name for name, entry in ledger["sets"].items() if entry["kept"]} == {one, two}
    assert ledger["documents"]["dropped"]["excluded_set"] == counts.total() - counts[one] - counts[two]
    _, ledger = read_texts(shared_data / "pile" / "*.jsonl.zst", set_field="auto", exclude=[one])
    assert ledger["sets"][one]["kept"] == 0
    assert ledger["sets"][one]["dropped"] == {"excluded_set": counts[one]}
    taken = items(shared_data / "pile" / "*.jsonl.zst", set_field="auto", include=[one], rows="[1:3]")
    assert sum(isinstance(item, Record) for item in taken) == 2


def test_a_misspelled_set_is_told(shared_data):
    for key in ("include", "exclude"):
        with pytest.raises(InputError, match=rf"sources\.0\.{key}: no record has the set Books \(the sets are: .*"):
            read_texts(shared_data / "pile" / "*.jsonl.zst", set_field="auto", **{key: ["Books"]})


def test_pile_as_parquet_has_the_same_sets(shared_data, tmp_path):
    rows = []
    for file in pile_counts(shared_data)[1]:
        with zstandard.open(file, "rt", encoding="utf-8") as stream:
            rows += map(json.loads, stream)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pile.parquet")
    of_lines, ledger_of_lines = read_texts(shared_data / "pile" / "*.jsonl.zst", set_field="auto")
    of_parquet, ledger = read_texts(tmp_path / "pile.parquet", set_field="auto")
    assert (sorted(of_parquet), ledger["sets"]) == (sorted(of_lines), ledger_of_lines["sets"])


def test_set_fields_that_are_missing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "kind": "A"}\n{"text": "two"}\n{"text": "three", "kind": 3}\n')
    records = items(tmp_path / "a.jsonl", set_field="kind", name="all")
    assert (records[0].set_name, records[1].reason, records[2].reason) == ("A", "no_set", "no_set")
    assert [item.set_name for item in items(tmp_path / "a.jsonl", set_field="auto", name="all")] == ["all"] * 3
    (tmp_path / "a.csv").write_text("text,kind\none,A\ntwo,\n")
    records = items(tmp_path / "a.csv", format="csv", set_field="kind")
    assert (records[0].set_name, records[1].reason) == ("A", "no_set")
    file = parquet(tmp_path / "a.parquet", {"text": ["one", "two"], "kind": ["A", None]})
    records = items(file, set_field="kind")
    assert (records[0].set_name, records[1].reason) == ("A", "no_set")
    records = items(file, set_field="kind", include=["A"])  # what cannot be read is never passed over in silence
    assert [type(item) for item in records] == [Record, Rejected]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"include": ["A"]}, "write set_field: auto"),
        ({"include": ["A"], "exclude": ["B"], "set_field": "kind"}, "keep one"),
        ({"set_field": "kind", "format": "text"}, "set_field has no meaning for format: text"),
        ({"set_field": "auto", "format": "csv"}, "write the name of the column"),
    ],
)
def test_keys_of_sets_that_contradict(source, said):
    with pytest.raises(ValueError, match=said):
        SourceConfig(path=["a"], **source)


def test_a_shard_of_nulls_is_told_row_by_row(tmp_path):
    """A column without a single text is written as one of nulls: its rows are bad, other shards are read."""
    parquet(tmp_path / "a.parquet", {"text": TEXTS})
    parquet(tmp_path / "b.parquet", {"text": pyarrow.nulls(3)})
    texts, ledger = read_texts(tmp_path / "*.parquet", max_bad=0.01)
    assert (len(texts), ledger["documents"]["dropped"]) == (500, {"no_text": 3})
    assert ledger["rejected"][0]["origin"].endswith("b.parquet[0]")
    with pytest.raises(InputError, match=r"b\.parquet\[0\]: column 'text' is empty \(null\)\n.*2 more"):
        read_texts(tmp_path / "b.parquet")
