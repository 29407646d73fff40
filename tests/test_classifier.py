"""A quality classifier: trained on good and bad texts, and applied to the documents of a run."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from artel.cli.main import app
from artel.config import DataConfig, parse_run
from artel.errors import InputError
from artel.preparing.stores import store_key
from artel.text import Ledger, read_documents
from artel.text.classifier import Classifier, features, train_classifier

pytest.importorskip("sklearn")
CALM = "the river ran slowly past the old house where my father used to read until the evening".split()
LOUD = "buy now cheap best offer click here free win prize money casino online discount hot deal".split()


def texts(words: list[str], seed: int, count: int = 300) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(words, k=12)) for _ in range(count)]


@pytest.fixture
def trained():
    return train_classifier(texts(CALM, 1), texts(LOUD, 2), Path("prose"))


@pytest.mark.slow
def test_what_was_held_out_is_told_apart(trained):
    assert (trained.num_good, trained.num_bad) == (300, 300)
    assert trained.accuracy == trained.auc == 1.0
    assert [threshold.minimum for threshold in trained.thresholds] == [0.1, 0.25, 0.5, 0.75, 0.9]
    assert all(left.bad >= right.bad for left, right in zip(trained.thresholds, trained.thresholds[1:], strict=False))


def test_features_do_not_depend_on_length_case_or_punctuation():
    found = features(["The river ran.", "", "the RIVER, ran!", "ran"])
    buckets, values = ([part[found.texts == text] for text in range(4)] for part in (found.buckets, found.values))
    assert np.array_equal(buckets[0], buckets[2])
    assert np.array_equal(values[0], values[2])
    assert np.linalg.norm(values[0]) == pytest.approx(1)
    assert [len(part) for part in buckets] == [3 + 2, 0, 3 + 2, 1]  # words, and pairs of neighbouring ones
    assert Classifier(np.zeros(1 << 20, np.float32), 0.0).scores(["", "a"]).tolist() == [0.5, 0.5]


def test_documents_that_it_takes_for_bad_are_dropped_and_counted(trained):
    good, bad = texts(CALM, 3, 20), texts(LOUD, 4, 10)
    Path("mixed.txt").write_text("\n".join([*good, *bad]))
    data = {"sources": [{"path": "mixed.txt", "document": "line"}], "validation": 0.0}
    ledger = Ledger()
    with_rule = data | {"clean": {"classifier": {"from": "prose"}}}
    kept = [document.record.text for document in read_documents(DataConfig.model_validate(with_rule), ledger)]
    assert kept == good
    assert ledger.total.dropped == {"quality": 10}
    strict = data | {"clean": {"classifier": {"from": "prose", "minimum": 1.0}}}
    with pytest.raises(InputError, match="30 quality"):
        list(read_documents(DataConfig.model_validate(strict), Ledger()))


def test_another_classifier_makes_another_store(trained):
    Path("mixed.txt").write_text("\n".join(texts(CALM, 3, 20)))
    source = {"sources": [{"path": "mixed.txt", "document": "line"}]}
    keys = {store_key(parse_run({"data": source}, {}, {}))}
    with_rule = source | {"clean": {"classifier": {"from": "prose"}}}
    keys.add(store_key(parse_run({"data": with_rule}, {}, {})))
    weights = Path("prose", "classifier.safetensors").read_bytes()
    Path("prose", "classifier.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    keys.add(store_key(parse_run({"data": with_rule}, {}, {})))
    assert len(keys) == 3


def test_the_command_says_what_each_threshold_keeps():
    Path("good.txt").write_text("\n".join(texts(CALM, 1)))
    rows = (json.dumps({"body": text}) for text in texts(LOUD, 2))
    Path("bad.jsonl").write_text("\n".join(rows))
    Path("bad.txt").write_text("\n".join(texts(LOUD, 2)))
    done = CliRunner().invoke(app, ["data", "classifier", "good.txt", "bad.txt", "prose", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["auc"] == 1.0
    about = json.loads(Path("prose", "classifier.json").read_text())
    assert about["trained_on"] == {"good": 300, "bad": 300}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: Path("prose", "classifier.json").unlink(), "classifier.json cannot be read: No such file"),
        (lambda: Path("prose", "classifier.json").write_text("{}"), "does not describe a classifier"),
        (lambda: Path("prose", "classifier.json").write_text('{"reads": 1}'), "does not describe a classifier"),
        (lambda: Path("prose", "classifier.safetensors").write_bytes(b"no tensors"), "is not a classifier"),
        (lambda: Path("prose", "classifier.json").write_text('{"reads": {"version": 0}}'), "train it again"),
    ],
)
def test_a_folder_without_a_classifier_is_refused_before_text_is_read(trained, change, says):
    change()
    clean = {"classifier": {"from": "prose"}}
    data = {"sources": [{"path": "none.txt"}], "clean": clean}
    Path("none.txt").write_text("a text")
    with pytest.raises(InputError, match=says):
        list(read_documents(DataConfig.model_validate(data), Ledger()))


def test_too_few_texts_are_refused():
    with pytest.raises(InputError, match=r"BAD: 3 different texts, \d of them to test on, are too few"):
        train_classifier(texts(CALM, 1), texts(LOUD, 2, 3), Path("prose"))
    assert not Path("prose").exists()
