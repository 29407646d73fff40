"""Word documents (.docx): the text of paragraphs and of tables, cell by cell, in the order of the document.

Format: ECMA-376, part 1 (WordprocessingML). Headers, footers, notes, comments and deleted text are left out.
"""

from __future__ import annotations

from artel.text.formats.format import Format
from artel.text.formats.pages import records_of_text
from artel.text.reading.archive import Attributes, elements, local_name, open_archive, parse_xml
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import BadRecord

_OLE = b"\xd0\xcf\x11\xe0"  # what .doc is packed in, and any encrypted document
_RELATIONS = "_rels/.rels"
_BREAKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def read_docx(file: SourceFile) -> Items:
    """Yield the document as one record, or a record for each paragraph (`document: line`)."""
    with file.path.open("rb") as stream:
        if stream.read(len(_OLE)) == _OLE:
            raise BadRecord("encrypted", "is encrypted, or a .doc; save it as .docx without a password")
    with open_archive(file.path, "DOCX", file.max_bytes) as document:
        relations = elements(document.read(_RELATIONS), _RELATIONS)
        targets = (each.get("Target", "") for _, each in relations if each.get("Type", "").endswith("/officeDocument"))
        name = next(targets, "word/document.xml").lstrip("/")
        text = "\n".join(line for line in _paragraphs(document.read(name), name) if line.strip())
    yield from records_of_text(text, file.origin, file)


def _paragraphs(content: bytes, name: str) -> list[str]:
    paragraphs: list[str] = []
    open_paragraphs: list[list[str]] = []  # a text box is a paragraph within one
    opened: list[str] = []
    fallbacks = 0  # what old versions of Word show in place of a drawing: the same text once more

    def start(element: str, attributes: Attributes) -> None:
        nonlocal fallbacks
        opened.append(local_name(element))
        fallbacks += opened[-1] == "Fallback"
        if opened[-1] == "p":
            open_paragraphs.append([])
        elif open_paragraphs and opened[-1] in _BREAKS and opened[-2:-1] == ["r"] and not fallbacks:
            open_paragraphs[-1].append(_BREAKS[opened[-1]])

    def text(characters: str) -> None:
        if opened[-1:] == ["t"] and open_paragraphs and not fallbacks:
            open_paragraphs[-1].append(characters)

    def end(element: str) -> None:
        nonlocal fallbacks
        closed = opened.pop()
        fallbacks -= closed == "Fallback"
        if closed == "p":
            paragraphs.append("".join(open_paragraphs.pop()))

    parse_xml(content, name, StartElementHandler=start, EndElementHandler=end, CharacterDataHandler=text)
    return paragraphs


DOCX = Format(read=read_docx, suffixes=(".docx",), is_detected=True, description="Word documents")
