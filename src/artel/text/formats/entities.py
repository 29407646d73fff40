"""Texts with character spans, or words with tags, from rows of JSON lines, a JSON array or parquet.

Supported forms: `label`, `labels` and `entities` of doccano; exports of Label Studio (JSON and JSON-MIN); `spans` of
spaCy and Prodigy; [text, {"entities": […]}] of spaCy; `tokens` with `ner_tags` of Hugging Face datasets, with names of
numbers in `tag_names` or in the parquet file. Files with CoNLL suffixes are read like `conll`.

Label Studio: {"data": {"text": …}, "annotations": [{"result": [{"value": {"start", "end", "labels"}}]}]}. Its offsets
are those of JavaScript, which counts an emoji as two. If they do not fit the marked text, they are read that way.
https://labelstud.io/guide/export#Label-Studio-JSON-format-of-annotated-tasks
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
from artel.text.formats.jsonl import SUFFIXES, describe_fields, has_lines, read_rows, require_object
from artel.text.formats.parquet import SUFFIX, check_parquet_rows, read_class_names
from artel.text.reading.files import file_name
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, DroppedRecord, Record, Rejected
from artel.text.tags import ENTITIES, WORDS, Span, build_tagged_record, join_tagged_words

_WORD_FIELDS = ("tokens", "words")
_TAG_FIELDS = {
    ENTITIES: ("ner_tags", "tags", "labels", "ner", "label"),
    WORDS: ("upos", "pos_tags", "tags", "labels", "pos"),
}
_SPAN_FIELDS = ("entities", "spans", "labels", "label")
_START_FIELDS, _END_FIELDS = ("start", "start_offset"), ("end", "end_offset")
_LABEL_FIELDS = ("label", "labels", "type", "tag", "entity_group")
_DROP_REASONS = {"reject": "rejected_by_annotator", "ignore": "ignored_by_annotator"}  # `answer` of Prodigy


def read_entities(file: SourceFile) -> Iterator[Record | Rejected | DroppedRecord]:
    """Yield a record per row; for CoNLL columns, per sentence."""
    if _is_columns(file.origin):
        yield from CONLL.read(file)
        return
    reader = _EntityReader(file)
    for origin, row in read_rows(file):
        try:
            yield reader.read(row, origin)
        except BadRecord as error:
            yield file.reject(origin, error)


class _EntityReader:
    """Turns rows of one file into records. Raises BadRecord for an invalid row."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._source = file.source
        tags = [file.source.tags] if file.source.tags else _TAG_FIELDS[file.source.yields]
        self._names: dict[str, list[str]] = {} if has_lines(file) else read_class_names(file.path, file.origin, tags)

    def read(self, row: Any, origin: str) -> Record | DroppedRecord:
        source, set_name = self._source, self._file.set_name
        if isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict):
            row = {source.field: row[0], **row[1]}  # training data of spaCy
        entry = require_object(row)
        answer = entry.get("answer")
        if isinstance(answer, str) and answer in _DROP_REASONS:
            return DroppedRecord(_DROP_REASONS[answer], set_name)
        if is_task(entry):
            text, spans = read_annotated_spans(entry, source.field)
            if spans is None:
                return DroppedRecord("not_annotated", set_name)
        elif (
            (words := _find_field(entry, source.words, _WORD_FIELDS))
            and isinstance(entry[words], list)
            and all(isinstance(word, str) for word in entry[words])
        ):
            text, spans = self._read_words(entry, words)
        else:
            text, spans = self._read_spans(entry)
        return build_tagged_record(text, spans, origin, set_name)

    def _override_argument(self, setting: str, name: str) -> str:
        return shlex.quote(f"{self._file.key}.{setting}={name}")

    def _read_words(self, entry: dict[str, Any], words: str) -> tuple[str, list[Span]]:
        kind = self._source.yields
        field = _find_field(entry, self._source.tags, _TAG_FIELDS[kind])
        tags = None if field is None else entry[field]
        if field is None or not isinstance(tags, list):
            name = next((name for name, value in entry.items() if isinstance(value, list) and name != words), "NAME")
            what = f"has {words!r} and no list of tags for them (it has: {describe_fields(entry)})"
            raise BadRecord("no_field", f"{what}; name it: {self._override_argument('tags', name)}")
        if len(tags) != len(entry[words]):
            what = f"has {len(entry[words])} {words} and {len(tags)} {field}"
            raise BadRecord("unequal_columns", f"{what}; fix it: each word has one tag")
        names = self._source.tag_names or self._names.get(field, [])
        return join_tagged_words(entry[words], [_get_tag_name(tag, names) for tag in tags], kind)

    def _read_spans(self, entry: dict[str, Any]) -> tuple[str, list[Span]]:
        text = entry.get(self._source.field)
        if not isinstance(text, str):
            fields = ", ".join(f"{name}: {type(value).__name__}" for name, value in entry.items()) or "none"
            what = f"has no text in {self._source.field!r} (it has: {fields})"
            name = next((name for name, value in entry.items() if isinstance(value, str) and value.strip()), "NAME")
            fix = f"name it: {self._override_argument('field', name)}"
            raise BadRecord("no_text", f"{what}; {fix}, or words: NAME if it is a list of words")
        field = _find_field(entry, self._source.tags, _SPAN_FIELDS)
        if field is None or not isinstance(entry[field], list):
            what = f"has no list of spans (it has: {describe_fields(entry)})"
            name = next((name for name, value in entry.items() if isinstance(value, list)), "NAME")
            fix = f"name it: {self._override_argument('tags', name)}; use an empty list if there are no names"
            raise BadRecord("no_field", f"{what}; {fix}")
        return text, [
            span for index, item in enumerate(entry[field]) for span in _parse_spans(item, f"{field}[{index}]")
        ]


