"""Documents in ZIP archives: Word documents (.docx) and e-books in EPUB.

DOCX: ECMA-376, part 1 (WordprocessingML). The text of paragraphs and of tables, cell by cell, in the order of the
document. Headers, footers, notes, comments and deleted text are skipped.
EPUB: https://www.w3.org/TR/epub-33/. A document for each chapter, in reading order. Pages that are pictures (SVG) are
skipped.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote
from xml.parsers import expat

from artel.text.formats.format import Format
from artel.text.formats.pages import read_page_records, split_text_records
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import BadRecord

Attributes = dict[str, str]
# All methods that the two formats allow. Other methods unpack without a limit.
_COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_OLE_MAGIC = b"\xd0\xcf\x11\xe0"  # the container of .doc files and of encrypted documents
_RELATIONS_FILE = "_rels/.rels"
_BREAKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_CONTAINER_FILE, _ENCRYPTION_FILE = "META-INF/container.xml", "META-INF/encryption.xml"
_PAGE_TYPE = "application/xhtml+xml"
# In XHTML <title/> is an empty element. The page is read as HTML, where it would hide the text after it.
_EMPTY_ELEMENT = re.compile(
    rb"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)([A-Za-z]\w*)((?:\s[^<>]*)?)/>"
)


class _Archive:
    """A ZIP archive. Its members together may unpack to `max_bytes`."""

    def __init__(self, file: zipfile.ZipFile, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._bytes_left = max_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._file.NameToInfo

    def read(self, name: str) -> bytes:
        """Return the content of a member. Raise BadRecord if it is missing, encrypted, damaged or too large."""
        if name not in self:
            raise BadRecord("incomplete", f"has no {name}; save or download it again")
        member = self._file.NameToInfo[name]
        if member.flag_bits & 1:
            raise BadRecord("encrypted", "is encrypted; save it without a password")
        if member.compress_type not in _COMPRESSION_METHODS:
            raise BadRecord("unreadable", f"{name} is not packed by deflate; pack it again")
        with self._file.open(member) as stream:
            content = stream.read(self._bytes_left + 1)
        self._bytes_left -= len(content)
        if self._bytes_left < 0:
            what = f"unpacks to over {self._max_bytes:,} bytes, more than data.max_document allows"
            raise BadRecord("too_large", what)
        return content


@contextmanager
def _open_archive(path: Path, kind: str, max_bytes: int) -> Iterator[_Archive]:
    """Open an archive. Inside the block, raise BadRecord if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            yield _Archive(file, max_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError) as error:
        raise BadRecord("damaged", f"is not a valid {kind}: {error}; save or download it again") from None


def _parse_xml(content: bytes, name: str, **handlers: Callable[..., object]) -> None:
    """Parse XML with handlers of `expat`; names have no prefix. Raise BadRecord for broken XML and for any entity.

    An external entity would read another file, nested ones unpack to gigabytes. Neither format needs any.
    """
    parser = expat.ParserCreate(namespace_separator=" ")
    for event, handler in handlers.items():
        setattr(parser, event, handler)

    def reject_entity(*_: object) -> None:
        raise BadRecord("entities", f"{name} declares entities, which are not read; save it again")

    parser.EntityDeclHandler = reject_entity
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, UnicodeError, LookupError, ValueError) as error:
        raise BadRecord("bad_xml", f"{name} is not valid XML: {error}; save it again") from None


def _parse_elements(content: bytes, name: str) -> Iterator[tuple[str, Attributes]]:
    """Yield (name, attributes) of all elements, both without prefixes."""
    elements: list[tuple[str, Attributes]] = []

    def start(element: str, attributes: Attributes) -> None:
        elements.append((_local_name(element), {_local_name(key): value for key, value in attributes.items()}))

    _parse_xml(content, name, StartElementHandler=start)
    yield from elements


def _local_name(name: str) -> str:
    return name.rpartition(" ")[2]


