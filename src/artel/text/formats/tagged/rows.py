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
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, has_lines, object_of, read_rows
from artel.text.formats.parquet import SUFFIX, check_parquet_rows, class_names
from artel.text.formats.tagged.conll import COLUMNS, CONLL
from artel.text.formats.tagged.label_studio import annotated_spans, is_task
from artel.text.formats.tagged.spans import ENTITIES, WORDS, Span, tagged_record, tagged_words
from artel.text.reading.file_names import file_name
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Dropped, Record, Rejected

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
            raise BadRecord("unequal_columns", f"{what}; mend it: each word has one tag")
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
