"""Questions and the documents that may answer them: Natural Questions and SQuAD. Answers are spans of characters."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text.reading.encodings import NotText
from artel.text.reading.lines import BadLine, read_lines
from artel.text.records import AnswerClass, Question, Record, Rejected

Span = tuple[int, int]
_Marked = tuple[AnswerClass, tuple[Span, ...]]


class _Wrong(Exception):
    """What is wrong with a question: the reason for the ledger and the sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def read_nq(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """An example a line: the simplified format of NQ and Kaggle, the original one, or a document and its answers."""
    try:
        for number, line in read_lines(file, origin, source.encoding, data.max_document):
            where = f"{origin}:{number}"
            if isinstance(line, BadLine):
                yield Rejected(where, line.reason, line.detail, set_name)
            elif line.strip():
                try:
                    yield _record(_nq_question(_object(line), str(number)), where, set_name)
                except _Wrong as wrong:
                    yield Rejected(where, wrong.reason, wrong.detail, set_name)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)


def read_squad(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """SQuAD 1.1 and 2: one JSON object. Official files are a single line, so a place says the question's id too."""
    try:
        text = _whole(file, origin, source, data)
        places = _Places(text, origin)
        for path, paragraph, entry in _squad_entries(text):
            where = places.find(entry, path)
            try:
                yield _record(_squad_question(path, paragraph, entry), where, set_name)
            except _Wrong as wrong:
                yield Rejected(where, wrong.reason, wrong.detail, set_name)
    except (_Wrong, NotText) as error:
        yield Rejected(origin, error.reason, error.detail, set_name)


def _record(question: Question, where: str, set_name: str) -> Record:
    """Questions of one document fall into one part of the data: a model must not have read the answers."""
    for name, text in (("question", question.question), ("document", question.context)):
        if not text.strip():
            raise _Wrong("empty", f"the {name} is empty; fill it in, or leave the question out")
    text = f"{question.question}\n{question.context}"
    return Record(text, where, set_name, question, group=question.context)


def _object(line: str) -> dict[str, Any]:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _Wrong("bad_json", f"is not JSON: {error}; write one object a line, each whole") from None
    if not isinstance(entry, dict):
        raise _Wrong("bad_json", f"is {type(entry).__name__}; write an object with fields")
    return entry


def _field(entry: Any, name: str, kind: type | tuple[type, ...], path: str = "") -> Any:
    """A field that must be there and of its kind; the path says where in the line or file the entry stands."""
    of = path or "the line"
    if not isinstance(entry, dict):
        raise _Wrong("no_field", f"{of} is {type(entry).__name__}; write an object with the field {name!r}")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    if name not in entry:
        have = ", ".join(entry) or "none"
        raise _Wrong("no_field", f"{of} has no field {name!r} (it has: {have}); write it as {wanted}")
    value = entry[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):  # a bool is an int to Python
        have = ", ".join(f"{key}: {type(item).__name__}" for key, item in entry.items())
        raise _Wrong("no_field", f"field {name!r} of {of} is {type(value).__name__} (it has: {have}); write {wanted}")
    return value


# Natural Questions


def _nq_question(entry: dict[str, Any], number: str) -> Question:
    document = _nq_document(entry)
    question = _field(entry, "question_text", str)
    if "annotations" in entry:
        answer_class, answers = _annotated(entry, document)
    elif "answers" in entry:
        answer_class, answers = _named(_field(entry, "answers", list), document)
    else:
        raise _no_annotations("it has neither annotations nor answers")
    named = next((name for name in ("example_id", "id") if name in entry), None)
    identity = number if named is None else str(_field(entry, named, (str, int)))
    return Question(identity, question, document, answers, answer_class, _candidates(entry))


def _nq_document(entry: dict[str, Any]) -> str:
    """The text; of the original format (the official dev set) the words, each without the spaces inside it.

    So does NQ's own simplification, and the places of words stay what they are.
    """
    if "document_text" in entry or "document_tokens" not in entry:
        return str(_field(entry, "document_text", str))
    tokens = _field(entry, "document_tokens", list)
    words = (
        _field(token, "token", str, f"document_tokens[{number}]").replace(" ", "_")
        for number, token in enumerate(tokens)
    )
    return " ".join(words)


def _no_annotations(what: str) -> _Wrong:
    return _Wrong("no_annotations", f"{what}: there is nothing to learn or compare with; give a set with answers")


def _annotated(entry: dict[str, Any], document: str) -> _Marked:
    """NQ's own rule: an example has an answer when two of its annotators gave one (one, if there was only one)."""
    annotations = _field(entry, "annotations", list)
    if not annotations:
        raise _no_annotations("its annotations are empty")
    words = _Words(document)
    marked = [
        _annotation(annotation, entry, words, f"annotations[{number}]") for number, annotation in enumerate(annotations)
    ]
    answered = [one for one in marked if one[0] != "unknown"]
    if len(answered) < min(2, len(marked)):
        return "unknown", ()
    learned = answered[0][0]
    spans = [span for answer_class, found in answered if answer_class == learned for span in found]
    return learned, tuple(dict.fromkeys(spans))


class _Words:
    """The characters at which the space-separated words of a document stand."""

    def __init__(self, document: str) -> None:
        self._document = document
        self._starts: list[int] = []

    def span(self, start: int, end: int, path: str) -> Span:
        if not self._starts:  # most examples have no answer: their words are never counted
            starts = (found.end() for found in re.finditer(" ", self._document))
            self._starts = [0, *starts, len(self._document) + 1]
        count = len(self._starts) - 1
        if not 0 <= start < end <= count:
            what = f"words {start} to {end} ({path}) are no part of the document, which has {count:,} words"
            raise _Wrong("answer_not_in_document", f"{what}; mend start_token and end_token, or leave the line out")
        found = self._starts[start], self._starts[end] - 1
        if not self._document[found[0] : found[1]].strip():
            what = f"words {start} to {end} ({path}) are empty"
            raise _Wrong("answer_not_in_document", f"{what}; separate words by one space, or leave the line out")
        return found


def _annotation(annotation: Any, entry: dict[str, Any], words: _Words, path: str) -> _Marked:
    said = _field(annotation, "yes_no_answer", str, path).upper()
    if said not in ("YES", "NO", "NONE"):
        raise _Wrong("no_field", f"yes_no_answer of {path} is {said!r}; write YES, NO or NONE")
    short = _field(annotation, "short_answers", list, path)
    if said == "NONE" and short:
        return "short", tuple(
            _token_span(answer, words, f"{path}.short_answers[{number}]") for number, answer in enumerate(short)
        )
    long = _long_answer(annotation, entry, words, path)
    if said == "NONE":
        return ("long", long) if long else ("unknown", ())
    return ("yes" if said == "YES" else "no"), long


def _long_answer(annotation: Any, entry: dict[str, Any], words: _Words, path: str) -> tuple[Span, ...]:
    """The span of the long answer, or none; its words stand in it, else in the candidate it points to."""
    long = _field(annotation, "long_answer", dict, path)
    path = f"{path}.long_answer"
    index = _field(long, "candidate_index", int, path) if "candidate_index" in long else -1
    if "start_token" not in long and index >= 0:
        candidates = _field(entry, "long_answer_candidates", list)
        if index >= len(candidates):
            what = f"candidate_index of {path} is {index} where there are {len(candidates)} long_answer_candidates"
            raise _Wrong("answer_not_in_document", f"{what}; mend it, or leave the line out")
        return (_token_span(candidates[index], words, f"long_answer_candidates[{index}]"),)
    if index < 0 and _field(long, "start_token", int, path) < 0:
        return ()
    return (_token_span(long, words, path),)


def _token_span(entry: Any, words: _Words, path: str) -> Span:
    return words.span(_field(entry, "start_token", int, path), _field(entry, "end_token", int, path), path)


def _named(answers: list[Any], document: str) -> _Marked:
    """Answers given as text: each by the first place where it stands."""
    spans = []
    for number, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise _Wrong("no_field", f"answers[{number}] is {type(answer).__name__}; write answers as texts in quotes")
        start = document.find(answer) if answer.strip() else -1
        if start >= 0:
            spans.append((start, start + len(answer)))
    if answers and not spans:
        what = f"the document does not hold {_shown(answers[0])}"
        raise _Wrong("answer_not_in_document", f"{what}; write an answer as it stands there, or answers: [] for none")
    return ("short", tuple(dict.fromkeys(spans))) if spans else ("unknown", ())


def _candidates(entry: dict[str, Any]) -> tuple[Span, ...]:
    """Top-level ones first, otherwise as listed: the first that holds an answer is then the largest."""
    if "long_answer_candidates" not in entry:
        return ()
    listed = []
    for number, candidate in enumerate(_field(entry, "long_answer_candidates", list)):
        path = f"long_answer_candidates[{number}]"
        span = (_field(candidate, "start_token", int, path), _field(candidate, "end_token", int, path))
        listed.append((not candidate.get("top_level", True), span))
    return tuple(span for _, span in sorted(listed, key=lambda item: item[0]))


# SQuAD


def _whole(file: Path, origin: str, source: SourceConfig, data: DataConfig) -> str:
    """The text of a file, compressed or not. It is parsed at once, so its size is bounded."""
    if file.stat().st_size > data.max_document:
        raise _too_large(origin, data)
    lines: list[str] = []
    size = 0
    for number, line in read_lines(file, origin, source.encoding, data.max_document):
        if isinstance(line, BadLine):
            raise _Wrong(line.reason, f"line {number}: {line.detail}; mend the file, or fetch it again")
        lines.append(line)
        size += len(line) + 1
        if size > data.max_document + 1:  # what a compressed file holds is told only by reading it
            raise _too_large(origin, data)
    return "\n".join(lines)


def _too_large(origin: str, data: DataConfig) -> InputError:
    what = f"is over {data.max_document:,} bytes (data.max_document), and SQuAD is parsed whole"
    return InputError.at(origin, what, "write a larger data.max_document, or cut data up into several files")


def _squad_entries(text: str) -> Iterator[tuple[str, Any, Any]]:
    """(path of the question, its paragraph, the question); something wrong above a question stands in its place."""
    fix = 'SQuAD is one object: {"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}'
    try:
        whole = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _Wrong("bad_json", f"is not JSON, or is cut off: {error}; {fix}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), list):
        have = (", ".join(whole) or "no fields") if isinstance(whole, dict) else type(whole).__name__
        raise _Wrong("bad_json", f"has no list 'data' (it has: {have}); {fix}")
    for number, article in enumerate(whole["data"]):
        for above, paragraph in _items(article, "paragraphs", f"data[{number}]"):
            for path, entry in _items(paragraph, "qas", above):
                yield path, paragraph, entry


def _items(holder: Any, name: str, path: str) -> Iterator[tuple[str, Any]]:
    """(path, item) of a list in an object, or the one thing that is wrong with them."""
    if isinstance(holder, _Wrong):
        yield path, holder
        return
    try:
        items = _field(holder, name, list, path)
    except _Wrong as wrong:
        yield path, wrong
        return
    for number, item in enumerate(items):
        yield f"{path}.{name}[{number}]", item


def _squad_question(path: str, paragraph: Any, entry: Any) -> Question:
    if isinstance(entry, _Wrong):
        raise entry
    context = _field(paragraph, "context", str, path.rsplit(".", 1)[0])
    identity = str(_field(entry, "id", (str, int), path))
    question = _field(entry, "question", str, path)
    impossible = "is_impossible" in entry and _field(entry, "is_impossible", bool, path)
    answers = [] if impossible else _field(entry, "answers", list, path)
    spans = [_squad_span(answer, context, f"{path}.answers[{number}]") for number, answer in enumerate(answers)]
    return Question(identity, question, context, tuple(dict.fromkeys(spans)), "short" if spans else "unknown")


def _squad_span(answer: Any, context: str, path: str) -> Span:
    text, start = _field(answer, "text", str, path), _field(answer, "answer_start", int, path)
    end = start + len(text)
    if not text.strip():
        fix = "write answers: [] for a question without an answer"
        raise _Wrong("answer_not_in_context", f"{path} is an empty text; {fix}")
    if start < 0 or context[start:end] != text:
        there = _shown(context[start:end]) if start >= 0 else "nothing"
        fix = "answer_start counts characters of context from 0; mend it, or leave the question out"
        raise _Wrong("answer_not_in_context", f"{path} is {_shown(text)}, at {start} stands {there}; {fix}")
    return start, end


class _Places:
    """The lines of a file on which its questions stand."""

    _NAMED = re.compile(r'"(?:id|question)"\s*:\s*("(?:[^"\\]|\\.)*+"|-?\d+)')

    def __init__(self, text: str, origin: str) -> None:
        self._origin = origin
        self._line = 1
        self._lines: dict[str, deque[int]] = defaultdict(deque)
        line, counted = 1, 0
        for found in self._NAMED.finditer(text):
            line += text.count("\n", counted, found.start())
            counted = found.start()
            with suppress(orjson.JSONDecodeError):  # the file may be no JSON: reading it says so
                self._lines[str(orjson.loads(found[1]))].append(line)

    def find(self, entry: Any, path: str) -> str:
        """`file:line (id)`. A question without an id has its path for it; where it has no text, the last line found."""
        fields = entry if isinstance(entry, dict) else {}
        named = str(fields.get("id", fields.get("question", "")))
        if self._lines.get(named):
            self._line = self._lines[named].popleft()
        return f"{self._origin}:{self._line} ({named if 'id' in fields else path})"


def _shown(text: Any) -> str:
    said = repr(text)
    return said if len(said) <= 80 else f"{said[:77]}…"
