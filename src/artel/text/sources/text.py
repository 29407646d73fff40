"""Plain text: a document is a file, a line, or what blank lines separate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.encodings import NotText, decode
from artel.text.records import Record, Rejected
from artel.text.sources.lines import BadLine, Span, read_lines, read_whole


def read_text(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig, *, span: Span | None = None
) -> Iterator[Record | Rejected]:
    """`span` is for documents that are lines: they are numbered from its beginning."""
    if source.document == "file":
        try:
            content = read_whole(file, origin, data.max_document)
            yield Record(decode(content, source.encoding), origin, set_name)
        except NotText as error:
            yield Rejected(origin, error.reason, error.detail, set_name)
        return
    paragraph: list[str] = []
    first = 1
    try:
        for number, line in read_lines(file, origin, source.encoding, data.max_document, span):
            if isinstance(line, BadLine):
                yield Rejected(f"{origin}:{number}", line.reason, line.detail, set_name)
            elif source.document == "line":
                if line.strip():  # the blank lines between documents are no documents
                    yield Record(line, f"{origin}:{number}", set_name)
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
