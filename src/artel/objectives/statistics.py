"""Numbers that figures of several objectives are made of: probabilities of logits, ranks, correlations."""

from __future__ import annotations

import numpy as np


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-logits)) in the shape of `logits`, without overflow."""
    probabilities: np.ndarray = np.exp(-np.logaddexp(0.0, -logits))
    return probabilities


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks (count,) from 1; equal values have the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray = (last - (counts - 1) / 2)[inverse]
    return ranks


def pearson(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of two lists of numbers, (count,) each; 0 where one of them is constant."""
    one, other = one - one.mean(), other - other.mean()
    spread = float(one @ one) * float(other @ other)
    return float(one @ other) / spread**0.5 if spread > 0 else 0.0


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of their ranks (Spearman 1904); 0 where one of them is constant."""
    return pearson(mean_ranks(one), mean_ranks(other))
