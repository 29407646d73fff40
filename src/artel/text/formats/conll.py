"""CoNLL columns: one word per line with its tags, an empty line after a sentence, -DOCSTART- before a document.

Reads Tjong Kim Sang and De Meulder 2003 (entities in the last column), and files of Universal Dependencies (.conllu),
with the part of speech unless `tags` names another column. A record is a sentence. Sentences of a document go into the
same split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.text.formats.format import Format
from artel.text.reading.files import file_name, with_compressed
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Record, Rejected
from artel.text.tags import ENTITIES, WORDS, build_tagged_record, join_tagged_words

COLUMNS = with_compressed(".conll", ".conllu", ".bio", ".iob")
"""Suffixes of files that are read as columns, whatever the format of their source."""
_UNIVERSAL_SUFFIXES = with_compressed(".conllu")
_DOCUMENT_START = "-DOCSTART-"
# Columns of Universal Dependencies: https://universaldependencies.org/format.html
_FORM, _UPOS, _MISC, _NUM_COLUMNS = 1, 3, 9, 10


@dataclass(slots=True)
class _Sentence:
    """The lines of a sentence, or its first error."""

    line_number: int
    """The number of its first line."""
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    """(line number, columns)."""
    first_error: tuple[int, BadRecord] | None = None


def read_conll(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per sentence. Its origin is the line of the first word."""
    is_universal = file_name(file.origin).endswith(_UNIVERSAL_SUFFIXES)
    in_document, group = False, ""
    for sentence in _read_sentences(file, is_universal):
        if sentence.first_error is None and sentence.rows and sentence.rows[0][1][0] == _DOCUMENT_START:
            in_document, group = True, ""
            continue
        origin = f"{file.origin}:{sentence.line_number}"
        try:
            if sentence.first_error is not None:
                origin = f"{file.origin}:{sentence.first_error[0]}"
                raise sentence.first_error[1]
            if not sentence.rows:
                raise BadRecord("no_words", "the sentence has no words; add some, or remove it")
            for line_number, row in sentence.rows:
                origin = f"{file.origin}:{line_number}"
                _check_columns(row, sentence.rows[0][1], file.source)
            origin = f"{file.origin}:{sentence.line_number}"
            record = _build_record(sentence, file, origin, is_universal=is_universal)
        except BadRecord as error:
            yield file.reject(origin, error)
            continue
        group = group or record.text
        yield record._replace(group=group) if in_document else record


def _build_record(sentence: _Sentence, file: SourceFile, origin: str, *, is_universal: bool) -> Record:
    source = file.source
    rows = [row for _, row in sentence.rows]
    word = int(source.words or (_FORM if is_universal else 0))
    tag = int(source.tags or (_UPOS if is_universal else -1))
    spaces = None
    if is_universal and len(rows[0]) == _NUM_COLUMNS:
        spaces = ["SpaceAfter=No" not in row[_MISC].split("|") for row in rows]
    text, spans = join_tagged_words([row[word] for row in rows], [row[tag] for row in rows], source.yields, spaces)
    return build_tagged_record(text, spans, origin, file.set_name)


def _check_columns(row: list[str], first_row: list[str], source: SourceConfig) -> None:
    if len(row) != len(first_row):
        what = f"has {len(row)} columns, but the sentence began with {len(first_row)}"
        raise BadRecord("unequal_columns", f"{what}; add the missing columns, or an empty line between sentences")
    columns = [int(column) for column in (source.words, source.tags) if column]
    min_columns = max([2, *(column + 1 if column >= 0 else -column for column in columns)])
    if len(row) < min_columns:
        what = f"has {len(row)} column{'s' * (len(row) > 1)} but needs {min_columns}: a word and its tag"
        raise BadRecord("unequal_columns", f"{what}; separate them by spaces or tabs, or write words and tags: NUMBER")


def _read_sentences(file: SourceFile, is_universal: bool) -> Iterator[_Sentence]:
    sentence: _Sentence | None = None
    for line_number, line in file.lines():
        if not isinstance(line, BadRecord) and not line.strip():
            if sentence is not None:
                yield _remove_comments(sentence)
            sentence = None
            continue
        if isinstance(line, str) and is_universal and line.startswith("#"):
            continue
        sentence = sentence or _Sentence(line_number)
        if isinstance(line, BadRecord):
            sentence.first_error = sentence.first_error or (line_number, line)
            continue
        row = line.split("\t") if "\t" in line else [column for column in line.split(" ") if column]
        if row and row[0] == _DOCUMENT_START and not sentence.rows:  # some files have no empty line after it
            yield _Sentence(line_number, [(line_number, row)])
            sentence = None
        elif not (is_universal and ("-" in row[0] or "." in row[0])):  # a range of words, or an empty word
            sentence.rows.append((line_number, row))
    if sentence is not None:
        yield _remove_comments(sentence)


def _remove_comments(sentence: _Sentence) -> _Sentence:
    """Return the sentence without leading lines like `# id 5`, which have other columns than its words."""
    rows = sentence.rows
    while len(rows) > 1 and rows[0][1][0].startswith("#") and len(rows[0][1]) != len(rows[-1][1]):
        rows = rows[1:]
    line_number = rows[0][0] if rows else sentence.line_number
    return _Sentence(line_number, rows, sentence.first_error)


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return problems of columns that are not numbers, and of parts of speech read as entities."""
    problems = []
    if file_name(str(path)).endswith(_UNIVERSAL_SUFFIXES) and not source.tags and source.yields != WORDS:
        what = f"{path} is from Universal Dependencies, with a tag for each word"
        problems.append(Problem(f"{key}.kind", what, "write kind: words, or tags: NUMBER of a column with names"))
    return problems + [
        Problem(f"{key}.{name}", f"{setting!r} is not a column of conll", "use its number: 0 is the first, -1 the last")
        for name, setting in (("words", source.words), ("tags", source.tags))
        if setting and not setting.removeprefix("-").isdecimal()
    ]


CONLL = Format(
    read=read_conll,
    yields=(ENTITIES, WORDS),
    suffixes=(*COLUMNS, ".txt", ".tsv"),
    has_lines=lambda file: True,
    check=_check,
)
