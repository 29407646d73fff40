"""ZIP archives that contain one document, such as .epub and .docx, and their XML."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.parsers import expat

from artel.text.records import BadRecord

Attributes = dict[str, str]
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # all that the two formats allow; others unpack without a limit


class Archive:
    """A ZIP archive. Its members together may unpack to `max_bytes`."""

    def __init__(self, file: zipfile.ZipFile, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._left = max_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._file.NameToInfo

    def read(self, name: str) -> bytes:
        """Return the content of a member. Raise BadRecord if it is missing, encrypted, damaged or too large."""
        if name not in self:
            raise BadRecord("incomplete", f"has no {name}; save or download it again")
        member = self._file.NameToInfo[name]
        if member.flag_bits & 1:
            raise BadRecord("encrypted", "is encrypted; save it without a password")
        if member.compress_type not in _METHODS:
            raise BadRecord("unreadable", f"{name} is not packed by deflate; pack it again")
        with self._file.open(member) as stream:
            content = stream.read(self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise BadRecord(
                "too_large", f"unpacks to over {self._max_bytes:,} bytes, more than data.max_document allows"
            )
        return content


@contextmanager
def open_archive(path: Path, kind: str, max_bytes: int) -> Iterator[Archive]:
    """Open an archive. Inside the block, raise BadRecord for whatever is damaged in it."""
    try:
        with zipfile.ZipFile(path) as file:
            yield Archive(file, max_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError) as error:
        raise BadRecord("damaged", f"is not a valid {kind}: {error}; save or download it again") from None


def parse_xml(content: bytes, name: str, **handlers: Callable[..., object]) -> None:
    """Parse XML with handlers of `expat`; names have no prefix. Raise BadRecord for broken XML and for any entity.

    An external entity would read another file, nested ones unpack to gigabytes. Neither format needs any.
    """
    parser = expat.ParserCreate(namespace_separator=" ")
    for event, handler in handlers.items():
        setattr(parser, event, handler)

    def refuse(*_: object) -> None:
        raise BadRecord("entities", f"{name} declares entities, which are not read; save it again")

    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, UnicodeError, LookupError, ValueError) as error:
        raise BadRecord("bad_xml", f"{name} is not valid XML: {error}; save it again") from None


def elements(content: bytes, name: str) -> Iterator[tuple[str, Attributes]]:
    """Yield (name, attributes) of all elements, both without prefixes."""
    found: list[tuple[str, Attributes]] = []

    def start(element: str, attributes: Attributes) -> None:
        found.append((local_name(element), {local_name(key): value for key, value in attributes.items()}))

    parse_xml(content, name, StartElementHandler=start)
    yield from found


def local_name(name: str) -> str:
    return name.rpartition(" ")[2]
