"""Web pages: a page is a document, or each of its lines or paragraphs is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artel.config import SourceConfig
from artel.text.encodings import NotText
from artel.text.html import html_to_text
from artel.text.records import Record, Rejected


def read_html(
    file: Path, origin: str, content_type: str, set_name: str, source: SourceConfig
) -> Iterator[Record | Rejected]:
    try:
        text = html_to_text(file.read_bytes(), content_type, source.profile, source.encoding)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)
        return
    if source.document == "file":
        yield Record(text, origin, set_name)
        return
    for number, line in enumerate(
        text.split("\n"), 1
    ):  # a page's text has no blank lines: its lines are its paragraphs
        if line.strip():
            yield Record(line, f"{origin}:{number}", set_name)
