"""Web pages: each page is a document, or each of its lines is."""

from __future__ import annotations

from artel.text.cleaning.html import html_to_text, page_source
from artel.text.cleaning.main_text import main_text
from artel.text.formats.format import Format
from artel.text.reading.lines import read_whole
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import Dropped, Record


def read_html(file: SourceFile) -> Items:
    yield from records_of_page(read_whole(file.path, file.origin, file.max_bytes), file.content_type, file.origin, file)


def records_of_page(page: bytes, content_type: str, origin: str, file: SourceFile) -> Items:
    """The records of a page of `file`; one Dropped if `extract: main` finds no main text. Raises BadRecord."""
    source = file.source
    if source.extract == "main":
        text = main_text(page_source(page, content_type, source.profile, source.encoding), origin)
        if not text:
            yield Dropped("no_main_text", file.set_name)
            return
    else:
        text = html_to_text(page, content_type, source.profile, source.encoding)
    yield from records_of_text(text, origin, file)


def records_of_text(text: str, origin: str, file: SourceFile) -> Items:
    """The text as one record, or as one per line: its lines are the paragraphs of the page."""
    if file.source.document in ("auto", "file"):
        yield Record(text, origin, file.set_name)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Record(line, f"{origin}:{number}", file.set_name)


HTML = Format(read=read_html, suffixes=(".html", ".htm", ".xhtml", ".shtml"), is_detected=True, is_pages=True)
