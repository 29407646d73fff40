"""Metrics of predicted labels and numbers, as scikit-learn defines them; each is tested against it.

Means over labels leave out labels for which the metric is undefined.
"""

from __future__ import annotations

import numpy as np

from artel.objectives.statistics import mean_ranks, pearson, spearman

DEFAULT_THRESHOLD = 0.5
"""The default threshold of a probability."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities (rows, labels)."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def confusion_counts(gold: np.ndarray, predicted: np.ndarray, labels: int) -> np.ndarray:
    """Return the confusion matrix, int64 (labels, labels): true labels down, predicted ones across."""
    return np.bincount(gold * labels + predicted, minlength=labels * labels).reshape(labels, labels)


def label_scores(correct: np.ndarray, gold: np.ndarray, predicted: np.ndarray) -> list[dict[str, float]]:
    """Return precision, recall and F1 of each label from counts (labels,) of correct, true and predicted rows."""
    return [
        {
            "precision": _ratio(hits, num_predicted),
            "recall": _ratio(hits, num_gold),
            "f1": _ratio(2 * hits, num_gold + num_predicted),
        }
        for hits, num_gold, num_predicted in zip(correct.tolist(), gold.tolist(), predicted.tolist(), strict=True)
    ]


def matthews(counts: np.ndarray) -> float:
    """Return Matthews' correlation of a confusion matrix with any number of labels (Gorodkin 2004); 0 if undefined."""
    total, correct = float(counts.sum()), float(np.trace(counts))
    gold, predicted = counts.sum(axis=1).astype(float), counts.sum(axis=0).astype(float)
    spread = (total**2 - float(predicted @ predicted)) * (total**2 - float(gold @ gold))
    return (correct * total - float(gold @ predicted)) / spread**0.5 if spread > 0 else 0.0


def roc_auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the fraction of (positive, negative) pairs in the correct order; ties count half. None without pairs."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return None
    above = float(mean_ranks(scores)[positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def single_label_metrics(logits: np.ndarray, gold: np.ndarray) -> dict[str, float]:
    """Return the metrics of one label per row. `logits`: (rows, labels). `gold`: label indices (rows,).

    macro_f1 is the mean over labels that occur in `gold` or in predictions. auc: for two labels, that of the second;
    for more, the mean of each label against all others.
    """
    labels = logits.shape[1]
    counts = confusion_counts(gold, logits.argmax(axis=1), labels)
    accuracy = _ratio(float(np.trace(counts)), float(counts.sum()))
    occurs = counts.sum(axis=0) + counts.sum(axis=1) > 0
    by_label = label_scores(np.diag(counts), counts.sum(axis=1), counts.sum(axis=0))
    f1 = [scores["f1"] for scores, is_present in zip(by_label, occurs, strict=True) if is_present]
    metrics = {"accuracy": accuracy, "macro_f1": float(np.mean(f1)), "micro_f1": accuracy, "matthews": matthews(counts)}
    probabilities = softmax(logits)
    scored_labels = [1] if labels == 2 else range(labels)
    return metrics | _mean_auc([roc_auc(probabilities[:, label], gold == label) for label in scored_labels])


def multi_label_metrics(probabilities: np.ndarray, gold: np.ndarray, thresholds: np.ndarray | None) -> dict[str, float]:
    """Return the metrics of several labels per row. `probabilities`: (rows, labels). `gold`: bool of that shape.

    accuracy is the fraction of rows with all labels correct. The threshold is 0.5; tuned_macro_f1 uses `thresholds`.
    """
    predicted = probabilities > DEFAULT_THRESHOLD
    correct = (predicted & gold).sum(axis=0)
    by_label = label_scores(correct, gold.sum(axis=0), predicted.sum(axis=0))
    metrics = {
        "accuracy": float((predicted == gold).all(axis=1).mean()),
        "macro_f1": float(np.mean([scores["f1"] for scores in by_label])),
        "micro_f1": _ratio(2 * float(correct.sum()), float(gold.sum() + predicted.sum())),
    }
    if thresholds is not None:
        tuned = probabilities > thresholds
        by_label = label_scores((tuned & gold).sum(axis=0), gold.sum(axis=0), tuned.sum(axis=0))
        metrics["tuned_macro_f1"] = float(np.mean([scores["f1"] for scores in by_label]))
    return metrics | _mean_auc([roc_auc(column, true) for column, true in zip(probabilities.T, gold.T, strict=True)])


def number_metrics(predicted: np.ndarray, gold: np.ndarray) -> dict[str, float]:
    """Return errors in the number's unit, the fraction of variance explained, and two correlations. Arrays: (rows,)."""
    errors = predicted - gold
    metrics = {"rmse": float(np.sqrt((errors**2).mean())), "mae": float(np.abs(errors).mean())}
    spread = float(((gold - gold.mean()) ** 2).sum())
    if spread > 0:
        metrics["r2"] = 1 - float((errors**2).sum()) / spread
        metrics["pearson"] = pearson(predicted, gold)
        metrics["spearman"] = spearman(predicted, gold)
    return metrics


def best_thresholds(probabilities: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Return the threshold with the highest F1 for each label; 0.5 for a label without rows."""
    return np.array(
        [_best_threshold(column, true) for column, true in zip(probabilities.T, gold.T, strict=True)], dtype=np.float64
    )


def _best_threshold(probabilities: np.ndarray, gold: np.ndarray) -> float:
    if not gold.any():
        return DEFAULT_THRESHOLD
    order = np.argsort(-probabilities, kind="stable")
    sorted_probabilities, hits = probabilities[order], np.cumsum(gold[order])
    num_predicted = np.arange(1, len(order) + 1)
    f1 = 2 * hits / (num_predicted + gold.sum())
    is_cut = np.append(np.diff(sorted_probabilities) != 0, True)  # equal probabilities stay on one side
    best = int(np.where(is_cut, f1, -1.0).argmax())
    below = float(sorted_probabilities[best + 1]) if best + 1 < len(order) else 0.0
    return (float(sorted_probabilities[best]) + below) / 2


def _mean_auc(areas: list[float | None]) -> dict[str, float]:
    known = [area for area in areas if area is not None]
    return {"auc": float(np.mean(known))} if known else {}


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else 0.0
