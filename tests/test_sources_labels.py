"""Texts with labels: csv, JSON lines, parquet, folders; bad rows cost themselves only and say where they stand."""

import datasets
import pytest
import zstandard

from artel.errors import InputError
from artel.text import LabeledText, Record
from artel.text.formats.labels import read_labels
from support.reading import bad, checked, items, parquet, read, rows_of, written


def labels_of(folder, content, name="a.csv", **source):
    return read(read_labels, written(folder, name, content), **source)


def values(records):
    assert all(isinstance(record, Record) for record in records), records
    return [(record.fields.text, record.fields.labels) for record in records]


def test_columns_of_a_csv(tmp_path):
    found = labels_of(tmp_path, 'id,text,label\n1,"good, very",pos\n2,bad, neg \n')
    assert values(found) == [("good, very", ("pos",)), ("bad", ("neg",))]
    assert found[0] == Record("good, very", "a.csv:2", "set", LabeledText("good, very", "", ("pos",)), group="")
    named = labels_of(tmp_path, "body\ttopic\ngoal\tsport\n", "a.tsv", field="body", label="topic")
    assert values(named) == [("goal", ("sport",))]


def test_pairs_of_texts_go_by_their_first_text(tmp_path):
    (found,) = labels_of(tmp_path, "premise,other,label\na b,c,yes\n", field="premise", second="other")
    assert found == Record("a b\nc", "a.csv:2", "set", LabeledText("a b", "c", ("yes",)), group="a b")


@pytest.mark.parametrize(
    ("value", "labels", "number"),
    [("pos", ("pos",), None), (3, ("3",), 3.0), (0.5, ("0.5",), 0.5), (True, ("true",), None), (["b", "a", "b"],
     ("b", "a"), None), ([], (), None), ([1, 2], ("1", "2"), None), ("1e400", ("1e400",), None)],
)  # fmt: skip
def test_labels_as_json_has_them(tmp_path, value, labels, number):
    (found,) = read(read_labels, rows_of(tmp_path, [{"text": "a", "label": value}]))
    assert found.fields == LabeledText("a", "", labels, number)


@pytest.mark.parametrize("marks", [[0, 1, 0], [1, 1], [0.0, 1.0]])
def test_marks_of_labels_are_not_taken_for_labels(tmp_path, marks):
    """`multi_label_classification` of transformers: a list with 0 or 1 for each label."""
    found = read(read_labels, rows_of(tmp_path, [{"text": "a", "label": marks}, {"text": "b", "label": [0, 1]}]))
    assert bad(found) == [("a.jsonl:1", "no_label")]
    assert f"a list of {len(marks)} marks" in found[0].detail
    assert values(found[1:]) == [("b", ("0", "1"))]


def test_the_text_of_a_list_is_no_label(tmp_path):
    """Lists as pandas and `datasets` write them to csv."""
    cells = ("['x', 'y']", "['x' 'y']", "[]", "[1 2]", '[""x""]')
    rows = "".join(f'{number},"{cell}"\n' for number, cell in enumerate(cells))
    assert [reason for _, reason in bad(labels_of(tmp_path, f"text,label\n{rows}"))] == ["no_label"] * len(cells)
    assert values(labels_of(tmp_path, "text,label\na,[x]\n")) == [("a", ("[x]",))]


def test_several_labels_in_one_cell_and_in_columns(tmp_path):
    found = labels_of(tmp_path, "text,label\na,x| y\nb,\nc,x\n", separator="|")
    assert values(found) == [("a", ("x", "y")), ("b", ()), ("c", ("x",))]
    found = labels_of(tmp_path, "text,toxic,insult\na,1,0\nb,0,0\nc,1.0,True\n", label=["toxic", "insult"])
    assert values(found) == [("a", ("toxic",)), ("b", ()), ("c", ("toxic", "insult"))]
    found = labels_of(tmp_path, "text,toxic,insult\na,2,0\nb,0,1\n", label=["toxic", "insult"])
    assert bad(found) == [("a.csv:2", "no_label")]


