"""A quality classifier of texts: trained on good and bad texts, applied to each document.

A linear model over hashed features, as in fastText (Joulin et al. 2017): each word, and each pair of neighbouring
words, is hashed into 2^20 buckets. `artel data classifier` trains it by logistic regression (scikit-learn, the extra
`classifier`). Applying it needs only numpy.

    FOLDER/classifier.safetensors   weights float32 (buckets,), bias float32 (1,)
    FOLDER/classifier.json          how features are made, the training texts, metrics on held-out texts
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from artel.config import ClassifierConfig
from artel.errors import InputError, missing_extra
from artel.messages import logger
from artel.storage import check_new, new_folder, user_path
from artel.text.dedup.shingles import SHINGLE_VERSION, Shingler

WEIGHTS, DESCRIPTION = "classifier.safetensors", "classifier.json"
BUCKET_BITS = 20
VERSION = 1
"""Version of the features below. Classifiers of other versions cannot be applied."""
_KEY = "data.clean.classifier.from"
_FIX = "train one: artel data classifier good.txt bad.txt FOLDER"
_SHINGLER = Shingler(1)
# Odd factors for the first and the second word of a pair.
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_TEST_EVERY = 10
_MIN_TEXTS = 20
"""Minimum texts of each set, enough to train and to test on."""
_REPORTED_THRESHOLDS = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class Features:
    """Buckets and values of texts, one text after another (COO format)."""

    buckets: NDArray[np.int64]
    """(features,): sorted and distinct within a text."""
    values: NDArray[np.float32]
    """(features,): 1 + ln(count of the bucket in the text), scaled to L2 norm 1 per text."""
    texts: NDArray[np.int64]
    """(features,): index of the text."""


def features(texts: Sequence[str]) -> Features:
    """Return the features of texts: their words, and their pairs of neighbouring words. Pass many texts at a time."""
    words = _SHINGLER.hashes(texts)
    word_counts = np.fromiter(map(len, words), np.int64, len(words))
    hashes = np.concatenate([*words, np.empty(0, np.uint64)])
    text_indices = np.repeat(np.arange(len(words)), word_counts)
    neighbours = text_indices[:-1] == text_indices[1:]
    pairs = (hashes[:-1] * _FIRST_FACTOR + hashes[1:] * _SECOND_FACTOR)[neighbours]
    buckets = np.concatenate([hashes, pairs]) >> np.uint64(64 - BUCKET_BITS)
    feature_texts = np.concatenate([text_indices, text_indices[:-1][neighbours]])
    keys, occurrences = np.unique((feature_texts << BUCKET_BITS) | buckets.astype(np.int64), return_counts=True)
    text_indices = keys >> BUCKET_BITS
    values = 1 + np.log(occurrences)
    norms = np.sqrt(np.bincount(text_indices, values * values, len(words)))
    buckets = keys & ((1 << BUCKET_BITS) - 1)
    return Features(buckets, (values / norms[text_indices]).astype(np.float32), text_indices)


@dataclass(frozen=True, slots=True)
class Classifier:
    """A trained classifier."""

    weights: NDArray[np.float32]
    bias: float

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return (texts,): the probability, from 0 to 1, that each text is good."""
        encoded = features(texts)
        logits = np.bincount(encoded.texts, self.weights[encoded.buckets] * encoded.values, len(texts)) + self.bias
        return 1 / (1 + np.exp(-logits))


def apply_classifier(texts: Sequence[str], rule: ClassifierConfig) -> NDArray[np.bool_]:
    """Return (texts,): True for texts that pass the classifier of a run."""
    return _read_classifier(rule.from_).scores(texts) >= rule.minimum


def check_classifier(rule: ClassifierConfig) -> None:
    """Raise InputError if the folder has no classifier, or one of another version."""
    _read_classifier(rule.from_)


def classifier_digest(rule: ClassifierConfig) -> str:
    """Return a digest of the weights and the features, for the store key."""
    return xxhash.xxh3_128_hexdigest(
        _read_bytes(rule.from_, WEIGHTS) + json.dumps(_read_description(rule.from_)["reads"]).encode()
    )


def feature_versions() -> dict[str, int]:
    """Return the versions that must be equal in training and application."""
    return {"version": VERSION, "bucket_bits": BUCKET_BITS, "shingles": SHINGLE_VERSION}


def _read_classifier(folder: str) -> Classifier:
    """Return the classifier in a folder, reading it again if its file has changed.

    Raise InputError if the folder has no classifier, or one of another version.
    """
    file = user_path(folder, _KEY).absolute() / WEIGHTS
    return _load(folder, str(file), file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=4)
def _load(folder: str, file: str, mtime: int) -> Classifier:
    description = _read_description(folder)
    if description["reads"] != feature_versions():
        what = f"{folder} was trained by a version of artel with other features"
        raise InputError.at(_KEY, what, "train it again: artel data classifier")
    try:
        tensors = load(_read_bytes(folder, WEIGHTS))
        if tensors["weights"].shape != (1 << BUCKET_BITS,):
            raise KeyError(f"weights of shape {tensors['weights'].shape}")
        return Classifier(tensors["weights"], float(tensors["bias"][0]))
    except (SafetensorError, KeyError, IndexError) as error:
        raise InputError.at(_KEY, f"{folder}/{WEIGHTS} is not a classifier: {error}", _FIX) from None


