"""`format: auto`: each file is read as its suffix says."""

from __future__ import annotations

from artel.config import SourceConfig
from artel.registry import FORMATS
from artel.text.formats.format import Format
from artel.text.reading.file_names import file_name, is_url
from artel.text.reading.source_file import Items, SourceFile


def format_of(source: SourceConfig, origin: str, content_type: str = "") -> Format:
    """The format of a file: the source's, else by suffix, else text. A URL without a known suffix is a page."""
    declared: Format = FORMATS[source.format]
    if not declared.goes_by_suffix:
        return declared
    name = file_name(origin)
    by_suffix = next((format for format in detected_formats() if name.endswith(format.suffixes)), None)
    is_page = is_url(origin) and not content_type.startswith("text/plain")
    return by_suffix or FORMATS["html" if is_page else "text"]


def detected_formats() -> list[Format]:
    """The formats that are recognized by their suffixes, in the order of the table."""
    return [format for format in map(FORMATS.__getitem__, FORMATS.names) if format.is_detected]


def _read(file: SourceFile) -> Items:
    return format_of(file.source, file.origin, file.content_type).read(file)


AUTO = Format(read=_read, goes_by_suffix=True, is_pages=True, is_plain_text=True, names_sets=True)
