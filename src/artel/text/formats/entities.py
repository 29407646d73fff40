"""Texts with spans of characters, and words with tags, from rows of JSON lines, of a JSON array or of parquet.

Read as they are: doccano's `label`, `labels` and `entities`; Label Studio's export (JSON and JSON-MIN); spaCy's and
Prodigy's `spans`; spaCy's [text, {"entities": […]}]; rows of Hugging Face data sets, `tokens` with `ner_tags`, whose
numbers have their names in `tag_names` or in the parquet file. Files with CoNLL's endings are read as `conll` does.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.text.formats.conll import COLUMNS, CONLL
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, has_lines, object_of, read_rows
from artel.text.formats.parquet import SUFFIX, check_parquet_rows, class_names
from artel.text.reading.files import file_name
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Dropped, Record, Rejected
from artel.text.tags import ENTITIES, WORDS, Span, tagged_record, tagged_words

_WORDS = ("tokens", "words")
_TAGS = {ENTITIES: ("ner_tags", "tags", "labels", "ner", "label"), WORDS: ("upos", "pos_tags", "tags", "labels", "pos")}
_SPANS = ("entities", "spans", "labels", "label")
_STARTS, _ENDS = ("start", "start_offset"), ("end", "end_offset")
_LABELS = ("label", "labels", "type", "tag", "entity_group")
_ANSWERS = {"reject": "rejected_by_annotator", "ignore": "ignored_by_annotator"}  # Prodigy's `answer`


def read_entities(file: SourceFile) -> Iterator[Record | Rejected | Dropped]:
    """Yield a record per row; of columns, per sentence."""
    if _is_columns(file.origin):
        yield from CONLL.read(file)
        return
    reader = _RowReader(file)
    for place, row in read_rows(file):
        try:
            yield reader.read(row, place)
        except BadRecord as error:
            yield file.reject(place, error)


class _RowReader:
    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._source = file.source
        tags = [file.source.tags] if file.source.tags else _TAGS[file.source.yields]
        self._names: dict[str, list[str]] = {} if has_lines(file) else class_names(file.path, file.origin, tags)

    def read(self, row: Any, place: str) -> Record | Dropped:
        source, set_name = self._source, self._file.set_name
        if isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict):
            row = {source.field: row[0], **row[1]}  # spaCy's training data
        entry = object_of(row)
        answer = entry.get("answer")
        if isinstance(answer, str) and answer in _ANSWERS:
            return Dropped(_ANSWERS[answer], set_name)
        if is_task(entry):
            text, spans = annotated_spans(entry, source.field)
            if spans is None:
                return Dropped("not_annotated", set_name)
        elif (words := _field_of(entry, source.words, _WORDS)) and _is_texts(entry[words]):
            text, spans = self._of_words(entry, words)
        else:
            text, spans = self._of_spans(entry)
        return tagged_record(text, spans, place, set_name)

    def _override(self, setting: str, name: str) -> str:
        return shlex.quote(f"{self._file.key}.{setting}={name}")

    def _of_words(self, entry: dict[str, Any], words: str) -> tuple[str, list[Span]]:
        kind = self._source.yields
        field = _field_of(entry, self._source.tags, _TAGS[kind])
        tags = None if field is None else entry[field]
        if field is None or not isinstance(tags, list):
            have = ", ".join(entry)
            name = next((name for name, value in entry.items() if isinstance(value, list) and name != words), "NAME")
            what = f"has {words!r} and no list of tags for them (it has: {have})"
            raise BadRecord("no_field", f"{what}; name it: {self._override('tags', name)}")
        if len(tags) != len(entry[words]):
            what = f"has {len(entry[words])} {words} and {len(tags)} {field}"
            raise BadRecord("unequal_columns", f"{what}; fix it: each word has one tag")
        names = self._source.tag_names or self._names.get(field, [])
        return tagged_words(entry[words], [_tag_name(tag, names) for tag in tags], kind)

    def _of_spans(self, entry: dict[str, Any]) -> tuple[str, list[Span]]:
        text = entry.get(self._source.field)
        if not isinstance(text, str):
            have = ", ".join(f"{name}: {type(value).__name__}" for name, value in entry.items()) or "none"
            what = f"has no text in {self._source.field!r} (it has: {have})"
            name = next((name for name, value in entry.items() if isinstance(value, str) and value.strip()), "NAME")
            fix = f"name it: {self._override('field', name)}"
            raise BadRecord("no_text", f"{what}; {fix}, or words: NAME where it is a list of words")
        field = _field_of(entry, self._source.tags, _SPANS)
        if field is None or not isinstance(entry[field], list):
            have = ", ".join(entry)
            what = f"has no list of spans (it has: {have})"
            name = next((name for name, value in entry.items() if isinstance(value, list)), "NAME")
            fix = f"name it: {self._override('tags', name)}; write an empty list where nothing is named"
            raise BadRecord("no_field", f"{what}; {fix}")
        return text, [span for number, item in enumerate(entry[field]) for span in _spans(item, f"{field}[{number}]")]


def _field_of(entry: dict[str, Any], named: str, usual: Sequence[str]) -> str | None:
    """The field that the source names, else the first of the usual ones that the entry has."""
    return next((name for name in ([named] if named else usual) if name in entry), None)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _tag_name(tag: Any, names: list[str]) -> str:
    if isinstance(tag, str):
        return tag
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise BadRecord("no_label", f"has the tag {tag!r}; write tags as names, or as numbers of tag_names")
    if not 0 <= tag < len(names):
        known = f"tag_names has {len(names)}" if names else "numbers need their names"
        raise BadRecord("no_label", f"has the tag {tag}, and {known}; write tag_names: [O, B-PER, …] in their order")
    return names[tag]


def _spans(item: Any, path: str) -> list[Span]:
    """The spans of [start, end, label], or of an object, which may have several labels."""
    if isinstance(item, list) and len(item) == 3:
        start, end, labels = item
    elif isinstance(item, dict):
        start, end = (next((item[name] for name in names if name in item), None) for names in (_STARTS, _ENDS))
        labels = next((item[name] for name in _LABELS if name in item), None)
    else:
        raise _no_span(path, item)
    labels = labels if isinstance(labels, list) else [labels]
    if not all(isinstance(place, int) and not isinstance(place, bool) for place in (start, end)):
        raise _no_span(path, item)
    if not labels or not all(isinstance(label, str) for label in labels):
        raise BadRecord("no_label", f"{path} has the label {str(labels)[:60]}; write it as text")
    return [(start, end, label) for label in labels]


def _no_span(path: str, item: Any) -> BadRecord:
    what = f"{path} is {str(item)[:80]}"
    return BadRecord("no_span", f'{what}; write [start, end, label] or {{"start": 0, "end": 4, "label": "PER"}}')


def _is_columns(origin: str) -> bool:
    return file_name(origin).endswith(COLUMNS)


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    if _is_columns(str(path)):
        return CONLL.check(path, source, key, data)
    return check_parquet_rows(path, key) if file_name(str(path)).endswith(SUFFIX) else []


ENTITY_ROWS = Format(
    read=read_entities,
    yields=(ENTITIES, WORDS),
    suffixes=(*SUFFIXES, SUFFIX, *COLUMNS),
    has_lines=has_lines,
    check=_check,
)


def is_task(entry: dict[str, Any]) -> bool:
    """True for a row of the export; rows of JSON-MIN are read as other rows with spans are."""
    return isinstance(entry.get("data"), dict) and isinstance(entry.get("annotations"), list)


def annotated_spans(entry: dict[str, Any], field: str) -> tuple[str, list[Span] | None]:
    """(text, spans) of a task, by the annotation that is called ground truth, else the first that was not cancelled.

    Without an annotation spans are None. Raises BadRecord.
    """
    data = entry["data"]
    texts = [name for name, value in data.items() if isinstance(value, str)]
    name = field if field in texts else texts[0] if len(texts) == 1 else None
    if name is None:
        what = f"its data has {', '.join(data) or 'nothing'}"
        raise BadRecord("no_text", f"{what}; write field: NAME of the text")
    text = data[name]
    done = [each for each in entry["annotations"] if isinstance(each, dict) and not each.get("was_cancelled")]
    if not done:
        return text, None
    chosen = next((each for each in done if each.get("ground_truth")), done[0])
    results = enumerate(chosen.get("result") or [])
    return text, [span for number, result in results for span in _result_spans(result, text, f"result[{number}]")]


def _result_spans(result: Any, text: str, path: str) -> list[Span]:
    """The spans of a result; none of one that marks nothing (a relation, a choice for the whole text)."""
    value = result.get("value") if isinstance(result, dict) else None
    labels = value.get("labels") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(labels, list) or not labels:
        return []
    start, end, marked = value.get("start"), value.get("end"), value.get("text")
    if not isinstance(start, int) or not isinstance(end, int) or not all(isinstance(label, str) for label in labels):
        raise BadRecord("no_span", f"{path} has no start, end and labels; export it again as JSON")
    if isinstance(marked, str) and _said(text[start:end]) != _said(marked):
        start, end = _characters(text, start), _characters(text, end)
        if _said(text[start:end]) != _said(marked):
            what = f"{path} marks {marked[:40]!r}, and there stands {text[start:end][:40]!r}"
            raise BadRecord("span_outside", f"{what}; export the task again, or leave it out")
    return [(start, end, label) for label in labels]


def _said(text: str) -> str:
    """A text without its white space: the page that marks spans shows several spaces, and ends of lines, as one."""
    return "".join(text.split())


def _characters(text: str, units: int) -> int:
    """Characters in the first so many UTF-16 units of a text."""
    return len(text.encode("utf-16-le")[: 2 * units].decode("utf-16-le", "ignore"))
