"""A quality classifier of texts: trained on good and bad texts, applied to each document.

A linear model over hashed features, as in fastText (Joulin et al. 2017): each word, and each pair of neighbouring
words, falls into one of 2^20 buckets. `artel data classifier` trains it by logistic regression (scikit-learn, the extra
`classifier`). Applying it needs only numpy.

    FOLDER/classifier.safetensors   weights float32 (buckets,), bias float32 (1,)
    FOLDER/classifier.json          how features are made, the training texts, metrics on held-out texts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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
from artel.storage import check_new, new_folder, user_path
from artel.text.dedup.shingles import SHINGLE_VERSION, Shingler

WEIGHTS, ABOUT = "classifier.safetensors", "classifier.json"
BUCKET_BITS = 20
VERSION = 1
"""Of the features below: a classifier of another version reads texts in another way."""
_KEY = "data.clean.classifier.from"
_SHINGLER = Shingler(1)
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd: of a pair's first and second word


@dataclass(frozen=True, slots=True)
class Features:
    """The buckets that texts have, one after another, and their values."""

    buckets: NDArray[np.int64]
    """(features,): of each text sorted, each once."""
    values: NDArray[np.float32]
    """(features,): 1 + ln of how often a text has the bucket; those of a text have length 1 together."""
    texts: NDArray[np.int64]
    """(features,): the number of the text."""


def features(texts: Sequence[str]) -> Features:
    """The buckets of the words and of the pairs of neighbouring words of each text. A call is best given many."""
    words = _SHINGLER.hashes(texts)
    counts = np.fromiter(map(len, words), np.int64, len(words))
    hashes = np.concatenate([*words, np.empty(0, np.uint64)])
    owners = np.repeat(np.arange(len(words)), counts)
    neighbours = owners[:-1] == owners[1:]
    pairs = (hashes[:-1] * _FIRST + hashes[1:] * _SECOND)[neighbours]
    every = np.concatenate([hashes, pairs]) >> np.uint64(64 - BUCKET_BITS)
    numbers = np.concatenate([owners, owners[:-1][neighbours]])
    keys, occurrences = np.unique((numbers << BUCKET_BITS) | every.astype(np.int64), return_counts=True)
    owners = keys >> BUCKET_BITS
    values = 1 + np.log(occurrences)
    lengths = np.sqrt(np.bincount(owners, values * values, len(words)))
    return Features(keys & ((1 << BUCKET_BITS) - 1), (values / lengths[owners]).astype(np.float32), owners)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Weights of a trained classifier."""

    weights: NDArray[np.float32]
    bias: float

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """(texts,): the probability, from 0 to 1, that each is a good one."""
        found = features(texts)
        logits = np.bincount(found.texts, self.weights[found.buckets] * found.values, len(texts)) + self.bias
        return 1 / (1 + np.exp(-logits))


def are_good(texts: Sequence[str], rule: ClassifierConfig) -> NDArray[np.bool_]:
    """(texts,): whether each passes a run's classifier. Raises InputError."""
    return _read(rule.from_).scores(texts) >= rule.minimum


def check_classifier(rule: ClassifierConfig) -> None:
    """Raise InputError for a folder that holds no classifier, or one that reads texts in another way."""
    _read(rule.from_)


def classifier_digest(rule: ClassifierConfig) -> str:
    """A digest of a classifier's weights and its way to read texts: a part of the store's key. Raises InputError."""
    return xxhash.xxh3_128_hexdigest(_bytes(rule.from_, WEIGHTS) + json.dumps(_about(rule.from_)["reads"]).encode())


def reads_texts_by() -> dict[str, int]:
    """What must be the same where a classifier is trained and where it is applied."""
    return {"version": VERSION, "bucket_bits": BUCKET_BITS, "shingles": SHINGLE_VERSION}


def _read(folder: str) -> Classifier:
    """The classifier in a folder: read again where its file has changed. Raises InputError."""
    file = user_path(folder, _KEY).absolute() / WEIGHTS
    return _load(folder, str(file), file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=4)
def _load(folder: str, file: str, changed: int) -> Classifier:
    about = _about(folder)
    if about["reads"] != reads_texts_by():
        what = f"{folder} was trained by another version of artel, which read texts in another way"
        raise InputError.at(_KEY, what, "train it again: artel data classifier")
    try:
        tensors = load(_bytes(folder, WEIGHTS))
        if tensors["weights"].shape != (1 << BUCKET_BITS,):
            raise KeyError(f"weights of shape {tensors['weights'].shape}")
        return Classifier(tensors["weights"], float(tensors["bias"][0]))
    except (SafetensorError, KeyError, IndexError) as error:
        raise InputError.at(_KEY, f"{folder}/{WEIGHTS} is no classifier: {error}", _fix()) from None


