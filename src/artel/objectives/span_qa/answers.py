"""Turns the scores of windows into an answer per document, metrics, and official prediction files."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from artel.text import AnswerClass

CLASSES: tuple[str, ...] = get_args(AnswerClass)
# Columns of the outputs of SpanQA.evaluate_batch; probabilities of the classes follow.
_FIRST, _LAST, _SCORE, _NULL, _CLASSES = range(5)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's answer to a question, and the gold answers."""

    reference: dict[str, Any]
    """id, question, context, answers (character spans), class, candidates."""
    start: int
    end: int
    """End of the best span in characters of the context, exclusive."""
    score: float
    """Start + end - null score in the best window."""
    answer_class: str
    """The likeliest class in the best window; without a class head `short` or `unknown`."""
    classes: np.ndarray
    """Probability of each class, float64 (5,)."""

    @property
    def text(self) -> str:
        """The answer; empty if there is none."""
        return "" if self.answer_class == "unknown" else self.reference["context"][self.start : self.end]

    @property
    def gold(self) -> list[str]:
        """The gold answers; one empty text if there is none."""
        return [self.reference["context"][start:end] for start, end in self.reference["answers"]] or [""]


def predict(
    outputs: np.ndarray,
    owners: np.ndarray,
    references: Iterable[dict[str, Any]],
    offsets: Callable[[int], np.ndarray],
    *,
    classes: bool,
    no_answer: bool,
) -> list[Prediction]:
    """Return the best span of each document over all its windows, by start + end - null score.

    `outputs` (windows, columns): from SpanQA.evaluate_batch. `owners` (windows,): indices into `references`.
    `offsets(window)`: characters of its tokens in the document, start << 32 | end. A document is unknown if the class
    head says so; without a class head if the score is not above zero and `no_answer` allows it.
    """
    margins = outputs[:, _SCORE] - outputs[:, _NULL]
    best: dict[int, int] = {}
    for window, owner in enumerate(owners.tolist()):
        if owner not in best or margins[window] > margins[best[owner]]:
            best[owner] = window
    predictions = []
    for owner, reference in enumerate(references):
        if owner not in best:
            continue
        window = best[owner]
        margin, probabilities = float(margins[window]), outputs[window, _CLASSES:]
        if classes:
            answer_class = CLASSES[int(probabilities.argmax())]
        else:
            answer_class = "unknown" if no_answer and margin <= 0 else "short"
        tokens = offsets(window)
        first, last = int(outputs[window, _FIRST]), int(outputs[window, _LAST])
        start, end = int(tokens[first] >> np.uint64(32)), int(tokens[last] & np.uint64(0xFFFFFFFF))
        context = reference["context"]
        start, end = strip_span(context, start, include_combining_marks(context, end))
        predictions.append(Prediction(reference, start, end, margin, answer_class, probabilities))
    return predictions


def include_combining_marks(text: str, end: int) -> int:
    """Return `end` moved past combining marks, which some tokenizers leave out."""
    while end < len(text) and unicodedata.category(text[end])[0] == "M":
        end += 1
    return end


