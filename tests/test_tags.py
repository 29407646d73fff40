"""Tags and entities by seqeval's definitions, and how texts become windows of words with tags."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from artel.config import RunConfig
from artel.objectives.tokens.entities import Scores
from artel.objectives.tokens.tag_set import TagSet
from artel.objectives.tokens.word_windows import best_windows, find_words, without_overlaps
from artel.text.tags import find_entities
from artel.tokens import Encoding

TAGS = ["O", *(f"{prefix}-{label}" for prefix in "BIES" for label in ("PER", "LOC", "A-B"))]
sequences = st.lists(st.sampled_from(TAGS), max_size=12)


@given(sequences)
@settings(max_examples=300, deadline=None)
def test_entities_are_those_of_seqeval(tags):
    """Any sequence, well formed or not, of BIO and BIOES."""
    found = [(label, first, end - 1) for first, end, label in find_entities(tags)]
    assert found == get_entities(tags)


@given(st.lists(st.tuples(sequences, st.randoms()), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
@pytest.mark.filterwarnings("ignore")  # seqeval warns where a label has no names
def test_figures_are_those_of_seqeval(drawn):
    gold = [tags for tags, _ in drawn]
    guessed = [[chance.choice([tag, tag, chance.choice(TAGS)]) for tag in tags] for tags, chance in drawn]
    scores = Scores()
    for tags, others in zip(gold, guessed, strict=True):
        scores.add(find_entities(tags), find_entities(others))
    micro = scores.micro()
    assert micro["precision"] == pytest.approx(precision_score(gold, guessed, zero_division=0))
    assert micro["recall"] == pytest.approx(recall_score(gold, guessed, zero_division=0))
    assert micro["f1"] == pytest.approx(f1_score(gold, guessed, zero_division=0))
    if not scores.labels:
        return
    report = classification_report(gold, guessed, output_dict=True, zero_division=0)
    assert scores.macro_f1() == pytest.approx(report["macro avg"]["f1-score"])
    rows = scores.table() | {f"{name} avg": row for name, row in scores.averages().items()}
    assert rows.keys() == report.keys()
    for name, row in rows.items():
        assert row == pytest.approx({key.replace("f1-score", "f1"): value for key, value in report[name].items()})


# words, windows, tags


@pytest.mark.parametrize(
    ("text", "places", "expected"),
    [
        # A word is its pieces, and marks stand alone.
        ("Karenina's, U.S.",
         [(0, 4), (4, 8), (8, 9), (9, 10), (10, 11), (11, 13), (13, 14), (14, 15), (15, 16)],
         [(0, "Karenina"), (2, "'"), (3, "s"), (4, ","), (5, "U"), (6, "."), (7, "S"), (8, ".")]),
        # BERT without case drops accents: U+0301 behind the last letter lies in no token.
        ("Москва\u0301 стоит", [(0, 6), (8, 13)], [(0, "Москва\u0301"), (1, "стоит")]),
        ("Маи\u0306я", [(0, 3), (3, 4), (4, 5)], [(0, "Маи\u0306я")]),
        ("a  bc ", [(0, 1), (1, 2), (1, 5), (5, 6)], [(0, "a"), (2, "bc")]),  # white space, alone and within
        ("😀 a", [(0, 1), (0, 1), (0, 1), (1, 3)], [(0, "😀"), (3, "a")]),  # several tokens of one character
        ("北京abc", [(0, 1), (1, 2), (2, 4), (4, 5)], [(0, "北"), (1, "京"), (2, "abc")]),
        ("Ёлка", [(0, 1), (1, 4)], [(0, "Ёлка")]),
    ],
)  # fmt: skip
def test_words_of_tokens(text, places, expected):
    starts, ends = map(np.array, zip(*places, strict=True))
    found = find_words(text, Encoding(np.arange(len(places)), starts, ends))
    words = zip(found.tokens.tolist(), found.starts, found.ends, strict=True)
    assert [(token, text[start:end]) for token, start, end in words] == expected


def test_a_word_is_judged_where_most_stands_around_it():
    starts = np.array([0, 4, 8])
    owners = best_windows(np.arange(16), starts, 8, 16)
    assert owners.tolist() == [0] * 6 + [1] * 4 + [2] * 6
    chance = random.Random(0)
    for _ in range(50):
        room, stride = chance.randint(4, 20), chance.randint(1, 4)
        tokens = chance.randint(room + 1, 60)
        starts = np.arange(0, tokens - room + stride, stride)
        owners = best_windows(np.arange(tokens), starts, room, tokens)
        assert (np.diff(owners) >= 0).all(), "words come in order"
        for token, owner in enumerate(owners):
            assert starts[owner] <= token < starts[owner] + room


def test_of_spans_that_overlap_the_outermost_or_the_innermost_is_taken():
    spans = [(0, 20, "ORG"), (5, 10, "LOC"), (12, 20, "PER"), (18, 25, "X"), (30, 40, "A"), (30, 40, "B")]
    assert without_overlaps(spans, innermost=False) == [(0, 20, "ORG"), (30, 40, "A")]
    assert without_overlaps(spans, innermost=True) == [(5, 10, "LOC"), (18, 25, "X"), (30, 40, "A")]


def tag_set(**tokens):
    return TagSet.from_config(RunConfig.model_validate({"objective": "tokens", "tokens": tokens}))


def test_the_tags_of_a_head():
    bio, bilou = tag_set(labels=["LOC", "PER"]), tag_set(labels=["PER"], scheme="bilou")
    assert bio.tags == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert bio.names(bio.tag_ids("PER", 3)) == ["B-PER", "I-PER", "I-PER"]
    assert bilou.tags == ("O", "B-PER", "I-PER", "L-PER", "U-PER")
    assert [bilou.names(bilou.tag_ids("PER", count)) for count in (1, 2, 3)] == [
        ["U-PER"], ["B-PER", "L-PER"], ["B-PER", "I-PER", "L-PER"]]  # fmt: skip


def test_the_tags_of_another_head_in_its_order():
    tags = tag_set(labels=["B-PER", "I-PER", "O", "B-LOC", "I-LOC"])
    assert tags.outside == 2
    assert tags.labels == ["PER", "LOC"]
    assert tags.tag_ids("LOC", 2) == [3, 4]
    only_inside = tag_set(labels=["O", "I-PER", "I-LOC"])
    assert only_inside.tag_ids("PER", 2) == [1, 1]
    bioes = tag_set(labels=["O", "S-PER", "B-PER", "E-PER", "I-PER"])
    assert bioes.tag_ids("PER", 1) == [1]
    assert bioes.tag_ids("PER", 2) == [2, 3]
    parts_of_speech = tag_set(labels=["NOUN", "VERB"], scheme="words")
    assert parts_of_speech.outside is None
    assert parts_of_speech.tag_ids("VERB", 2) == [1, 1]
