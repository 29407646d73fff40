"""Texts that match, in the forms that data sets of embeddings and rerankers have."""

import re
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest

from artel.text import DroppedRecord, Match, Record, Rejected
from artel.text.formats.matches import read_matches
from support.reading import items, read_rows, written

matches = partial(read_rows, read_matches, "matches")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"anchor": "a", "positive": "b"}, Match("a", ("b",))),
        ({"anchor": "a", "positive": "b", "negative": "c"}, Match("a", ("b",), ("c",))),
        ({"query": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}, Match("a", ("b",), ("c", "d"))),
        ({"question": "a", "answer": "b"}, Match("a", ("b",))),
        ({"query": "a", "pos": ["b", "e"], "neg": ["c", "d", "c"], "pos_scores": [0.9, 0.8], "prompt": "p"},
         Match("a", ("b", "e"), ("c", "d"))),
        ({"query": "a", "pos": ["b"], "neg": []}, Match("a", ("b",))),
        ({"sentence1": "a", "sentence2": "b", "score": 0.5}, Match("a", ("b",), (), 0.5)),
        ({"sentence1": "a", "sentence2": "b", "label": 1}, Match("a", ("b",), (), 1.0)),
        ({"query": "a", "passage": "b", "label": False}, Match("a", ("b",), (), 0.0)),
        ({"sentence1": "a", "sentence2": "a", "score": 1}, Match("a", ("a",), (), 1.0)),
    ],
)  # fmt: skip
def test_every_form_of_matches(tmp_path, row, expected):
    (record,) = matches(tmp_path, row)
    assert record.fields == expected
    assert (record.text, record.group, record.origin) == ("\n".join(expected.texts), "a", "a.jsonl:1")


def test_fields_of_other_names(tmp_path):
    row = {"title": "a", "text": {"body": "b"}, "wrong": ["c"], "query": "not this"}
    (record,) = matches(tmp_path, row, mapping={"query": "title", "positive": "text.body", "negatives": "wrong"})
    assert record.fields == Match("a", ("b",), ("c",))


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        (
            {"text": "a", "positive": "b"},
            "no_query",
            r"text, positive\); name it: data\.sources\.0\.mapping\.query=text$",
        ),
        ({"id": 3, "q": "a", "doc": "b"}, "no_query", r"mapping\.query=q data\.sources\.0\.mapping\.positive=doc$"),
        ({"q": None, "positive": "b"}, "no_query", r"mapping\.query=NAME$"),
        ({"query": None, "positive": "b"}, "no_query", "fill in 'query', or remove the row"),
        ({"query": ["a", "b"], "positive": "b"}, "no_query", "2 queries .* write a row for each"),
        ({"query": "a"}, "no_positive", "no text that matches .*mapping.positive=NAME$"),
        ({"query": "a", "the text": "b"}, "no_positive", r"name it: 'data\.sources\.0\.mapping\.positive=the text'$"),
        ({"query": "a", "pos": [], "neg": ["c"]}, "no_positive", "no text that matches .*fill in 'pos'"),
        ({"query": " ", "positive": "b"}, "empty", "'query' holds an empty text"),
        ({"query": "a", "positive": 3}, "no_text", "'positive' holds int"),
        ({"query": "a", "positive": "b", "negative": "b"}, "positive_is_negative", "among its negatives"),
        ({"query": "a", "positive": "b", "negative": "a"}, "positive_is_negative", "among its negatives"),
        ({"sentence1": "a", "sentence2": "b", "score": "high"}, "bad_score", "'score' is 'high'; write a number"),
        ({"sentence1": "a", "sentence2": "b", "label": [1]}, "bad_score", "write a number"),
        ({"query": "a", "pos": ["b"], "neg": ["c"], "score": 1}, "score_of_several", "1 negatives"),
        ("3", "bad_json", "is int"),
    ],
)
def test_bad_matches(tmp_path, row, reason, said):
    good, bad = matches(tmp_path, {"query": "a", "positive": "b"}, row)
    assert (type(good), type(bad)) == (Record, Rejected)
    assert (bad.origin, bad.reason) == ("a.jsonl:2", reason)
    assert re.search(said, bad.detail)


