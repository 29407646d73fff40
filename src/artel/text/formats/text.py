"""Plain text: a document is a file, a line, or a paragraph between blank lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import dropwhile, islice
from pathlib import Path

import orjson

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.messages import Phrase
from artel.registry import FORMATS
from artel.text.formats.format import Format
from artel.text.reading.encodings import check_lines, decode, detect_encoding
from artel.text.reading.files import file_name, uncompressed_name, with_compressed
from artel.text.reading.lines import read_full
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Record, Rejected
from artel.text.split import Chapters, is_heading

CUT_CHARACTERS = 4000
"""Long texts are cut into documents of this many characters or slightly more: about a thousand tokens."""
_GUTENBERG_START = re.compile(r"\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG EBOOK", re.IGNORECASE)
"""The mark between the header of Project Gutenberg and the work. A long title breaks it over two lines."""
_GUTENBERG_END = re.compile(r"\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG EBOOK", re.IGNORECASE)
_FRAMES = (
    (
        _GUTENBERG_START,
        Phrase("Project Gutenberg's header and licence, which are learned: write profile: gutenberg in the source"),
    ),
    (
        re.compile(r'<doc id="[^"]*" (?:revid="[^"]*" )?url="'),
        Phrase(
            "WikiExtractor's <doc> tags, which are learned: extract with --json, and write format: jsonl in the source"
        ),
    ),
)
"""Frames that tools and sites write around a text, and how to remove them."""
_MAX_GUTENBERG_HEADER_LINES = 500
"""Number of lines that are searched for the mark."""
_HEAD_BYTES = 1 << 16
"""Bytes of a file in which JSON, XML and carriage returns are detected."""

Lines = Iterable[tuple[int, str | BadRecord]]


def read_text(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield the documents of a text. A span numbers its lines from 1."""
    if file.source.document in ("auto", "file") and not file.is_cut:
        yield _read_file(file)
    elif file.source.document == "line":
        yield from _group_by_chapter(file, _read_lines(file))
    else:
        yield from _group_by_chapter(file, _read_paragraphs(file))


def _group_by_chapter(file: SourceFile, items: Iterator[Record | Rejected]) -> Iterator[Record | Rejected]:
    """Yield the documents; with `validation.by: chapter`, those of a chapter form a group."""
    if not file.data.splits_by_chapter:
        yield from items
        return
    chapters = Chapters(file.path.stat().st_size, file.data.held_out or 0.0)
    for item in items:
        yield item._replace(group=chapters.assign_chapter(item.text)) if isinstance(item, Record) else item


def _read_lines(file: SourceFile) -> Iterator[Record | Rejected]:
    for line_number, line in _read_work_lines(file):
        origin = f"{file.origin}:{line_number}"
        if isinstance(line, BadRecord):
            yield file.reject(origin, line)
        elif line.strip():
            yield Record(line, origin, file.set_name)


def frame_notes(records: Iterable[Record]) -> list[str]:
    """Return a note for the user about each kind of frame in the texts, with its first occurrence."""
    notes: dict[str, str] = {}
    for record in records:
        for mark, frame in _FRAMES:
            if frame not in notes and mark.search(record.text):
                notes[frame] = Phrase("{place} holds {frame}", place=record.origin, frame=frame)
    return list(notes.values())


def _read_file(file: SourceFile) -> Record:
    content = read_full(file.path, file.origin, file.max_bytes)
    encoding = file.source.encoding
    if encoding == "auto":
        encoding = detect_encoding(content)
        file.on_encoding(file.set_name, encoding)
        check_lines(content, encoding)
    text = decode(content, encoding)
    if file.source.profile == "gutenberg":
        text = "\n".join(
            line for _, line in _remove_gutenberg_frame(enumerate(text.split("\n"), 1)) if isinstance(line, str)
        )
    return Record(text, file.origin, file.set_name)


