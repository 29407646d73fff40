"""Statistics that several objectives share: probabilities, ranks, correlations, calibration."""

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


_BINS = 10


def calibration_bins(logits: np.ndarray, truth: np.ndarray) -> list[dict[str, float]]:
    """Answers by their confidence, in ten bins of equal width from 0.5 to 1; bins without answers are left out.

    Args:
        logits: float (count,): above 0 the answer is yes, with the probability sigmoid(logit).
        truth: bool (count,).

    Returns: for each bin the mean `confidence` of its answers, the share that is right (`accuracy`), their `count`.
    """
    confidence = sigmoid(np.abs(logits))
    right = (logits > 0) == truth
    numbers = np.minimum(((confidence - 0.5) * 2 * _BINS).astype(np.int64), _BINS - 1)
    chosen = (numbers == number for number in range(_BINS))
    return [
        {
            "confidence": float(confidence[members].mean()),
            "accuracy": float(right[members].mean()),
            "count": int(members.sum()),
        }
        for members in chosen
        if members.any()
    ]


def calibration_error(logits: np.ndarray, truth: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017, "On Calibration of Modern Neural Networks"), from 0 to 1.

    The difference of confidence and accuracy, averaged over the bins of `calibration_bins` by their counts.
    """
    bins = calibration_bins(logits, truth)
    return sum(abs(one["confidence"] - one["accuracy"]) * one["count"] for one in bins) / len(logits)
