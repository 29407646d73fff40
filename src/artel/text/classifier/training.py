"""Training of a quality classifier on two sets of texts: logistic regression (scikit-learn, the extra `classifier`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import save

from artel.errors import InputError, missing_extra
from artel.storage import check_new, new_folder
from artel.text.classifier.model import ABOUT, BUCKET_BITS, WEIGHTS, Classifier, features, reads_texts_by

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
