"""Plain text: a document is a file, a line, or what blank lines separate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.reading.encodings import NotText, check_lines, decode, detect_encoding
from artel.text.reading.lines import BadLine, Note, Span, read_lines, read_whole
from artel.text.records import Record, Rejected

CUT_CHARACTERS = 4000
"""A long text is cut into documents of as many characters, or a few more: about a thousand tokens."""


def read_text(
    file: Path,
    origin: str,
    set_name: str,
    source: SourceConfig,
    data: DataConfig,
    note: Note,
    *,
    span: Span | None = None,
    is_cut: bool = False,
) -> Iterator[Record | Rejected]:
    """`span` is for documents that are lines: they are numbered from its beginning. `is_cut`: the file is long, and
    read as several documents (`document: auto`). `note` is called with the encoding guessed of a file that is one."""
    if source.document in ("auto", "file") and not is_cut:
        try:
            content = read_whole(file, origin, data.max_document)
            encoding = source.encoding if source.encoding != "auto" else detect_encoding(content)
            if source.encoding == "auto":
                note(set_name, encoding)
                check_lines(content, encoding)
            yield Record(decode(content, encoding), origin, set_name)
        except NotText as error:
            yield Rejected(origin, error.reason, error.detail, set_name)
        return
    paragraph: list[str] = []
    first, length = 1, 0
    try:
        for number, line in read_lines(file, origin, source.encoding, data.max_document, span):
            if isinstance(line, BadLine):
                yield Rejected(f"{origin}:{number}", line.reason, line.detail, set_name)
            elif source.document == "line":
                if line.strip():  # the blank lines between documents are no documents
                    yield Record(line, f"{origin}:{number}", set_name)
            elif is_cut:
                first, length = (first, length) if paragraph else (number, 0)
                paragraph.append(line)
                length += len(line) + 1
                # Where no blank line comes, a line end will do.
                if length >= (2 * CUT_CHARACTERS if line.strip() else CUT_CHARACTERS):
                    yield Record("\n".join(paragraph), f"{origin}:{first}", set_name)
                    paragraph = []
            elif line.strip():
                first = first if paragraph else number
                paragraph.append(line)
            elif paragraph:
                yield Record("\n".join(paragraph), f"{origin}:{first}", set_name)
                paragraph = []
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)
    if paragraph:
        yield Record("\n".join(paragraph), f"{origin}:{first}", set_name)
