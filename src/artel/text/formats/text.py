"""Plain text: a document is a file, a line, or a paragraph between blank lines."""

from __future__ import annotations

from collections.abc import Iterator

from artel.text.formats.format import Format
from artel.text.reading.chapters import Chapters, is_heading
from artel.text.reading.encodings import check_lines, decode, detect_encoding
from artel.text.reading.file_names import with_compressed
from artel.text.reading.lines import read_whole
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Record, Rejected

CUT_CHARACTERS = 4000
"""A long text is cut into documents of this many characters or slightly more: about a thousand tokens."""


def read_text(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield the documents of a text. Lines of a span are numbered from its beginning."""
    if file.source.document in ("auto", "file") and not file.is_cut:
        yield _whole_file(file)
    elif file.source.document == "line":
        yield from _in_chapters(file, _lines(file))
    else:
        yield from _in_chapters(file, _paragraphs(file))


def _in_chapters(file: SourceFile, items: Iterator[Record | Rejected]) -> Iterator[Record | Rejected]:
    """The documents of a text; by chapter, those of each form a group (`validation.by: chapter`)."""
    if not file.data.by_chapter:
        yield from items
        return
    chapters = Chapters(file.path.stat().st_size, file.data.held_out or 0.0)
    for item in items:
        yield item._replace(group=chapters.chapter_of(item.text)) if isinstance(item, Record) else item


def _lines(file: SourceFile) -> Iterator[Record | Rejected]:
    for number, line in file.lines():
        origin = f"{file.origin}:{number}"
        if isinstance(line, BadRecord):
            yield file.reject(origin, line)
        elif line.strip():
            yield Record(line, origin, file.set_name)


def _whole_file(file: SourceFile) -> Record:
    content = read_whole(file.path, file.origin, file.max_bytes)
    encoding = file.source.encoding
    if encoding == "auto":
        encoding = detect_encoding(content)
        file.on_encoding(file.set_name, encoding)
        check_lines(content, encoding)
    return Record(decode(content, encoding), file.origin, file.set_name)


def _paragraphs(file: SourceFile) -> Iterator[Record | Rejected]:
    """Lines joined up to a blank line; of a file that is cut, up to about CUT_CHARACTERS."""
    lines: list[str] = []
    first, length = 1, 0
    try:
        for number, line in file.lines():
            if isinstance(line, BadRecord):
                yield file.reject(f"{file.origin}:{number}", line)
                continue
            if file.is_cut and file.data.by_chapter and lines and is_heading(line):
                yield Record("\n".join(lines), f"{file.origin}:{first}", file.set_name)
                lines = []
            if not lines:
                first, length = number, 0
            if file.is_cut or line.strip():
                lines.append(line)
                length += len(line) + 1
            if file.is_cut:  # preferably at a blank line; without one, at a line end
                is_end = length >= (2 * CUT_CHARACTERS if line.strip() else CUT_CHARACTERS)
            else:
                is_end = not line.strip()
            if is_end and lines:
                yield Record("\n".join(lines), f"{file.origin}:{first}", file.set_name)
                lines = []
    except BadRecord as error:
        yield file.reject(file.origin, error)
    if lines:
        yield Record("\n".join(lines), f"{file.origin}:{first}", file.set_name)


TEXT = Format(
    read=read_text,
    suffixes=(".text", ".md", ".rst", ".tex", ".py", *with_compressed(".txt")),
    is_detected=True,
    is_plain_text=True,
    has_lines=lambda file: file.is_cut or file.source.document in ("line", "paragraph"),
    can_be_divided=lambda source: source.document == "line",
)