def test_tables(tmp_path):
    text = 'anchor,positive,negative\nа,"б, в",г\nд,е,\n'
    expected = [Match("а", ("б, в",), ("г",)), Match("д", ("е",))]
    for name, content in [("a.csv", text), ("a.tsv", text.replace('"б, в"', "б; в").replace(",", "\t"))]:
        records = items(written(tmp_path, name, content), format="matches")
        assert [record.origin.rpartition(":")[2] for record in records] == ["2", "3"]
        assert [record.fields.query for record in records] == ["а", "д"]
    assert [record.fields for record in items(tmp_path / "a.csv", format="matches")] == expected
    scored = items(written(tmp_path, "b.csv", 'sentence1,sentence2,score\na,b,0.5\nc,d,"0,25"\n'), format="matches")
    assert [record.fields.score for record in scored] == [0.5, 0.25]
    unequal = items(written(tmp_path, "c.csv", "query,positive\na,b\nc\n"), format="matches")
    assert (unequal[1].reason, unequal[1].origin.rpartition(":")[2]) == ("bad_row", "3")
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"query": ["a"], "pos": [["b", "c"]], "neg": [["d"]]}), file)
    assert [record.fields for record in items(file, format="matches")] == [Match("a", ("b", "c"), ("d",))]


def test_groups_of_lines(tmp_path):
    file = written(tmp_path, "a.txt", "one\nuno\n\n\n  two \ndos\ndeux\n \nlonely\n\nthree\nthree\n")
    first, second, lonely, repeated = items(file, format="matches")
    assert (first.fields, second.fields) == (Match("one", ("uno",)), Match("two", ("dos", "deux")))
    assert second.origin == f"{file}:5"
    assert (lonely.origin, lonely.reason) == (f"{file}:9", "no_positive")
    assert repeated.reason == "no_positive"
    lines = "".join(f"line {number}\n" for number in range(1001))
    (novel,) = items(written(tmp_path, "b.txt", lines), format="matches")
    assert novel.reason == "group_too_large"


def test_questions_of_squad_share_a_group_with_their_paragraph(tmp_path):
    squad = (
        '{"data": [{"paragraphs": [{"context": "c d", "qas": [\n'
        '{"id": "1", "question": "a?", "answers": [{"text": "c", "answer_start": 0}]},\n'
        '{"id": "2", "question": "b?", "answers": [{"text": "x", "answer_start": 0}]},\n'
        '{"id": "3", "question": "e?", "answers": []}]}]}]}\n'
    )
    first, bad, unanswered = items(written(tmp_path, "a.json", squad), format="matches")
    assert (first.fields, first.group) == (Match("a?", ("c d",)), "c d")
    assert (type(unanswered), unanswered.reason) == (DroppedRecord, "unanswerable")
    assert (bad.reason, bad.origin) == ("answer_not_in_context", f"{tmp_path / 'a.json'}:3 (2)")
    lines = written(tmp_path, "b.json", '{"query": "a", "pos": ["b"]}\n{"query": "c", "pos": ["d"]}\n')
    assert len(items(lines, format="matches")) == 2


def test_real_files(shared_data):
    groups = items(shared_data / "dedup" / "ru_near_duplicates.txt", format="matches")
    assert len(groups) == 7781
    lonely = [item for item in groups if not isinstance(item, Record)]
    assert {item.reason for item in lonely} == {"no_positive"}  # the same line twice
    assert len(lonely) == 11
    questions = items(shared_data / "qa" / "xquad.ru.first36.json", format="matches")
    assert len(questions) == 925
    assert len({record.group for record in questions}) < 300
