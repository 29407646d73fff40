"""Spans that begin or end within a word are reported, and refused where most do; names that overlap are counted."""

import numpy as np
import pytest

from artel.errors import InputError
from artel.objectives.tokens.word_windows import NO_WORD
from artel.preparing import prepare
from artel.text import Document
from artel.tokens import StoreWriter, TokenStore, load_tokenizer
from support.entities import document, objective
from support.messages import logged
from support.reading import rows_of
from support.saved_models import word_pieces
from support.stores import run_of

PLACES = ("Москву", "Тверь", "Париж", "Рим", "Оренбург", "Казань")


def spans(text, *names, shift=0):
    starts = [text.index(name) for name in names]
    return [[at + shift, at + len(name) + shift, "LOC"] for at, name in zip(starts, names, strict=True)]


def russian(count, shift=0):
    """Rows of one span each."""
    texts = [f"Каренина {number} раз приехала в {PLACES[number % 6]} вечером." for number in range(count)]
    return [{"text": text, "label": spans(text, PLACES[at % 6], shift=shift)} for at, text in enumerate(texts)]


def prepared(folder, rows, **tokens):
    """(the store, its messages) of a run on these rows."""
    messages = logged()
    data = {"sources": [{"path": str(rows_of(folder, rows)), "format": "entities"}], "validation": 0.2, "block": 32}
    word_pieces(folder / "tokenizer")
    tokenizer = {"from": str(folder / "tokenizer")}
    return prepare(run_of(folder, objective="tokens", tokens=tokens, data=data, tokenizer=tokenizer)), messages


def test_shifted_spans_are_refused_before_training(tmp_path):
    with pytest.raises(InputError) as refused:
        prepared(tmp_path, russian(24, shift=2))
    (problem,) = refused.value.problems
    assert problem.where == f"{tmp_path / 'a.jsonl'}:1"
    assert problem.what == "24 of 24 spans begin or end within a word, the first 'скву в'"
    assert "characters" in problem.fix


@pytest.mark.parametrize(("right", "shifted"), [(0, 19), (12, 12), (24, 1)])
def test_fewer_are_told_in_a_line(tmp_path, right, shifted):
    """Fewer than 20 spans prove nothing, nor does a half of them."""
    rows = russian(right) + russian(right + shifted, shift=2)[right:]
    _, messages = prepared(tmp_path, rows)
    (line,) = [line for line in messages if "within a word" in line]
    assert line.startswith(f"{shifted} of {right + shifted} spans begin or end within a word, the first ")
    assert f"a.jsonl:{right + 1} " in line
    assert line.endswith("; are offsets counted in characters?")


def test_right_spans_are_no_matter(tmp_path):
    _, messages = prepared(tmp_path, russian(24))
    assert not [line for line in messages if "spans" in line or "names" in line]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("我昨天在北京见到了他", "北京"),
        ("昨日は東京で会いました", "東京"),
        ("ฉันไปกรุงเทพเมื่อวาน", "กรุงเทพ"),
        ("어제 서울에서 만났다", "서울"),
        ("הייתי אתמול בירושלים", "ירושלים"),
        ("I flew (from 東京駅) to Oslo-Nord", "Oslo"),
    ],
    ids=["Chinese", "Japanese", "Thai", "Korean", "Hebrew", "marks"],
)
def test_scripts_in_which_names_touch_other_letters_are_not_judged(tmp_path, text, name):
    word_pieces(tmp_path)
    tagging = objective(load_tokenizer(str(tmp_path)), labels=["LOC"])
    (span,) = spans(text, name)
    made = tagging.samples([document(text, tuple(span))] * 24)
    assert tagging.review((f"a.jsonl:{number}", each.observed) for number, each in enumerate(made, 1)) == []


@pytest.mark.parametrize("nested", ["outermost", "innermost"])
def test_names_that_overlap_are_told(tmp_path, nested):
    rows = russian(24)
    for row in rows[:5]:
        start, end, _ = row["label"][0]
        row["label"].append([start, end + len(" вечером"), "TIME"])
    store, messages = prepared(tmp_path, rows, nested=nested)
    assert f"5 overlapping names are skipped: the {nested} ones are used (tokens.nested)" in messages
    assert store.ledger()["changed"] == {"overlapping_left_out": 5}


def test_the_accuracy_stands_beside_that_of_always_guessing_the_commonest_tag(tmp_path):
    """Six words, of which two are a name: a tagger that finds none is right in two thirds of them."""
    word_pieces(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tagging = objective(tokenizer, labels=["PER"])
    (made,) = tagging.samples([Document(document("Anna Berg met him in Oslo", (0, 9, "PER")).record, "validation")])
    (tmp_path / "store").mkdir()
    writer = StoreWriter(tmp_path / "store", tokenizer.vocabulary)
    writer.add("validation", made.samples, 1, "a.jsonl:1", made.reference)
    writer.close({"key": "k", "tokenizer": "t", "vocabulary": tokenizer.vocabulary})
    (sample,) = made.samples
    assert np.count_nonzero(sample.flags != NO_WORD) == 6
    part = TokenStore(tmp_path / "store").validation
    outside = np.zeros((1, len(sample.ids)), dtype=np.float32)
    figures = tagging.metrics({"loss": 0.0, "targets": 6.0, "correct": 4.0}, outside, part)
    assert figures["accuracy"] == figures["commonest_tag"] == pytest.approx(2 / 3)
    assert figures["f1"] == 0.0
