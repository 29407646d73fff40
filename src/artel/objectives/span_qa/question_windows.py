"""Questions and documents, cut with a stride into windows `[CLS] question [SEP] window [SEP]`.

Devlin et al. 2019 for SQuAD; Alberti et al. 2019, "A BERT Baseline for the Natural Questions". Answers are located by
the tokenizer's offsets. A window without the whole answer has the class `unknown`, and the first token as start and
end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from artel.config import SpanQAConfig
from artel.objectives.span_qa.answers import CLASSES, strip_span
from artel.objectives.types import DocumentSamples
from artel.text import Document, DroppedRecord, Question, Rejected
from artel.tokens import Encoding, Sample, Tokenizer

# Columns of a sample's numbers: index of the document in its split, first token of the window in the document, start of
# the window in the sample, start and end of the answer in the sample, class.
DOCUMENT, WINDOW, WINDOW_START, START, END, CLASS = range(6)
_CONTEXT_TOKENS = 60  # tokens of a window in the command that a finished run suggests
UNKNOWN = CLASSES.index("unknown")


class QuestionWindows:
    """Turns questions into windows."""

    def __init__(self, tokenizer: Tokenizer, span_qa: SpanQAConfig, block: int) -> None:
        self.frame = tokenizer.frame(pair=True)
        self._tokenizer = tokenizer
        self._span_qa = span_qa
        self._block = block

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        all_fields = [document.record.fields for document in documents]
        questions = self._tokenizer.encode([record.question for record in all_fields if isinstance(record, Question)])
        contexts = self._tokenizer.encode_with_offsets(
            [record.context for record in all_fields if isinstance(record, Question)]
        )
        for document, question, context in zip(documents, questions, contexts, strict=True):
            yield self._cut_windows(document, question, context)

    def _cut_windows(
        self, document: Document, question: np.ndarray, context: Encoding
    ) -> DocumentSamples | Rejected | DroppedRecord:
        record, fields = document.record, document.record.fields
        assert isinstance(fields, Question)
        if len(question) > self._span_qa.question:
            detail = (
                f"its question has {len(question)} tokens, more than span_qa.question ({self._span_qa.question}): "
                "raise it, or shorten the question"
            )
            return Rejected(record.origin, "question_too_long", detail, record.set_name)
        if len(context.ids) == 0:
            return Rejected(record.origin, "empty", "its document has no token", record.set_name)
        if fields.answer_class != "unknown" and not fields.answers:
            detail = f"it is answered by {fields.answer_class!r} but has no span in the document; add one, or remove it"
            return Rejected(record.origin, "no_span", detail, record.set_name)
        answer = context.token_range(*strip_span(fields.context, *fields.answers[0])) if fields.answers else None
        length = self._block - self.frame.size - len(question)
        if answer is not None and answer[1] - answer[0] >= length and document.split == "train":
            return DroppedRecord("answer_longer_than_window")
        is_validation = document.split == "validation"
        samples = []
        for first in window_starts(len(context.ids), length, self._span_qa.stride):
            sample = self._build_window(document, question, context, first, length, answer)
            key = f"{fields.id}:{fields.question}:{first}".encode()
            keeps_unknown = xxhash.xxh3_64_intdigest(key) < self._span_qa.unknown_windows * 2**64
            if is_validation or sample.numbers[CLASS] != UNKNOWN or keeps_unknown:
                samples.append(sample)
        if not is_validation:
            return DocumentSamples(samples)
        reference = {
            "id": fields.id,
            "question": fields.question,
            "context": fields.context,
            "answers": fields.answers,
            "class": fields.answer_class,
            "candidates": fields.candidates,
        }
        return DocumentSamples(samples, reference)

    def _build_window(
        self,
        document: Document,
        question: np.ndarray,
        context: Encoding,
        first: int,
        length: int,
        answer: tuple[int, int] | None,
    ) -> Sample:
        """Return the window of `context` from token `first`. Positions count from the start of the sample."""
        fields, frame = document.record.fields, self.frame
        assert isinstance(fields, Question)
        context_end = min(first + length, len(context.ids))
        window_start = len(frame.before) + len(question) + len(frame.between)
        ids = np.concatenate([frame.before, question, frame.between, context.ids[first:context_end], frame.after])
        start, end, answer_class = 0, 0, UNKNOWN
        if answer is not None and first <= answer[0] and answer[1] < context_end:
            start, end = answer[0] - first + window_start, answer[1] - first + window_start
            answer_class = CLASSES.index(fields.answer_class)
        numbers = (0, first, window_start, start, end, answer_class)  # the store counts the documents
        if document.split == "train":
            return Sample(ids.astype(np.int64), None, numbers)
        # The characters of each token in the document, to turn a predicted span into text: start << 32 | end.
        offsets = np.zeros(len(ids), dtype=np.uint64)
        starts, ends = (array[first:context_end].astype(np.uint64) for array in (context.starts, context.ends))
        offsets[window_start : window_start + context_end - first] = starts << np.uint64(32) | ends
        return Sample(ids.astype(np.int64), offsets, numbers)

    def example_texts(self, sample: Sample) -> tuple[str, str]:
        """Return the question of a training sample, and a passage of its window that contains the answer, if any."""
        window_start, frame = sample.numbers[WINDOW_START], self.frame
        question = sample.ids[len(frame.before) : window_start - len(frame.between)]
        window = sample.ids[window_start : len(sample.ids) - len(frame.after)]
        answer_end = max(window_start, sample.numbers[END] + 1) - window_start
        passage = window[max(0, answer_end - _CONTEXT_TOKENS) : max(answer_end, _CONTEXT_TOKENS)]
        question_text, passage_text = self._tokenizer.decode(question), self._tokenizer.decode(passage)
        return " ".join(question_text.split()), " ".join(passage_text.split())


def window_starts(tokens: int, length: int, stride: int) -> range:
    """Return the first token of each window: every `stride` tokens until a window reaches the end."""
    return range(0, max(0, tokens - length) + stride, stride) if tokens > length else range(1)
