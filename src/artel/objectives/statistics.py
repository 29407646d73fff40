"""Statistics that several objectives share: probabilities, ranks, correlations, calibration."""

from __future__ import annotations

import numpy as np


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-logits)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


def float_to_bits(value: float) -> int:
    """Return the bits of a float64 as an int64, the type of numbers in a token store."""
    return int(np.float64(value).view(np.int64))


def bits_to_floats(bits: np.ndarray) -> np.ndarray:
    """Return the float64 numbers with these bits, int64 of the same shape."""
    return np.ascontiguousarray(bits, dtype=np.int64).view(np.float64)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks (count,) from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    return (last_ranks - (counts - 1) / 2)[inverse]


def pearson(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation of two arrays (count,); 0 if one of them is constant."""
    first, second = first - first.mean(), second - second.mean()
    spread = float(first @ first) * float(second @ second)
    return float(first @ second) / spread**0.5 if spread > 0 else 0.0


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of ranks (Spearman 1904); 0 if one of the arrays is constant."""
    return pearson(mean_ranks(first), mean_ranks(second))


def precision_recall_f1(correct: float, predicted: float, gold: float) -> dict[str, float]:
    """Return precision, recall and F1 from counts; 0 where a denominator is 0."""
    precision = correct / predicted if predicted else 0.0
    recall = correct / gold if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}


_BINS = 10


def calibration_bins(logits: np.ndarray, truth: np.ndarray) -> list[dict[str, float]]:
    """Group answers by confidence into ten bins of equal width from 0.5 to 1. Omit empty bins.

    Args:
        logits: float (count,): above 0 the answer is yes, with the probability sigmoid(logit).
        truth: bool (count,).

    Returns: per bin the mean `confidence` of its answers, the fraction of correct ones (`accuracy`) and the `count`.
    """
    confidence = sigmoid(np.abs(logits))
    correct = (logits > 0) == truth
    bin_indices = np.minimum(((confidence - 0.5) * 2 * _BINS).astype(np.int64), _BINS - 1)
    masks = (bin_indices == index for index in range(_BINS))
    return [
        {
            "confidence": float(confidence[mask].mean()),
            "accuracy": float(correct[mask].mean()),
            "count": int(mask.sum()),
        }
        for mask in masks
        if mask.any()
    ]


def calibration_error(logits: np.ndarray, truth: np.ndarray) -> float:
    """Return the expected calibration error, 0 to 1 (Guo et al. 2017, "On Calibration of Modern Neural Networks").

    The difference of confidence and accuracy, averaged over the bins of `calibration_bins` by count.
    """
    bins = calibration_bins(logits, truth)
    return sum(abs(row["confidence"] - row["accuracy"]) * row["count"] for row in bins) / len(logits)
