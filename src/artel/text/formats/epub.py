"""E-books in EPUB: a document for each chapter, in reading order. Pages that are pictures (SVG) are left out.

Format: https://www.w3.org/TR/epub-33/
"""

from __future__ import annotations

import posixpath
import re
from urllib.parse import unquote

from artel.text.formats.format import Format
from artel.text.formats.pages import records_of_page
from artel.text.reading.archive import Archive, elements, open_archive
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import BadRecord

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_PAGE = "application/xhtml+xml"
# In XHTML <title/> is an empty element. In HTML, as which it is read, it would hide the text after it.
_EMPTY = re.compile(
    rb"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)([A-Za-z]\w*)((?:\s[^<>]*)?)/>"
)


def read_epub(file: SourceFile) -> Items:
    """Yield a record per file of the spine; its origin is `book.epub[number] name`, numbered from 0.

    A book with encrypted chapters is rejected (fonts may be encrypted). All chapters together may unpack to
    data.max_document bytes.
    """
    with open_archive(file.path, "EPUB", file.max_bytes) as book:
        chapters = _chapters(book)
        if _encrypted(book) & set(chapters):
            raise BadRecord("encrypted", "is protected (DRM), and its chapters cannot be read; leave it out")
        for number, name in enumerate(chapters):
            origin = f"{file.origin}[{number}] {name}"
            try:
                page = _EMPTY.sub(rb"<\1\2></\1>", book.read(name))
                yield from records_of_page(page, _PAGE, origin, file)
            except BadRecord as error:
                yield file.reject(origin, error)
                if error.reason == "too_large":
                    return


def _chapters(book: Archive) -> list[str]:
    """Return the members that the spine names, in its order, each once."""
    roots = (attributes.get("full-path", "") for name, attributes in elements(book.read(_CONTAINER), _CONTAINER)
             if name == "rootfile")  # fmt: skip
    package = next(roots, "")
    pages: dict[str, str] = {}
    spine: list[str] = []
    for name, attributes in elements(book.read(package), package):
        if name == "item" and attributes.get("media-type") in (_PAGE, "text/html", "text/x-oeb1-document"):
            path = posixpath.join(posixpath.dirname(package), unquote(attributes.get("href", "").partition("#")[0]))
            pages[attributes.get("id", "")] = posixpath.normpath(path)
        elif name == "itemref":
            spine.append(attributes.get("idref", ""))
    chapters = list(dict.fromkeys(pages[page] for page in spine if page in pages))
    if not chapters:
        raise BadRecord("incomplete", f"{package} names no chapters; download it again")
    return chapters


def _encrypted(book: Archive) -> set[str]:
    """Return the members that encryption.xml names."""
    if _ENCRYPTION not in book:
        return set()
    listed = elements(book.read(_ENCRYPTION), _ENCRYPTION)
    return {unquote(attributes.get("URI", "")) for name, attributes in listed if name == "CipherReference"}


EPUB = Format(
    read=read_epub, suffixes=(".epub",), is_detected=True, is_pages=True, description="e-books, a document a chapter"
)