def _read_work_lines(file: SourceFile) -> Lines:
    return _remove_gutenberg_frame(file.lines()) if file.source.profile == "gutenberg" else file.lines()


def _remove_gutenberg_frame(lines: Lines) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the lines between the Project Gutenberg header and licence; all lines of a text without the marks."""
    remaining = iter(lines)
    header: list[tuple[int, str | BadRecord]] = []
    for item in islice(remaining, _MAX_GUTENBERG_HEADER_LINES):
        header.append(item)
        if isinstance(item[1], str) and _GUTENBERG_START.search(item[1]):
            header = []
            if not item[1].rstrip().endswith("***"):  # a long title
                next((line for _, line in remaining if str(line).rstrip().endswith("***")), None)
            remaining = dropwhile(lambda item: isinstance(item[1], str) and not item[1].strip(), remaining)
            break
    yield from header
    for line_number, line in remaining:
        if isinstance(line, str) and _GUTENBERG_END.search(line):
            return
        yield line_number, line


def _read_paragraphs(file: SourceFile) -> Iterator[Record | Rejected]:
    """Join lines up to a blank line; if the file is cut, up to about CUT_CHARACTERS."""
    lines: list[str] = []
    first_line, num_characters = 1, 0
    try:
        for line_number, line in _read_work_lines(file):
            if isinstance(line, BadRecord):
                yield file.reject(f"{file.origin}:{line_number}", line)
                continue
            if file.is_cut and file.data.splits_by_chapter and lines and is_heading(line):
                yield Record("\n".join(lines), f"{file.origin}:{first_line}", file.set_name)
                lines = []
            if not lines:
                first_line, num_characters = line_number, 0
            if file.is_cut or line.strip():
                lines.append(line)
                num_characters += len(line) + 1
            if file.is_cut:  # preferably at a blank line, else at a line end
                is_end = num_characters >= (2 * CUT_CHARACTERS if line.strip() else CUT_CHARACTERS)
            else:
                is_end = not line.strip()
            if is_end and lines:
                yield Record("\n".join(lines), f"{file.origin}:{first_line}", file.set_name)
                lines = []
    except BadRecord as error:
        yield file.reject(file.origin, error)
    if lines:
        yield Record("\n".join(lines), f"{file.origin}:{first_line}", file.set_name)


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return the problems of a file: JSON lines or XML, which would be learned, or lines that end with CR."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    has_lines = source.document in ("line", "paragraph") and uncompressed_name(path.name) == file_name(path.name)
    if has_lines and b"\r" in head and b"\n" not in head:
        fix = f"write them with line feeds: tr '\\r' '\\n' < {shlex.quote(str(path))} > NEW.txt"
        return [Problem(f"{key}.path", f"{path} has carriage returns as line ends, like files of old Macs", fix)]
    if not FORMATS[source.format].goes_by_suffix:
        return []
    if uncompressed_name(path.name).endswith(".xml") or head.lstrip(b"\xef\xbb\xbf \r\n").startswith(b"<?xml"):
        fix = "extract its texts (a dump of Wikipedia: wikiextractor --json); or write format: text, to learn the XML"
        return [Problem(f"{key}.format", f"{path} holds XML, not text", fix)]
    lines = [line for line in head.splitlines()[:3] if line.strip()][:2]
    with suppress(orjson.JSONDecodeError):
        if lines and all(isinstance(orjson.loads(line), dict) for line in lines):
            fix = "write format: jsonl and field: NAME; or format: text, to learn the JSON itself"
            return [Problem(f"{key}.format", f"{path} holds JSON lines, not text", fix)]
    return []


TEXT = Format(
    read=read_text,
    suffixes=(".text", ".md", ".rst", ".tex", ".py", *with_compressed(".txt")),
    is_detected=True,
    is_plain_text=True,
    has_lines=lambda file: file.is_cut or file.source.document in ("line", "paragraph"),
    can_be_divided=lambda source: source.document == "line" and source.profile == "none",
    check=_check,
)