def _read_description(folder: str) -> dict[str, Any]:
    try:
        description = json.loads(_read_bytes(folder, DESCRIPTION))
        if not isinstance(description["reads"], dict):
            raise TypeError("reads")
        return description
    except (ValueError, KeyError, TypeError):
        raise InputError.at(_KEY, f"{folder}/{DESCRIPTION} does not describe a classifier", _FIX) from None


def _read_bytes(folder: str, name: str) -> bytes:
    try:
        return (user_path(folder, _KEY) / name).read_bytes()
    except OSError as error:
        raise InputError.at(_KEY, f"{Path(folder) / name} cannot be read: {error.strerror}", _FIX) from None


@dataclass(frozen=True, slots=True)
class ThresholdResult:
    """The fraction of held-out texts that pass a threshold."""

    minimum: float
    good: float
    """Fraction of the good texts."""
    bad: float
    """Fraction of the bad texts."""


@dataclass(frozen=True, slots=True)
class TrainedClassifier:
    """The result of training, with metrics on held-out texts."""

    folder: str
    num_good: int
    num_bad: int
    """Texts of each set, including held-out ones."""
    accuracy: float
    """Balanced accuracy at a threshold of 0.5."""
    auc: float
    """Probability that a good text scores higher than a bad one."""
    thresholds: list[ThresholdResult]

    def to_json(self) -> dict[str, Any]:
        """Return the output of --json."""
        values = asdict(self)
        names = {"num_good": "good", "num_bad": "bad", "thresholds": "kept"}
        return {names.get(name, name): value for name, value in values.items()}


def train_classifier(good: Iterable[str], bad: Iterable[str], folder: Path) -> TrainedClassifier:
    """Train a classifier on two sets of texts and write it into a new folder.

    One text in ten, chosen by its hash, is held out for testing. Raise InputError for too few texts, if scikit-learn
    is missing, and if the folder exists.
    """
    check_new(folder)
    if find_spec("sklearn") is None:
        raise missing_extra("scikit-learn", "classifier", "artel data classifier")
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    texts: list[str] = []
    labels: list[bool] = []
    for is_good, group in ((True, good), (False, bad)):
        distinct = list(dict.fromkeys(group))
        num_test = sum(map(_is_test_text, distinct))
        if len(distinct) < _MIN_TEXTS or not 0 < num_test < len(distinct):
            what = f"{len(distinct):,} different texts, {num_test} of them to test on, are too few"
            raise InputError.at("GOOD" if is_good else "BAD", what, f"use {_MIN_TEXTS} or more, better thousands")
        logger.info("%s %s texts", f"{len(distinct):,}", "good" if is_good else "bad")
        texts += distinct
        labels += [is_good] * len(distinct)
    encoded = features(texts)
    matrix = csr_matrix((encoded.values, (encoded.texts, encoded.buckets)), shape=(len(texts), 1 << BUCKET_BITS))
    is_good_text = np.array(labels)
    is_test = np.array(list(map(_is_test_text, texts)))
    model = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000)
    model.fit(matrix[~is_test], is_good_text[~is_test])
    classifier = Classifier(model.coef_[0].astype(np.float32), float(model.intercept_[0]))
    scores = model.predict_proba(matrix[is_test])[:, 1]
    good_scores, bad_scores = scores[is_good_text[is_test]], scores[~is_good_text[is_test]]
    summary = TrainedClassifier(
        str(folder),
        int(is_good_text.sum()),
        int((~is_good_text).sum()),
        float(balanced_accuracy_score(is_good_text[is_test], scores >= 0.5)),
        float(roc_auc_score(is_good_text[is_test], scores)),
        [
            ThresholdResult(minimum, float((good_scores >= minimum).mean()), float((bad_scores >= minimum).mean()))
            for minimum in _REPORTED_THRESHOLDS
        ],
    )
    _write_classifier(classifier, summary, folder)
    return summary


def _is_test_text(text: str) -> bool:
    return xxhash.xxh3_64_intdigest(text.encode()) % _TEST_EVERY == 0


def _write_classifier(classifier: Classifier, summary: TrainedClassifier, folder: Path) -> None:
    description = {"reads": feature_versions(), "trained_on": {"good": summary.num_good, "bad": summary.num_bad}}
    thresholds = [asdict(result) for result in summary.thresholds]
    metrics = {"accuracy": summary.accuracy, "auc": summary.auc, "kept": thresholds}
    tensors = {"weights": classifier.weights, "bias": np.array([classifier.bias], np.float32)}
    with new_folder(folder) as partial:
        (partial / WEIGHTS).write_bytes(save(tensors))
        (partial / DESCRIPTION).write_text(
            json.dumps({**description, "held_out": metrics}, indent=2) + "\n", encoding="utf-8"
        )
