"""Windows of texts with names: spans come back, words are learned once and judged where most stands around them."""

import math
import random
import tracemalloc

import numpy as np
import pytest

from artel.config import RunConfig, TokenizerTraining
from artel.objectives.tokens.word_windows import NO_WORD, best_windows
from artel.registry import FORMATS
from artel.text import Document, Ledger, read_documents
from artel.text.tags import find_entities
from artel.tokens import StoreWriter, TokenStore, train_tokenizer
from support.entities import document, objective, tags_of
from support.reading import read, written


@pytest.mark.parametrize("scheme", ["bio", "bilou"])
@pytest.mark.parametrize("nested", ["outermost", "innermost"])
def test_real_names_come_back_from_their_windows_character_for_character(shared_data, roberta, scheme, nested):
    labels = ["LocOrg", "Location", "Org", "Person"]
    tagging = objective(roberta, labels=labels, scheme=scheme, nested=nested)
    data = RunConfig.model_validate({"data": {"validation": 0.0, "sources": [
        {"path": str(shared_data / "encoders" / "factrueval_dev.jsonl"), "format": "entities"}]}}).data  # fmt: skip
    documents = [Document(each.record, "validation") for each in read_documents(data, Ledger())]
    left_out = count = 0
    for each, made in zip(documents, tagging.samples(documents), strict=True):
        assert len(made.samples) > 1
        assert made.counts.get("cut_words", 0) == 0
        left_out += made.counts.get("overlapping_left_out", 0)
        starts, ends = made.reference["starts"], made.reference["ends"]
        found = find_entities(tags_of(made, tagging.tags.tags))
        spans = [(starts[first], ends[end - 1], label) for first, end, label in found]
        assert spans == [tuple(span) for span in made.reference["spans"]]
        assert set(spans) <= set(each.record.fields.spans)
        count += len(spans)
    assert count + left_out == 2_608
    assert left_out > 100


def test_windows_that_are_learned_do_not_overlap_and_teach_each_word_once(roberta):
    text = "Anna met Boris . " * 60
    spans = [(at, at + 4, "PER") for at in range(0, len(text), 17)]
    tagging = objective(roberta, block=40, labels=["PER"])
    learned, judged = (
        next(tagging.samples([document(text, *spans, split=split)])) for split in ("train", "validation")
    )
    room = 40 - 2
    assert [sample.numbers[1] for sample in learned.samples] == list(range(0, room * len(learned.samples), room))
    (encoded,) = roberta.encode_with_offsets([text])
    assert sum(len(sample.ids) - 2 for sample in learned.samples) == len(encoded.ids)
    assert len(judged.samples) > 1.8 * len(learned.samples)
    assert tags_of(learned, tagging.tags.tags) == tags_of(judged, tagging.tags.tags) == ["B-PER", "O", "O", "O"] * 60


def test_a_span_within_a_word_is_learned_by_the_whole_word_and_counted(roberta):
    tagging = objective(roberta, labels=["LOC"])
    made = next(tagging.samples([document("Moscowbased firms", (0, 6, "LOC"))]))
    assert tags_of(made, tagging.tags.tags) == ["B-LOC", "O"]
    assert made.counts == {"cut_words": 1}


def around(word, start, room, tokens):
    """How much stands around a word in a window; -1 outside."""
    end = min(start + room, tokens)
    left, right = (math.inf if start == 0 else word - start), (math.inf if end == tokens else end - 1 - word)
    return min(left, right) if start <= word < end else -1


def test_a_word_is_judged_in_the_first_of_the_windows_with_most_around_it():
    chance = random.Random(0)
    for _ in range(200):
        room = chance.randint(2, 12)
        stride, tokens = chance.randint(1, room), chance.randint(1, 60)
        starts = list(range(0, max(1, tokens - room + stride), stride))
        owners = best_windows(np.arange(tokens), np.array(starts), room, tokens)
        for word, owner in enumerate(owners):
            most = [around(word, start, room, tokens) for start in starts]
            assert owner == most.index(max(most))


@pytest.fixture(scope="module")
def small():
    """A tokenizer of pieces of words."""
    return train_tokenizer(iter(["Anna met Boris . gonna do it"] * 50), TokenizerTraining(vocab=270), encoder=True)


def test_the_memory_of_a_text_grows_with_its_words_alone(small):
    """It has 8,000 words and over 1,000 windows: a number for each of both would take 64 MB."""
    tagging = objective(small, block=32, labels=["PER"])
    long = document("Anna met Boris . " * 2000)
    tracemalloc.start()
    (made,) = tagging.samples([long])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made.samples) > 1000
    assert peak < 20e6


UNIVERSAL = """1\tI\ti\tPRON\t_\t_\t2\tnsubj\t_\t_
2\tgon\tgo\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
3\tna\tto\tPART\t_\t_\t4\tmark\t_\t_
4\tdo\tdo\tVERB\t_\t_\t2\txcomp\t_\t_
5\tit-now\tit\tPRON\t_\t_\t4\tobj\t_\t_
"""


def test_a_word_that_begins_within_another_is_neither_learned_nor_judged(small, tmp_path):
    """A tagger that says what it was taught is right in all that is judged."""
    (record,) = read(FORMATS["conll"].read, written(tmp_path, "a.conllu", UNIVERSAL), format="conll", kind="words")
    tagging = objective(small, labels=["NOUN", "PART", "PRON", "VERB"], scheme="words")
    (made,) = tagging.samples([Document(record, "validation")])
    assert tags_of(made, tagging.tags.tags) == ["PRON", "VERB", "VERB", "PRON", "PRON", "PRON"]  # it - now
    assert made.counts == {"cut_words": 2}
    (tmp_path / "store").mkdir()
    writer = StoreWriter(tmp_path / "store", small.vocabulary)
    writer.add("validation", made.samples, 1, "a.conllu:1", made.reference)
    writer.close({"key": "k", "tokenizer": "t", "vocabulary": small.vocabulary})
    (sample,) = made.samples
    taught = np.where(sample.flags == NO_WORD, 0, sample.flags - 1.0)[None]
    part = TokenStore(tmp_path / "store").validation
    figures = tagging.metrics({"loss": 0.0, "targets": 6.0, "correct": 6.0}, taught, part)
    assert figures["accuracy"] == figures["macro_f1"] == 1.0
    assert figures["commonest_tag"] == 0.5
    (labels, _) = tagging.details(taught, part)["tables"].values()
    assert {row["label"]: row["support"] for row in labels} == {"PRON": 2, "VERB": 2}