def _find_field(entry: dict[str, Any], setting: str, defaults: Sequence[str]) -> str | None:
    """Return the field that the source names, else the first default field that the entry has."""
    return next((name for name in ([setting] if setting else defaults) if name in entry), None)


def _get_tag_name(tag: Any, names: list[str]) -> str:
    if isinstance(tag, str):
        return tag
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise BadRecord("no_label", f"has the tag {tag!r}; write tags as names, or as numbers of tag_names")
    if not 0 <= tag < len(names):
        known = f"tag_names has {len(names)}" if names else "numbers need their names"
        raise BadRecord("no_label", f"has the tag {tag}, and {known}; write tag_names: [O, B-PER, …] in their order")
    return names[tag]


def _parse_spans(item: Any, path: str) -> list[Span]:
    """Return the spans of [start, end, label], or of an object, which may have several labels."""
    if isinstance(item, list) and len(item) == 3:
        start, end, labels = item
    elif isinstance(item, dict):
        start, end = (
            next((item[name] for name in names if name in item), None) for names in (_START_FIELDS, _END_FIELDS)
        )
        labels = next((item[name] for name in _LABEL_FIELDS if name in item), None)
    else:
        raise _span_error(path, item)
    labels = labels if isinstance(labels, list) else [labels]
    if not all(isinstance(offset, int) and not isinstance(offset, bool) for offset in (start, end)):
        raise _span_error(path, item)
    if not labels or not all(isinstance(label, str) for label in labels):
        raise BadRecord("no_label", f"{path} has the label {str(labels)[:60]}; write it as text")
    return [(start, end, label) for label in labels]


def _span_error(path: str, item: Any) -> BadRecord:
    what = f"{path} is {str(item)[:80]}"
    return BadRecord("no_span", f'{what}; write [start, end, label] or {{"start": 0, "end": 4, "label": "PER"}}')


def _is_columns(origin: str) -> bool:
    return file_name(origin).endswith(COLUMNS)


def is_task(entry: dict[str, Any]) -> bool:
    """True for a row of a Label Studio export. JSON-MIN has ordinary rows with spans."""
    return isinstance(entry.get("data"), dict) and isinstance(entry.get("annotations"), list)


def read_annotated_spans(entry: dict[str, Any], field: str) -> tuple[str, list[Span] | None]:
    """Return (text, spans) of a task from its ground-truth annotation, else from the first one not cancelled.

    Spans are None without an annotation. Raise BadRecord if the text is not found, or a span does not fit it.
    """
    data = entry["data"]
    texts = [name for name, value in data.items() if isinstance(value, str)]
    name = field if field in texts else texts[0] if len(texts) == 1 else None
    if name is None:
        what = f"its data has {', '.join(data) or 'nothing'}"
        raise BadRecord("no_text", f"{what}; write field: NAME of the text")
    text = data[name]
    annotations = [item for item in entry["annotations"] if isinstance(item, dict) and not item.get("was_cancelled")]
    if not annotations:
        return text, None
    annotation = next((item for item in annotations if item.get("ground_truth")), annotations[0])
    results = enumerate(annotation.get("result") or [])
    return text, [span for index, result in results for span in _read_result_spans(result, text, f"result[{index}]")]


def _read_result_spans(result: Any, text: str, path: str) -> list[Span]:
    """Return the spans of a result; none for results without spans (a relation, a choice for the text)."""
    value = result.get("value") if isinstance(result, dict) else None
    labels = value.get("labels") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(labels, list) or not labels:
        return []
    start, end, marked_text = value.get("start"), value.get("end"), value.get("text")
    if not isinstance(start, int) or not isinstance(end, int) or not all(isinstance(label, str) for label in labels):
        raise BadRecord("no_span", f"{path} has no start, end and labels; export it again as JSON")
    if isinstance(marked_text, str) and _remove_spaces(text[start:end]) != _remove_spaces(marked_text):
        start, end = _count_characters(text, start), _count_characters(text, end)
        if _remove_spaces(text[start:end]) != _remove_spaces(marked_text):
            what = f"{path} marks {marked_text[:40]!r}, but the text there is {text[start:end][:40]!r}"
            raise BadRecord("span_outside", f"{what}; export the task again, or remove it")
    return [(start, end, label) for label in labels]


def _remove_spaces(text: str) -> str:
    """Return a text without white space, which Label Studio shows folded."""
    return "".join(text.split())


def _count_characters(text: str, units: int) -> int:
    """Return the number of characters in the first `units` UTF-16 code units of a text."""
    return len(text.encode("utf-16-le")[: 2 * units].decode("utf-16-le", "ignore"))


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    if _is_columns(str(path)):
        return CONLL.check(path, source, key, data)
    return check_parquet_rows(path, source, key, data)


ENTITY_ROWS = Format(
    read=read_entities,
    yields=(ENTITIES, WORDS),
    suffixes=(*SUFFIXES, SUFFIX, *COLUMNS),
    has_lines=has_lines,
    check=_check,
)
