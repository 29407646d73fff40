"""What a format declares: how its files are recognized and read, and what their records are.

Each format is declared in its own file in this folder, and is a line of the table in `artel.registry`. `format: auto`
is here: it reads each file by its suffix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.registry import FORMATS
from artel.text.reading.files import file_name, is_url
from artel.text.reading.source_file import Items, SourceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """All that the other rooms know of a format."""

    read: Callable[[SourceFile], Items]
    """The records of a file. What cannot be read is a Rejected item; BadRecord rejects the whole file."""
    yields: tuple[str, ...] = ("text",)
    """Kinds of its records. If there are several, `kind` of the source selects one."""
    suffixes: tuple[str, ...] = ()
    """A folder is searched for files with these."""
    is_detected: bool = False
    """True if `format: auto` recognizes it by these suffixes."""
    goes_by_suffix: bool = False
    """True if it only stands for the format that each file's suffix tells."""
    has_files: bool = True
    """False if its records are generated."""
    is_plain_text: bool = False
    """True if a file is one document, or can be cut into several (`document`)."""
    is_by_folder: bool = False
    """True if it reads plain text, too, and its folder says what it is."""
    is_pages: bool = False
    """True if its files are web pages (`extract`)."""
    is_table: bool = False
    """True if a header names its columns."""
    names_sets: bool = False
    """True if a field or column can name the set of a record (`set_field`)."""
    converters: tuple[str, ...] = ()
    """Forms of rows that `converter` names: the files have rows of JSON or parquet."""
    counts_words: bool = False
    """True if the official predictions for it count in words."""
    has_lines: Callable[[SourceFile], bool] = lambda file: False
    """True for a file of lines, whose encoding is detected before it is read."""
    can_be_divided: Callable[[SourceConfig], bool] = lambda source: False
    """True if several workers may read spans of a large file."""
    check: Callable[[Path, SourceConfig, str, DataConfig], list[Problem]] = lambda path, source, key, data: []
    """What is wrong with a file before it is read (a missing column); `key` is the source's key in the run file."""


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
