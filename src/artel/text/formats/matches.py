"""Texts that match: queries with positives and negatives, pairs with a score, groups of paraphrases.

Rows of datasets for embeddings and rerankers, as JSON lines, a JSON array, parquet, csv or tsv, with the fields of
- sentence-transformers: `anchor` (`query`, `question`), `positive`, `negative` (`negative_1`, `negative_2`, …).
- FlagEmbedding: `query`, `pos: [...]`, `neg: [...]`.
- pairs with a number: `sentence1`, `sentence2`, `score` (`label`, `similarity_score`); or `query`, `document`, `score`.

In a .json file of SQuAD, each question matches the paragraph that answers it. Other files are plain text: groups of
lines that paraphrase each other, separated by blank lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any

import orjson

from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, describe_fields
from artel.text.formats.parquet import SUFFIX
from artel.text.formats.questions import read_squad
from artel.text.formats.table import TABLE_SUFFIXES, check_objects, read_objects
from artel.text.formats.turns import RowReader
from artel.text.reading.files import file_name, uncompressed_name, with_compressed
from artel.text.reading.lines import read_lines
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import BadRecord, DroppedRecord, Match, Question, Record, Rejected

_QUERY_FIELDS = ("query", "anchor", "question", "sentence1", "sentence_A", "text1")
_POSITIVE_FIELDS = ("positive", "positives", "pos", "document", "passage", "answer", "sentence2", "sentence_B", "text2")
_NEGATIVE_FIELDS = ("negative", "negatives", "neg", "hard_negative", "hard_negatives")
_SCORE_FIELDS = ("score", "label", "similarity_score", "similarity", "relevance", "relatedness_score")
_NUMBERED_FIELD = re.compile(r"(positive|negative|hard_negative)_\d+")
_LIST_SUFFIXES = with_compressed(".txt")
_MAX_GROUP_LINES = 1000
_KNOWN_FIELDS = frozenset((*_QUERY_FIELDS, *_POSITIVE_FIELDS, *_NEGATIVE_FIELDS, *_SCORE_FIELDS))
_ROLE_FIELDS = {"query": _QUERY_FIELDS, "positive": _POSITIVE_FIELDS}


def read_matches(file: SourceFile) -> Items:
    """Yield a record per row, per question of SQuAD, or per group of lines."""
    if not file_name(file.origin).endswith((*SUFFIXES, SUFFIX, *TABLE_SUFFIXES)):
        for is_blank, lines in groupby(file.lines(), key=lambda item: isinstance(item[1], str) and not item[1].strip()):
            if not is_blank:
                yield _group_record(file, list(lines))
    elif _is_squad(file):
        yield from map(_question_record, read_squad(file))
    else:
        yield from _read_rows(file, read_objects(file))


def _read_rows(file: SourceFile, rows: Iterator[tuple[str, Any]]) -> Iterator[Record | Rejected]:
    reader = RowReader(file.source)
    for origin, row in rows:
        try:
            yield _build_record(_parse_match(reader.rename_fields(row), file.key), origin, file.set_name)
        except BadRecord as error:
            yield file.reject(origin, error)


def _build_record(match: Match, origin: str, set_name: str, group: str = "") -> Record:
    """Return the record of a match. Matches of one query go into the same split, unless there is a `group`."""
    return Record("\n".join(match.texts), origin, set_name, match, group=group or match.query)


def _parse_match(row: dict[str, Any], key: str) -> Match:
    """Return the match in a row with renamed fields. Raise BadRecord if it has none. `key`: of its source."""
    queries, positives, negatives = (
        _get_texts(row, names) for names in (_QUERY_FIELDS, _POSITIVE_FIELDS, _NEGATIVE_FIELDS)
    )
    field_names = describe_fields(row)
    if len(queries) > 1:
        raise BadRecord("no_query", f"has {len(queries)} queries (its fields: {field_names}); write a row for each")
    if not queries:
        fix = _suggest_fields(row, key, ["query"] if positives else ["query", "positive"])
        raise BadRecord("no_query", f"has no query (its fields: {field_names}); {fix}")
    if not positives:
        fix = _suggest_fields(row, key, ["positive"])
        raise BadRecord("no_positive", f"has no text that matches the query (its fields: {field_names}); {fix}")
    score = _parse_score(row)
    if score is not None and (len(positives) > 1 or negatives):
        what = f"has a score with {len(positives)} positives and {len(negatives)} negatives"
        raise BadRecord("score_of_several", f"{what}; a score is of a pair: write a row for each")
    if not {*queries, *positives}.isdisjoint(negatives):
        raise BadRecord("positive_is_negative", "has its query or a positive among its negatives; remove it there")
    return Match(queries[0], positives, negatives, score)


def _suggest_fields(row: dict[str, Any], key: str, roles: list[str]) -> str:
    """Return how to name the fields of missing roles: overrides with the fields that have texts but no role."""
    empty = next((name for name in _ROLE_FIELDS[roles[0]] if name in row), None)
    if empty is not None:
        return f"fill in {empty!r}, or remove the row"
    fields = [
        name for name, value in row.items() if isinstance(value, str | list) and value and name not in _KNOWN_FIELDS
    ]
    names = [*fields, *["NAME"] * len(roles)]
    overrides = (shlex.quote(f"{key}.mapping.{role}={name}") for role, name in zip(roles, names, strict=False))
    return f"name {'it' if len(roles) == 1 else 'them'}: {' '.join(overrides)}"


def _get_texts(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the distinct texts of the first of these fields that the row has, and of numbered fields."""
    present_fields = [name for name in names if row.get(name) is not None][:1]
    present_fields += [name for name in row if (match := _NUMBERED_FIELD.fullmatch(name)) and match[1] in names]
    texts: list[str] = []
    for name in present_fields:
        value = [] if row[name] is None else row[name]
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                raise BadRecord("no_text", f"field {name!r} holds {type(text).__name__}, not text; write it in quotes")
            if text.strip():
                texts.append(text)
            elif names is not _NEGATIVE_FIELDS:  # a row without negatives has an empty column of them
                raise BadRecord("empty", f"field {name!r} holds an empty text; fill it in, or remove the row")
    return tuple(dict.fromkeys(texts))