def test_rows_that_cannot_be_used(tmp_path):
    found = labels_of(tmp_path, "text,label\n ,pos\ngood,\na,b,c\nfine,pos\n")
    assert bad(found) == [("a.csv:2", "empty"), ("a.csv:3", "no_label"), ("a.csv:4", "bad_row")]
    assert "has 3 columns, but the header has 2" in found[2].detail
    rows = ["{", {"text": "a"}, {"label": "x"}, {"text": 1, "label": "x"}, {"text": "a", "label": {"x": 1}},
            {"text": "a", "label": None}, {"text": "a", "label": [None]}, {"text": "a", "label": "x"}]  # fmt: skip
    found = read(read_labels, rows_of(tmp_path, rows))
    assert bad(found) == [(f"a.jsonl:{number}", reason) for number, reason in enumerate(
        ["bad_json", "no_field", "no_field", "no_text", "no_label", "no_label", "no_label"], start=1)]  # fmt: skip
    assert "it has: text" in found[1].detail
    pair = labels_of(tmp_path, "text,other,label\na,,x\n", second="other")
    assert bad(pair) == [("a.csv:2", "empty")]
    assert "second text" in pair[0].detail


def test_a_missing_column_is_told_before_anything_is_read(tmp_path):
    table = written(tmp_path, "a.csv", "text,topic\na,b\n")
    with pytest.raises(InputError, match=r"no column 'label' \(it has: text, topic\)(.|\n)*label: NAME"):
        checked(table, format="labels")
    rows = written(tmp_path, "a.parquet", parquet({"text": ["a"], "topic": ["b"]}))
    with pytest.raises(InputError, match=r"no column 'label' \(it has: text, topic\)"):
        checked(rows, format="labels")


def test_parquet_and_the_class_names_of_datasets(tmp_path):
    found = labels_of(tmp_path, parquet({"text": ["a", "b"], "label": [["x"], []]}), "a.parquet")
    assert values(found) == [("a", ("x",)), ("b", ())]
    assert [item.origin for item in found] == ["a.parquet[0]", "a.parquet[1]"]
    features = datasets.Features({
        "text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"]),
        "more": datasets.List(datasets.ClassLabel(names=["x", "y"]))})  # fmt: skip
    rows = {"text": ["a", "b", "c"], "label": [1, 0, -1], "more": [[0, 1], [], [1]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub.parquet")
    found = read(read_labels, tmp_path / "hub.parquet")
    assert values(found[:2]) == [("a", ("pos",)), ("b", ("neg",))]
    assert bad(found) == [("hub.parquet[2]", "no_label")]
    found = read(read_labels, tmp_path / "hub.parquet", label="more")
    assert values(found) == [("a", ("x", "y")), ("b", ()), ("c", ("y",))]


def test_folders_named_by_their_labels(tmp_path, monkeypatch):
    for label, texts in {"pos": ["good\nvery good", "fine"], "neg": ["bad", " "]}.items():
        (tmp_path / "films" / label).mkdir(parents=True)
        for number, text in enumerate(texts):
            (tmp_path / "films" / label / f"{number}.txt").write_text(text)
    packed = zstandard.ZstdCompressor().compress(b"packed")
    (tmp_path / "films" / "pos" / "2.txt.zst").write_bytes(packed)
    found = list(items("films", format="labels"))
    assert values([item for item in found if isinstance(item, Record)]) == [
        ("bad", ("neg",)), ("good\nvery good", ("pos",)), ("fine", ("pos",)), ("packed", ("pos",))]  # fmt: skip
    assert bad(found) == [("films/neg/1.txt", "empty")]
    by_line = list(items("films/pos/0.txt", format="labels", document="line"))
    assert values(by_line) == [("good", ("pos",)), ("very good", ("pos",))]
    assert [item.origin for item in by_line] == ["films/pos/0.txt:1", "films/pos/0.txt:2"]
    monkeypatch.chdir(tmp_path / "films" / "pos")  # the folder's name is not in the path
    assert values(items("1.txt", format="labels")) == [("fine", ("pos",))]
