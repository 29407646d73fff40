"""Questions and the documents that may answer them: Natural Questions and SQuAD. Answers are spans of characters."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

from artel.printable import shorten
from artel.text.formats.format import Format
from artel.text.formats.jsonl import describe_fields, has_lines, parse_full, read_rows, require_object
from artel.text.reading.files import with_compressed
from artel.text.reading.source_file import SourceFile
from artel.text.records import AnswerClass, BadRecord, Question, Record, Rejected

Span = tuple[int, int]
_Answers = tuple[AnswerClass, tuple[Span, ...]]


def read_nq(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield an example per line: the simplified format of NQ (also on Kaggle), the original one, or answered documents.

    Format: https://github.com/google-research-datasets/natural-questions
    """
    for origin, row in read_rows(file):
        try:
            yield _build_record(
                _parse_nq_question(require_object(row), origin.rpartition(":")[2]), origin, file.set_name
            )
        except BadRecord as error:
            yield file.reject(origin, error)


def read_squad(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield the questions of SQuAD 1.1 or 2. Official files are one line, so the origin also has the id."""
    fix = "write a larger data.max_document, or cut data up into several files"
    text = file.text(file.max_bytes, fix)
    positions = _Positions(text, file.origin)
    for path, paragraph, entry in _walk_squad_entries(parse_full(text, file.origin)):
        origin = positions.find(entry, path)
        try:
            yield _build_record(_parse_squad_question(path, paragraph, entry), origin, file.set_name)
        except BadRecord as error:
            yield file.reject(origin, error)


def _build_record(question: Question, origin: str, set_name: str) -> Record:
    """Return the record of a question. Questions of one document go into the same split: it has their answers."""
    for name, text in (("question", question.question), ("document", question.context)):
        if not text.strip():
            raise BadRecord("empty", f"the {name} is empty; fill it in, or remove the question")
    text = f"{question.question}\n{question.context}"
    return Record(text, origin, set_name, question, group=question.context)


def _require_field(entry: Any, name: str, kind: type | tuple[type, ...], path: str = "") -> Any:
    """Return a required field of a type (or of several). `path`: position of `entry` in the line or file."""
    owner = path or "the line"
    if not isinstance(entry, dict):
        raise BadRecord("no_field", f"{owner} is {type(entry).__name__}; write an object with the field {name!r}")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(kind.__name__ for kind in kinds)
    if name not in entry:
        raise BadRecord(
            "no_field", f"{owner} has no field {name!r} (it has: {describe_fields(entry)}); write it as {expected}"
        )
    value = entry[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):  # a bool is an int in Python
        field_types = ", ".join(f"{key}: {type(item).__name__}" for key, item in entry.items())
        what = f"field {name!r} of {owner} is {type(value).__name__} (it has: {field_types})"
        raise BadRecord("no_field", f"{what}; write {expected}")
    return value


def _parse_nq_question(entry: dict[str, Any], default_id: str) -> Question:
    document = _read_nq_document(entry)
    question = _require_field(entry, "question_text", str)
    if "annotations" in entry:
        answer_class, answers = _choose_official_answer(entry, document)
    elif "answers" in entry:
        answer_class, answers = _find_texts(_require_field(entry, "answers", list), document)
    else:
        raise _annotations_error("it has neither annotations nor answers")
    id_field = next((name for name in ("example_id", "id") if name in entry), None)
    question_id = default_id if id_field is None else str(_require_field(entry, id_field, (str, int)))
    return Question(question_id, question, document, answers, answer_class, _read_candidates(entry))


def _read_nq_document(entry: dict[str, Any]) -> str:
    """Return the text of the document.

    The original format (the official dev set) has words. They are joined by spaces, and a space inside a word becomes
    an underscore, as in the official simplification, so that the indices of words stay the same.
    """
    if "document_text" in entry or "document_tokens" not in entry:
        return str(_require_field(entry, "document_text", str))
    tokens = enumerate(_require_field(entry, "document_tokens", list))
    return " ".join(
        _require_field(token, "token", str, f"document_tokens[{index}]").replace(" ", "_") for index, token in tokens
    )


def _annotations_error(problem: str) -> BadRecord:
    return BadRecord("no_annotations", f"{problem}: there is nothing to learn or compare with; use a set with answers")


def _choose_official_answer(entry: dict[str, Any], document: str) -> _Answers:
    """Return the answer by the official rule: at least two annotators (or the only one) gave an answer."""
    annotations = _require_field(entry, "annotations", list)
    if not annotations:
        raise _annotations_error("its annotations are empty")
    words = _Words(document)
    answers = [
        _parse_annotation(annotation, entry, words, f"annotations[{index}]")
        for index, annotation in enumerate(annotations)
    ]
    answered = [answer for answer in answers if answer[0] != "unknown"]
    if len(answered) < min(2, len(answers)):
        return "unknown", ()
    learned_class = answered[0][0]
    spans = [span for answer_class, spans in answered if answer_class == learned_class for span in spans]
    return learned_class, tuple(dict.fromkeys(spans))


class _Words:
    """Character positions of the space-separated words of a document."""

    def __init__(self, document: str) -> None:
        self._document = document
        self._starts: list[int] = []

    def span(self, start: int, end: int, path: str) -> Span:
        """Return the character span of the words from `start` to `end`, exclusive. Raise BadRecord if it is empty."""
        if not self._starts:  # computed when needed, since most examples have no answer
            starts = (match.end() for match in re.finditer(" ", self._document))
            self._starts = [0, *starts, len(self._document) + 1]
        num_words = len(self._starts) - 1
        if not 0 <= start < end <= num_words:
            what = f"words {start} to {end} ({path}) are outside the document of {num_words:,} words"
            raise BadRecord("answer_not_in_document", f"{what}; fix start_token and end_token, or remove the line")
        span = self._starts[start], self._starts[end] - 1
        if not self._document[span[0] : span[1]].strip():
            what = f"words {start} to {end} ({path}) are empty"
            raise BadRecord("answer_not_in_document", f"{what}; separate words by one space, or remove the line")
        return span


def _parse_annotation(annotation: Any, entry: dict[str, Any], words: _Words, path: str) -> _Answers:
    yes_no = _require_field(annotation, "yes_no_answer", str, path).upper()
    if yes_no not in ("YES", "NO", "NONE"):
        raise BadRecord("no_field", f"yes_no_answer of {path} is {yes_no!r}; write YES, NO or NONE")
    short_answers = _require_field(annotation, "short_answers", list, path)
    if yes_no == "NONE" and short_answers:
        return "short", tuple(
            _parse_token_span(answer, words, f"{path}.short_answers[{index}]")
            for index, answer in enumerate(short_answers)
        )
    long_answer = _parse_long_answer(annotation, entry, words, path)
    if yes_no == "NONE":
        return ("long", long_answer) if long_answer else ("unknown", ())
    return ("yes" if yes_no == "YES" else "no"), long_answer


def _parse_long_answer(annotation: Any, entry: dict[str, Any], words: _Words, path: str) -> tuple[Span, ...]:
    """Return the span of the long answer, if any: from its words, else from its candidate."""
    long_answer = _require_field(annotation, "long_answer", dict, path)
    path = f"{path}.long_answer"
    index = _require_field(long_answer, "candidate_index", int, path) if "candidate_index" in long_answer else -1
    if "start_token" not in long_answer and index >= 0:
        candidates = _require_field(entry, "long_answer_candidates", list)
        if index >= len(candidates):
            what = f"candidate_index of {path} is {index} but there are {len(candidates)} long_answer_candidates"
            raise BadRecord("answer_not_in_document", f"{what}; fix it, or remove the line")
        return (_parse_token_span(candidates[index], words, f"long_answer_candidates[{index}]"),)
    if index < 0 and _require_field(long_answer, "start_token", int, path) < 0:
        return ()
    return (_parse_token_span(long_answer, words, path),)


def _parse_token_span(entry: Any, words: _Words, path: str) -> Span:
    return words.span(
        _require_field(entry, "start_token", int, path), _require_field(entry, "end_token", int, path), path
    )


def _find_texts(answers: list[Any], document: str) -> _Answers:
    """Return the spans of answers given as texts, each at its first occurrence."""
    spans = []
    for index, answer in enumerate(answers):
        if not isinstance(answer, str):
            what = f"answers[{index}] is {type(answer).__name__}"
            raise BadRecord("no_field", f"{what}; write answers as texts in quotes")
        start = document.find(answer) if answer.strip() else -1
        if start >= 0:
            spans.append((start, start + len(answer)))
    if answers and not spans:
        what = f"the document does not hold {shorten(repr(answers[0]), 80)}"
        fix = "copy the answer from the document, or write answers: [] for none"
        raise BadRecord("answer_not_in_document", f"{what}; {fix}")
    return ("short", tuple(dict.fromkeys(spans))) if spans else ("unknown", ())


def _read_candidates(entry: dict[str, Any]) -> tuple[Span, ...]:
    """Return the candidates, top-level ones first, so that the first one with an answer is the largest."""
    if "long_answer_candidates" not in entry:
        return ()
    candidates = []
    for index, candidate in enumerate(_require_field(entry, "long_answer_candidates", list)):
        path = f"long_answer_candidates[{index}]"
        span = (_require_field(candidate, "start_token", int, path), _require_field(candidate, "end_token", int, path))
        candidates.append((not candidate.get("top_level", True), span))
    return tuple(span for _, span in sorted(candidates, key=lambda item: item[0]))


def _walk_squad_entries(content: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path of the question, its paragraph, the question), or a BadRecord for a paragraph or question."""
    fix = 'SQuAD is one object: {"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}'
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        existing = (", ".join(content) or "no fields") if isinstance(content, dict) else type(content).__name__
        raise BadRecord("bad_json", f"has no list 'data' (it has: {existing}); {fix}")
    for index, article in enumerate(content["data"]):
        for paragraph_path, paragraph in _walk_items(article, "paragraphs", f"data[{index}]"):
            for path, entry in _walk_items(paragraph, "qas", paragraph_path):
                yield path, paragraph, entry


def _walk_items(owner: Any, name: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, item) of a list in an object, or one BadRecord if there is no such list."""
    try:
        if isinstance(owner, BadRecord):
            raise owner
        items = _require_field(owner, name, list, path)
    except BadRecord as error:
        yield path, error
        return
    for index, item in enumerate(items):
        yield f"{path}.{name}[{index}]", item


def _parse_squad_question(path: str, paragraph: Any, entry: Any) -> Question:
    if isinstance(entry, BadRecord):
        raise entry
    context = _require_field(paragraph, "context", str, path.rsplit(".", 1)[0])
    question_id = str(_require_field(entry, "id", (str, int), path))
    question = _require_field(entry, "question", str, path)
    is_impossible = "is_impossible" in entry and _require_field(entry, "is_impossible", bool, path)
    answers = [] if is_impossible else _require_field(entry, "answers", list, path)
    spans = [_parse_squad_span(answer, context, f"{path}.answers[{index}]") for index, answer in enumerate(answers)]
    return Question(question_id, question, context, tuple(dict.fromkeys(spans)), "short" if spans else "unknown")


def _parse_squad_span(answer: Any, context: str, path: str) -> Span:
    text, start = _require_field(answer, "text", str, path), _require_field(answer, "answer_start", int, path)
    end = start + len(text)
    if not text.strip():
        fix = "write answers: [] for a question without an answer"
        raise BadRecord("answer_not_in_context", f"{path} is an empty text; {fix}")
    if start < 0 or context[start:end] != text:
        actual = shorten(repr(context[start:end]), 80) if start >= 0 else "nothing"
        fix = "answer_start counts characters of context from 0; fix it, or remove the question"
        what = f"{path} is {shorten(repr(text), 80)}, but at {start} the context has {actual}"
        raise BadRecord("answer_not_in_context", f"{what}; {fix}")
    return start, end


class _Positions:
    """Line numbers of the questions in a file."""

    _ID_OR_QUESTION = re.compile(r'"(?:id|question)"\s*:\s*("(?:[^"\\]|\\.)*+"|-?\d+)')

    def __init__(self, text: str, origin: str) -> None:
        self._origin = origin
        self._line = 1
        self._lines: dict[str, deque[int]] = defaultdict(deque)
        line, position = 1, 0
        for match in self._ID_OR_QUESTION.finditer(text):
            line += text.count("\n", position, match.start())
            position = match.start()
            with suppress(orjson.JSONDecodeError):  # reading reports files that are not JSON
                self._lines[str(orjson.loads(match[1]))].append(line)

    def find(self, entry: Any, path: str) -> str:
        """Return `file:line (id)`; with the path in place of a missing id, and the last line for a missing text."""
        fields = entry if isinstance(entry, dict) else {}
        name = str(fields.get("id", fields.get("question", "")))
        if self._lines.get(name):
            self._line = self._lines[name].popleft()
        return f"{self._origin}:{self._line} ({name if 'id' in fields else path})"


NQ = Format(
    read=read_nq, yields=("questions",), suffixes=with_compressed(".jsonl"), counts_words=True, has_lines=has_lines
)
SQUAD = Format(read=read_squad, yields=("questions",), suffixes=(".json",))
