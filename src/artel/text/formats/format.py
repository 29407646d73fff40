"""Declaration of a format: how to recognize and read its files, and the kinds of its records.

Each format has its own file in this folder and a line in `artel.registry`. `format: auto`, which reads each file by its
suffix, is in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.registry import FORMATS
from artel.text.reading.files import COMPRESSED_SUFFIXES, file_name, is_url
from artel.text.reading.source_file import Items, SourceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The declaration of a format."""

    read: Callable[[SourceFile], Items]
    """Yield the records of a file, and a Rejected for each unreadable record. Raise BadRecord to reject the file."""
    yields: tuple[str, ...] = ("text",)
    """The kinds of its records. If there are several, `kind` of the source selects one."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of the files that are read in a folder."""
    is_detected: bool = False
    """True if `format: auto` recognizes it by these suffixes."""
    goes_by_suffix: bool = False
    """True if the suffix of each file selects the actual format."""
    has_files: bool = True
    """False if its records are generated."""
    version: Callable[[], str] = lambda: ""
    """Return the version of the package that generates its records. It is part of the store's key."""
    is_plain_text: bool = False
    """True if a file is one document, or can be cut into several (`document`)."""
    is_by_folder: bool = False
    """True if it also reads plain text files, labeled by the names of their folders."""
    is_pages: bool = False
    """True if its files are web pages (`extract`)."""
    is_table: bool = False
    """True if a header names its columns."""
    names_sets: bool = False
    """True if a field or column can name the set of a record (`set_field`)."""
    converters: tuple[str, ...] = ()
    """Values of `converter`: forms of rows of JSON or parquet."""
    counts_words: bool = False
    """True if its official format of predictions counts in words."""
    description: str = ""
    """Description of the format in the help of `data.sources.format`."""
    has_lines: Callable[[SourceFile], bool] = lambda file: False
    """True for a file of lines. Its encoding is detected before it is read."""
    can_be_divided: Callable[[SourceConfig], bool] = lambda source: False
    """True if several workers may read spans of a large file."""
    check: Callable[[Path, SourceConfig, str, DataConfig], list[Problem]] = lambda path, source, key, data: []
    """Return the problems of a file before it is read (a missing column), or of a source without files, whose path is
    empty. `key`: the source in the run file."""

    @property
    def summary(self) -> str:
        """Its suffixes, without those of compressed files, and its description."""
        suffixes = " ".join(suffix for suffix in self.suffixes if not suffix.endswith(COMPRESSED_SUFFIXES))
        return ": ".join(filter(None, (suffixes, self.description)))


def choose_format(source: SourceConfig, origin: str, content_type: str = "") -> Format:
    """Return the format of a file: of the source, else by suffix, else text. URLs without a known suffix are pages."""
    source_format: Format = FORMATS[source.format]
    if not source_format.goes_by_suffix:
        return source_format
    name = file_name(origin)
    by_suffix = next((format for format in detected_formats() if name.endswith(format.suffixes)), None)
    is_page = is_url(origin) and not content_type.startswith("text/plain")
    return by_suffix or FORMATS["html" if is_page else "text"]


def detected_formats() -> list[Format]:
    """Return the formats that are recognized by their suffixes, in the order of the registry."""
    return [format for format in map(FORMATS.__getitem__, FORMATS.names) if format.is_detected]


AUTO = Format(
    read=lambda file: choose_format(file.source, file.origin, file.content_type).read(file),
    goes_by_suffix=True,
    is_pages=True,
    is_plain_text=True,
    names_sets=True,
)
