"""From scores of windows to an answer for each document, its figures, and the official files of predictions."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from artel.text import AnswerClass

CLASSES: tuple[str, ...] = get_args(AnswerClass)
# Columns of what SpanQA.evaluate_batch finds for each window; the classes' probabilities follow.
_FIRST, _LAST, _SCORE, _NULL, _CLASSES = range(5)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model answers to one question, and what would have been right."""

    source: dict[str, Any]
    """id, question, context, answers (character spans), class, candidates."""
    start: int
    end: int
    """The best span, characters of the context."""
    score: float
    """Start + end - null score of the best window."""
    answer_class: str
    """With the class head its likeliest class in the best window; without it `short` or `unknown`."""
    classes: np.ndarray
    """Probability of each class, float64 (5,)."""

    @property
    def text(self) -> str:
        """The answer; empty when there is none."""
        return "" if self.answer_class == "unknown" else self.source["context"][self.start : self.end]

    @property
    def gold(self) -> list[str]:
        """The texts of the right answers; one empty text when there is none."""
        return [self.source["context"][start:end] for start, end in self.source["answers"]] or [""]


def predict(
    outputs: np.ndarray,
    owners: np.ndarray,
    sources: Iterable[dict[str, Any]],
    places: Callable[[int], np.ndarray],
    *,
    classes: bool,
    no_answer: bool,
) -> list[Prediction]:
    """For each document the best span over all its windows, by start + end - null score.

    `outputs` (windows, columns) are those of SpanQA.evaluate_batch; `owners` (windows,) are indices into `sources`;
    `places(window)` are the characters of its tokens in the document, start << 32 | end. A document is
    unknown when the class head says so, or, without it, when the score is not above zero and `no_answer` allows it.
    """
    margins = outputs[:, _SCORE] - outputs[:, _NULL]
    best: dict[int, int] = {}
    for window, owner in enumerate(owners.tolist()):
        if owner not in best or margins[window] > margins[best[owner]]:
            best[owner] = window
    predictions = []
    for owner, source in enumerate(sources):
        if owner not in best:
            continue
        window = best[owner]
        margin, probabilities = float(margins[window]), outputs[window, _CLASSES:]
        if classes:
            answer_class = CLASSES[int(probabilities.argmax())]
        else:
            answer_class = "unknown" if no_answer and margin <= 0 else "short"
        tokens = places(window)
        first, last = int(outputs[window, _FIRST]), int(outputs[window, _LAST])
        start, end = int(tokens[first] >> np.uint64(32)), int(tokens[last] & np.uint64(0xFFFFFFFF))
        start, end = trimmed(source["context"], start, with_marks(source["context"], end))
        predictions.append(Prediction(source, start, end, margin, answer_class, probabilities))
    return predictions


