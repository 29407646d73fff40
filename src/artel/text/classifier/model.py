"""How likely a text is one of the good ones, by its words and pairs of words.

A linear model over hashed features, as fastText's is (Joulin et al. 2017): each word, and each pair of neighbouring
words, falls into one of 2^20 buckets. It is trained by `artel data classifier` (`training.py`); here it is read and
applied, which needs numpy alone.

    FOLDER/classifier.safetensors   weights float32 (buckets,), bias float32 (1,)
    FOLDER/classifier.json          how features are made, what it was trained on, figures on held-out texts
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from artel.config import ClassifierConfig
from artel.errors import InputError
from artel.storage import user_path
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