def _parse_score(row: dict[str, Any]) -> float | None:
    """Return the score of a row; None if it has none. Raise BadRecord if it is not a number."""
    name = next((name for name in _SCORE_FIELDS if row.get(name) is not None), None)
    if name is None:
        return None
    value = row[name]
    if isinstance(value, str):  # from csv
        with suppress(ValueError):
            value = float(value.strip().replace(",", "."))
    if not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise BadRecord("bad_score", f"field {name!r} is {row[name]!r}; write a number")
    return float(value)


def _is_squad(file: SourceFile) -> bool:
    """True if a JSON file is one object of articles, not one row per line."""
    if not file_name(file.origin).endswith(with_compressed(".json")):
        return False
    max_bytes = max(file.max_bytes, file.path.stat().st_size)
    lines = read_lines(file.path, file.origin, file.source.encoding, max_bytes)
    first = next((line for _, line in lines if isinstance(line, BadRecord) or line.strip()), "")
    if not isinstance(first, str) or not first.lstrip().startswith("{"):
        return False
    try:
        row = orjson.loads(first)
    except orjson.JSONDecodeError:
        return True  # an object of several lines
    return isinstance(row.get("data"), list)


def _question_record(item: Record | Rejected) -> Record | Rejected | DroppedRecord:
    """Return the record of a question. Questions of one paragraph go into the same split."""
    if isinstance(item, Rejected):
        return item
    assert isinstance(item.fields, Question)
    if not item.fields.answers:
        return DroppedRecord("unanswerable", item.set_name)
    match = Match(item.fields.question, (item.fields.context,))
    return _build_record(match, item.origin, item.set_name, item.fields.context)


def _group_record(file: SourceFile, lines: list[tuple[int, str | BadRecord]]) -> Record | Rejected:
    """Return the record of a group of lines: the first line is the query, the others match it."""
    origin = f"{file.origin}:{lines[0][0]}"
    error = next((line for _, line in lines if isinstance(line, BadRecord)), None)
    texts = tuple(dict.fromkeys(line.strip() for _, line in lines if isinstance(line, str)))
    fix = "write matching texts on consecutive lines, and a blank line between groups"
    if error is None and len(texts) < 2:
        error = BadRecord("no_positive", f"has no line that matches it; {fix}")
    if error is None and len(texts) > _MAX_GROUP_LINES:
        error = BadRecord("group_too_large", f"begins {len(texts):,} lines without a blank one between them; {fix}")
    if error is not None:
        return file.reject(origin, error)
    return _build_record(Match(texts[0], texts[1:]), origin, file.set_name)


MATCHES = Format(
    read=read_matches,
    yields=("matches",),
    suffixes=(*SUFFIXES, SUFFIX, *TABLE_SUFFIXES, *_LIST_SUFFIXES),
    has_lines=lambda file: not uncompressed_name(file.origin).endswith(SUFFIX),
    check=check_objects,
)