def read_docx(file: SourceFile) -> Items:
    """Yield the document as one record, or a record for each paragraph (`document: line`)."""
    with file.path.open("rb") as stream:
        if stream.read(len(_OLE_MAGIC)) == _OLE_MAGIC:
            raise BadRecord("encrypted", "is encrypted, or a .doc; save it as .docx without a password")
    with _open_archive(file.path, "DOCX", file.max_bytes) as document:
        relations = _parse_elements(document.read(_RELATIONS_FILE), _RELATIONS_FILE)
        targets = (
            attributes.get("Target", "")
            for _, attributes in relations
            if attributes.get("Type", "").endswith("/officeDocument")
        )
        name = next(targets, "word/document.xml").lstrip("/")
        text = "\n".join(line for line in _read_paragraphs(document.read(name), name) if line.strip())
    yield from split_text_records(text, file.origin, file)


def _read_paragraphs(content: bytes, name: str) -> list[str]:
    paragraphs: list[str] = []
    open_paragraphs: list[list[str]] = []  # a text box is a paragraph within one
    open_elements: list[str] = []
    fallbacks = 0  # what old versions of Word show in place of a drawing: the same text once more

    def start(element: str, attributes: Attributes) -> None:
        nonlocal fallbacks
        open_elements.append(_local_name(element))
        fallbacks += open_elements[-1] == "Fallback"
        if open_elements[-1] == "p":
            open_paragraphs.append([])
        elif open_paragraphs and open_elements[-1] in _BREAKS and open_elements[-2:-1] == ["r"] and not fallbacks:
            open_paragraphs[-1].append(_BREAKS[open_elements[-1]])

    def text(characters: str) -> None:
        if open_elements[-1:] == ["t"] and open_paragraphs and not fallbacks:
            open_paragraphs[-1].append(characters)

    def end(element: str) -> None:
        nonlocal fallbacks
        closed_element = open_elements.pop()
        fallbacks -= closed_element == "Fallback"
        if closed_element == "p":
            paragraphs.append("".join(open_paragraphs.pop()))

    _parse_xml(content, name, StartElementHandler=start, EndElementHandler=end, CharacterDataHandler=text)
    return paragraphs


def read_epub(file: SourceFile) -> Items:
    """Yield a record per file of the spine, as `book.epub[index] name`. A book with encrypted chapters is rejected."""
    with _open_archive(file.path, "EPUB", file.max_bytes) as book:
        chapters = _list_chapters(book)
        if _find_encrypted_members(book) & set(chapters):
            raise BadRecord("encrypted", "is protected (DRM), and its chapters cannot be read; remove it")
        for index, name in enumerate(chapters):
            origin = f"{file.origin}[{index}] {name}"
            try:
                page = _EMPTY_ELEMENT.sub(rb"<\1\2></\1>", book.read(name))
                yield from read_page_records(page, _PAGE_TYPE, origin, file)
            except BadRecord as error:
                yield file.reject(origin, error)
                if error.reason == "too_large":
                    return


def _list_chapters(book: _Archive) -> list[str]:
    """Return the members that the spine names, in its order, each once."""
    elements = _parse_elements(book.read(_CONTAINER_FILE), _CONTAINER_FILE)
    package = next((attributes.get("full-path", "") for name, attributes in elements if name == "rootfile"), "")
    pages: dict[str, str] = {}
    spine: list[str] = []
    for name, attributes in _parse_elements(book.read(package), package):
        if name == "item" and attributes.get("media-type") in (_PAGE_TYPE, "text/html", "text/x-oeb1-document"):
            path = posixpath.join(posixpath.dirname(package), unquote(attributes.get("href", "").partition("#")[0]))
            pages[attributes.get("id", "")] = posixpath.normpath(path)
        elif name == "itemref":
            spine.append(attributes.get("idref", ""))
    chapters = list(dict.fromkeys(pages[page] for page in spine if page in pages))
    if not chapters:
        raise BadRecord("incomplete", f"{package} lists no chapters; download it again")
    return chapters


def _find_encrypted_members(book: _Archive) -> set[str]:
    """Return the members that encryption.xml names."""
    if _ENCRYPTION_FILE not in book:
        return set()
    elements = _parse_elements(book.read(_ENCRYPTION_FILE), _ENCRYPTION_FILE)
    return {unquote(attributes.get("URI", "")) for name, attributes in elements if name == "CipherReference"}


DOCX = Format(read=read_docx, suffixes=(".docx",), is_detected=True, description="Word documents")
EPUB = Format(
    read=read_epub, suffixes=(".epub",), is_detected=True, is_pages=True, description="e-books, a document a chapter"
)