def strip_span(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span without white space at its ends."""
    span_text = text[start:end]
    return start + len(span_text) - len(span_text.lstrip()), end - len(span_text) + len(span_text.rstrip())


def answer_metrics(predictions: list[Prediction], *, classes: bool) -> dict[str, float]:
    """Return metrics over documents, 0 to 1 (the official scripts print them times 100).

    exact_match and f1 as SQuAD defines them (Rajpurkar et al. 2016; 2018 for unanswerable questions): the best over all
    gold answers, after `normalize_answer`. With a class head, yes, no and unknown are judged by class only, and short
    and long answers also need the correct class. start_accuracy and end_accuracy: fraction of answered documents with
    the first (last) character of a gold answer.
    """
    if not predictions:
        return {}
    exact, f1 = np.array([_score_answer(prediction, classes) for prediction in predictions]).mean(axis=0)
    answered = [prediction for prediction in predictions if prediction.reference["answers"]]
    scores = {"exact_match": float(exact), "f1": float(f1)}
    if answered:
        for name, index in (("start", 0), ("end", 1)):
            hits = [
                getattr(prediction, name) in {span[index] for span in prediction.reference["answers"]}
                for prediction in answered
            ]
            scores[f"{name}_accuracy"] = float(np.mean(hits))
    if classes:
        gold = np.array([CLASSES.index(prediction.reference["class"]) for prediction in predictions])
        probabilities = np.stack([prediction.classes for prediction in predictions])
        scores["class_accuracy"] = float((probabilities.argmax(axis=1) == gold).mean())
        present = [index for index in range(len(CLASSES)) if (gold == index).any()]
        precisions = [average_precision(probabilities[:, index], gold == index) for index in present]
        scores["mean_average_precision"] = float(np.mean(precisions))
    return scores


def _score_answer(prediction: Prediction, classes: bool) -> tuple[float, float]:
    gold_class, predicted = prediction.reference["class"], prediction.answer_class
    if classes and (predicted != gold_class or gold_class in ("yes", "no", "unknown")):
        return float(predicted == gold_class), float(predicted == gold_class)
    return (
        max(exact_match(prediction.text, gold) for gold in prediction.gold),
        max(word_f1(prediction.text, gold) for gold in prediction.gold),
    )


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(answer: str) -> str:
    """Normalize an answer as SQuAD does: lower case, no ASCII punctuation or English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    return float(normalize_answer(answer) == normalize_answer(gold))


def word_f1(answer: str, gold: str) -> float:
    """Return the F1 of shared words; if either text has none, 1 if both have none."""
    predicted, gold_words = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not predicted or not gold_words:
        return float(predicted == gold_words)
    shared = (Counter(predicted) & Counter(gold_words)).total()
    return 2 * shared / (len(predicted) + len(gold_words))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the sum over thresholds of (increase in recall) x precision, like scikit-learn. Ties share a threshold."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    last_of_equal = np.append(np.diff(scores[order]) != 0, True)
    hits, num_predicted = hits[last_of_equal], np.flatnonzero(last_of_equal) + 1
    recall_increases = np.diff(hits, prepend=0) / positive.sum()
    return float((recall_increases * hits / num_predicted).sum())


def squad_predictions(predictions: list[Prediction]) -> dict[str, str]:
    """Return SQuAD's official file: question id -> answer, empty if there is none."""
    return {prediction.reference["id"]: prediction.text for prediction in predictions}


def nq_predictions(predictions: list[Prediction]) -> dict[str, list[dict[str, Any]]]:
    """Return the official file of Natural Questions. Spans count space-separated words, end exclusive."""
    return {"predictions": [_nq_prediction(prediction) for prediction in predictions]}


def _nq_prediction(prediction: Prediction) -> dict[str, Any]:
    context, reference = prediction.reference["context"], prediction.reference
    words = (context.count(" ", 0, prediction.start), context.count(" ", 0, prediction.end) + 1)
    is_answered = prediction.answer_class != "unknown"
    long_answer = _long_answer(words, reference["candidates"]) if is_answered else None
    example_id: Any = int(reference["id"]) if reference["id"].lstrip("-").isdigit() else reference["id"]
    return {
        "example_id": example_id,
        "long_answer": _format_span(long_answer),
        "long_answer_score": prediction.score,
        "short_answers": [_format_span(words)] if prediction.answer_class == "short" else [],
        "short_answers_score": prediction.score,
        "yes_no_answer": prediction.answer_class.upper() if prediction.answer_class in ("yes", "no") else "NONE",
    }


def _long_answer(words: tuple[int, int], candidates: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the smallest candidate that contains the answer, or the answer if there are no candidates."""
    containing = ((start, end) for start, end in candidates if start <= words[0] and words[1] <= end)
    smallest = min(containing, key=lambda span: span[1] - span[0], default=None)
    return smallest if candidates else words


def _format_span(words: tuple[int, int] | None) -> dict[str, int]:
    start, end = words or (-1, -1)
    return {"start_token": start, "end_token": end, "start_byte": -1, "end_byte": -1}
