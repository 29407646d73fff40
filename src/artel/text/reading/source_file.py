"""One local file of a source, as the readers of all formats receive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text.reading.lines import Span, read_lines
from artel.text.records import BadRecord, DroppedRecord, Record, Rejected

Items = Iterator[Record | Rejected | DroppedRecord]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the settings for reading it."""

    path: Path
    origin: str
    """Its name in messages and in the origins of its records: a path, a URL or a remote address, without secrets."""
    set_name: str
    source: SourceConfig
    data: DataConfig
    content_type: str = ""
    """The Content-Type header that it was downloaded with."""
    span: Span | None = None
    """The lines to read, numbered from 1; None for the whole file."""
    is_cut: bool = False
    """True if a long text is read as several documents (`document: auto`)."""
    on_encoding: Callable[[str, str], object] = lambda set_name, encoding: None
    """Called with the name of the set and the encoding, if the encoding is detected."""
    key: str = "data.sources.0"
    """The key of its source in the run file, for messages. Validation texts have the key of the first source."""

    @property
    def max_bytes(self) -> int:
        """The maximum size of a record or line in bytes (data.max_document)."""
        return self.data.max_document

    def lines(self) -> Iterator[tuple[int, str | BadRecord]]:
        """Yield the lines of the file (`read_lines`)."""
        return read_lines(self.path, self.origin, self.source.encoding, self.max_bytes, self.span)

    def text(self, max_bytes: int, fix: str) -> str:
        """Return the text of a file that is parsed as a whole, with line feeds as line ends.

        Raise BadRecord for a line that cannot be read, InputError with `fix` for more than `max_bytes` characters.
        """
        lines: list[str] = []
        num_characters = 0
        for line_number, line in read_lines(self.path, self.origin, self.source.encoding, max_bytes):
            if isinstance(line, BadRecord):
                raise BadRecord(line.reason, f"line {line_number}: {line.detail}")
            lines.append(line)
            num_characters += len(line) + 1
            if num_characters > max_bytes + 1:
                what = f"is over {max_bytes:,} characters (data.max_document), but must be parsed as a whole"
                raise InputError.at(self.origin, what, fix)
        return "\n".join(lines)

    def reject(self, origin: str, error: BadRecord) -> Rejected:
        return Rejected(origin, error.reason, error.detail, self.set_name)


def settings_key(key: str) -> str:
    """Return the key of the settings of the source at `key`: validation texts are read like the first source."""
    return "data.sources.0" if key == "data.validation" else key


def column_fix(key: str, source_key: str) -> str:
    """Return the fix that names a column or field by `key` of the source at `source_key`."""
    return f"{key}: NAME, or {source_key}.{key}=NAME on the command line"