def _about(folder: str) -> dict[str, Any]:
    try:
        about = json.loads(_bytes(folder, ABOUT))
        if not isinstance(about["reads"], dict):
            raise TypeError("reads")
        return about
    except (ValueError, KeyError, TypeError):
        raise InputError.at(_KEY, f"{folder}/{ABOUT} is not that of a classifier", _fix()) from None


def _bytes(folder: str, name: str) -> bytes:
    try:
        return (user_path(folder, _KEY) / name).read_bytes()
    except OSError as error:
        raise InputError.at(_KEY, f"{Path(folder) / name} cannot be read: {error.strerror}", _fix()) from None


def _fix() -> str:
    return "train one: artel data classifier good.txt bad.txt FOLDER"


_HELD_OUT = 10  # one text in so many is held out
_FEWEST = 20
"""Texts of each set: with fewer there is nothing to learn, and none to test on."""
_THRESHOLDS = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a threshold keeps of the texts that were held out."""

    minimum: float
    good: float
    """Share of the good texts."""
    bad: float
    """Share of the bad ones."""


@dataclass(frozen=True, slots=True)
class TrainedClassifier:
    folder: str
    good: int
    bad: int
    """Texts of each set, the held-out ones among them."""
    accuracy: float
    """On held-out texts, at 0.5, both sets counting alike."""
    auc: float
    """Probability that a held-out good text has a higher score than a bad one."""
    kept: list[Kept]


def train_classifier(
    good: Iterable[str], bad: Iterable[str], folder: Path, tell: Callable[[str], None]
) -> TrainedClassifier:
    """Train a classifier on two sets of texts, and write it into a new folder.

    One text in ten, chosen by its hash, is held out to test on. Raises InputError for too few texts, where scikit-learn
    is missing, and for a folder that is there.
    """
    check_new(folder)
    if find_spec("sklearn") is None:
        raise missing_extra("scikit-learn", "classifier", "artel data classifier")
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    texts: list[str] = []
    labels: list[bool] = []
    for is_good, given in ((True, good), (False, bad)):
        own = list(dict.fromkeys(given))
        held_out = sum(map(_is_held_out, own))
        if len(own) < _FEWEST or not 0 < held_out < len(own):
            what = f"{len(own):,} different texts, {held_out} of them to test on, are too few"
            raise InputError.at("GOOD" if is_good else "BAD", what, f"give {_FEWEST} or more, better thousands")
        tell(f"{len(own):,} {'good' if is_good else 'bad'} texts")
        texts += own
        labels += [is_good] * len(own)
    found = features(texts)
    matrix = csr_matrix((found.values, (found.texts, found.buckets)), shape=(len(texts), 1 << BUCKET_BITS))
    is_good_text, test = np.array(labels), np.array(list(map(_is_held_out, texts)))
    model = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000)
    model.fit(matrix[~test], is_good_text[~test])
    classifier = Classifier(model.coef_[0].astype(np.float32), float(model.intercept_[0]))
    scores = model.predict_proba(matrix[test])[:, 1]
    of_good, of_bad = scores[is_good_text[test]], scores[~is_good_text[test]]
    trained = TrainedClassifier(
        str(folder),
        int(is_good_text.sum()),
        int((~is_good_text).sum()),
        float(balanced_accuracy_score(is_good_text[test], scores >= 0.5)),
        float(roc_auc_score(is_good_text[test], scores)),
        [Kept(least, float((of_good >= least).mean()), float((of_bad >= least).mean())) for least in _THRESHOLDS],
    )
    _write(classifier, trained, folder)
    return trained


def _is_held_out(text: str) -> bool:
    return xxhash.xxh3_64_intdigest(text.encode()) % _HELD_OUT == 0


def _write(classifier: Classifier, trained: TrainedClassifier, folder: Path) -> None:
    about = {"reads": reads_texts_by(), "trained_on": {"good": trained.good, "bad": trained.bad}}
    figures = {"accuracy": trained.accuracy, "auc": trained.auc, "kept": [asdict(kept) for kept in trained.kept]}
    tensors = {"weights": classifier.weights, "bias": np.array([classifier.bias], np.float32)}
    with new_folder(folder) as partial:
        (partial / WEIGHTS).write_bytes(save(tensors))
        (partial / ABOUT).write_text(json.dumps({**about, "held_out": figures}, indent=2) + "\n", encoding="utf-8")