def with_marks(text: str, end: int) -> int:
    """The end of a piece of text with the combining marks behind it, which some tokenizers leave out."""
    while end < len(text) and unicodedata.category(text[end])[0] == "M":
        end += 1
    return end


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """A span without the white space at its ends."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def score(predictions: list[Prediction], *, classes: bool) -> dict[str, float]:
    """Figures over documents, each from 0 to 1 (the official scripts print them times 100).

    exact_match and f1 as SQuAD defines them (Rajpurkar et al. 2016; 2018 for unanswerable questions): the best over
    the gold answers of equal texts, and of the F1 of their words, after `normalised`. With the class head a yes, no or
    unknown is right by its class alone, and a short or long answer needs both class and text. start_accuracy and
    end_accuracy: of documents with an answer, the share whose first (last) character is that of a gold answer.
    """
    if not predictions:
        return {}
    exact, f1 = np.array([_one(prediction, classes) for prediction in predictions]).mean(axis=0)
    answered = [prediction for prediction in predictions if prediction.source["answers"]]
    scores = {"exact_match": float(exact), "f1": float(f1)}
    if answered:
        for name, side in (("start", 0), ("end", 1)):
            scores[f"{name}_accuracy"] = float(
                np.mean(
                    [
                        getattr(prediction, name) in {span[side] for span in prediction.source["answers"]}
                        for prediction in answered
                    ]
                )
            )
    if classes:
        gold = np.array([CLASSES.index(prediction.source["class"]) for prediction in predictions])
        probabilities = np.stack([prediction.classes for prediction in predictions])
        scores["class_accuracy"] = float((probabilities.argmax(axis=1) == gold).mean())
        present = [number for number in range(len(CLASSES)) if (gold == number).any()]
        scores["mean_average_precision"] = float(
            np.mean([average_precision(probabilities[:, number], gold == number) for number in present])
        )
    return scores


def _one(prediction: Prediction, classes: bool) -> tuple[float, float]:
    gold_class, predicted = prediction.source["class"], prediction.answer_class
    if classes and (predicted != gold_class or gold_class in ("yes", "no", "unknown")):
        return float(predicted == gold_class), float(predicted == gold_class)
    return (
        max(exact_match(prediction.text, gold) for gold in prediction.gold),
        max(word_f1(prediction.text, gold) for gold in prediction.gold),
    )


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """In small letters, without ASCII punctuation and English articles, single spaces: as SQuAD compares answers."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    return float(normalised(answer) == normalised(gold))


def word_f1(answer: str, gold: str) -> float:
    """F1 of the words that answer and gold share; when either has none, whether both have none."""
    predicted, gold_words = normalised(answer).split(), normalised(gold).split()
    if not predicted or not gold_words:
        return float(predicted == gold_words)
    shared = (Counter(predicted) & Counter(gold_words)).total()
    return 2 * shared / (len(predicted) + len(gold_words))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Sum over thresholds of (recall gained) x precision; equal scores are one threshold, as scikit-learn has it."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    last_of_equal = np.append(np.diff(scores[order]) != 0, True)
    hits, seen = hits[last_of_equal], np.flatnonzero(last_of_equal) + 1
    gained = np.diff(hits, prepend=0) / positive.sum()
    return float((gained * hits / seen).sum())


def squad_predictions(predictions: list[Prediction]) -> dict[str, str]:
    """SQuAD's official file: question id -> answer, empty when there is none."""
    return {prediction.source["id"]: prediction.text for prediction in predictions}


def nq_predictions(predictions: list[Prediction]) -> dict[str, list[dict[str, Any]]]:
    """The official file of Natural Questions; spans are counted in space-separated words, end exclusive."""
    return {"predictions": [_nq(prediction) for prediction in predictions]}


def _nq(prediction: Prediction) -> dict[str, Any]:
    context, source = prediction.source["context"], prediction.source
    words = (context.count(" ", 0, prediction.start), context.count(" ", 0, prediction.end) + 1)
    answered = prediction.answer_class != "unknown"
    short = prediction.answer_class == "short"
    long = _long_answer(words, source["candidates"]) if answered else None
    name: Any = int(source["id"]) if source["id"].lstrip("-").isdigit() else source["id"]
    return {
        "example_id": name,
        "long_answer": _span(long),
        "long_answer_score": prediction.score,
        "short_answers": [_span(words)] if short else [],
        "short_answers_score": prediction.score,
        "yes_no_answer": prediction.answer_class.upper() if prediction.answer_class in ("yes", "no") else "NONE",
    }


def _long_answer(words: tuple[int, int], candidates: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The smallest candidate that holds the answer; the answer itself where there are no candidates."""
    holding: Iterator[tuple[int, int]] = (
        (start, end) for start, end in candidates if start <= words[0] and words[1] <= end
    )
    smallest = min(holding, key=lambda span: span[1] - span[0], default=None)
    return smallest if candidates else words


def _span(words: tuple[int, int] | None) -> dict[str, int]:
    start, end = words or (-1, -1)
    return {"start_token": start, "end_token": end, "start_byte": -1, "end_byte": -1}
