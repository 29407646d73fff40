"""Web pages: a page is a document, or each of its lines or paragraphs is."""

from __future__ import annotations

from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.cleaning.html import html_to_text, page_source
from artel.text.cleaning.main_text import main_text
from artel.text.reading.encodings import NotText
from artel.text.reading.lines import read_whole
from artel.text.reading.rows import Items
from artel.text.records import Dropped, Record, Rejected


def read_html(
    file: Path, origin: str, content_type: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Items:
    try:
        page = read_whole(file, origin, data.max_document)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)
        return
    yield from records_of_page(page, content_type, origin, set_name, source)


def records_of_page(data: bytes, content_type: str, origin: str, set_name: str, source: SourceConfig) -> Items:
    """The records of a page; a page in which no main text is found, where that is asked for, is a dropped one."""
    try:
        if source.extract == "main":
            text = main_text(page_source(data, content_type, source.profile, source.encoding), origin)
            if not text:
                yield Dropped("no_main_text", set_name)
                return
        else:
            text = html_to_text(data, content_type, source.profile, source.encoding)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)
        return
    yield from records_of_text(text, origin, set_name, source)


def records_of_text(text: str, origin: str, set_name: str, source: SourceConfig) -> Items:
    """The text as one record, or one of each of its lines: they are its paragraphs."""
    if source.document in ("auto", "file"):
        yield Record(text, origin, set_name)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Record(line, f"{origin}:{number}", set_name)
