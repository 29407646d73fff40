"""Documents in ZIP archives, EPUB and DOCX: their text in order, and every hostile archive a rejected record."""

import io
import zipfile

import pytest

from artel.config import DataConfig
from artel.text import unread_files
from artel.text.formats.archives import read_docx, read_epub
from artel.text.records import Record
from support.reading import checked, items, read, read_texts, written

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
PACKAGE = """<?xml version="1.0"?><opf:package xmlns:opf="http://www.idpf.org/2007/opf"><opf:manifest>
<opf:item id="two" href="text/2%20b.xhtml" media-type="application/xhtml+xml"/>
<opf:item id="cover" href="cover.xhtml" media-type="application/xhtml+xml"/>
<opf:item id="one" href="text/1.xhtml" media-type="application/xhtml+xml"/>
<opf:item id="picture" href="a.png" media-type="image/png"/></opf:manifest>
<opf:spine><opf:itemref idref="cover"/><opf:itemref idref="one"/><opf:itemref idref="two"/>
<opf:itemref idref="one"/><opf:itemref idref="gone"/></opf:spine></opf:package>"""
PAGE = '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml"><body>{}</body></html>'
BOOK = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": CONTAINER,
    "OEBPS/book.opf": PACKAGE,
    "OEBPS/text/1.xhtml": PAGE.format("<h1>Глава I</h1><p>Все счастливые семьи</p>"),
    "OEBPS/text/2 b.xhtml": PAGE.format("<p>похожи</p>").replace(
        "<body>", "<head><title/><script src='a'/></head><body>"
    ),
    "OEBPS/cover.xhtml": PAGE.format('<img src="a.png"/>'),
}
ENCRYPTION = (
    '<encryption xmlns:e="http://www.w3.org/2001/04/xmlenc#"><e:EncryptedData><e:CipherData>'
    '<e:CipherReference URI="{}"/></e:CipherData></e:EncryptedData></encryption>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)
WORD = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><w:body>{}</w:body></w:document>'
)


def archive(members, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def paragraph(*runs):
    return f"<w:p>{''.join(f'<w:r><w:t>{run}</w:t></w:r>' for run in runs)}</w:p>"


def document(body, **more):
    return archive({"_rels/.rels": RELATIONS, "word/document.xml": WORD.format(body), **more})


def test_chapters_come_in_the_order_of_the_spine(tmp_path):
    file = written(tmp_path, "book.epub", archive(BOOK))
    assert read(read_epub, file) == [
        Record("", "book.epub[0] OEBPS/cover.xhtml", "set"),
        Record("Глава I\nВсе счастливые семьи", "book.epub[1] OEBPS/text/1.xhtml", "set"),
        Record("похожи", "book.epub[2] OEBPS/text/2 b.xhtml", "set"),
    ]
    lines = read(read_epub, file, document="line")
    assert [record.text for record in lines] == ["Глава I", "Все счастливые семьи", "похожи"]


def test_fonts_may_be_encrypted_and_chapters_may_not(tmp_path):
    fonts = BOOK | {"META-INF/encryption.xml": ENCRYPTION.format("OEBPS/font.otf")}
    assert len(read(read_epub, written(tmp_path, "a.epub", archive(fonts)))) == 3
    chapter = BOOK | {"META-INF/encryption.xml": ENCRYPTION.format("OEBPS/text/2%20b.xhtml")}
    (rejected,) = read(read_epub, written(tmp_path, "b.epub", archive(chapter)))
    assert (rejected.reason, "DRM" in rejected.detail) == ("encrypted", True)


def test_paragraphs_and_tables_come_in_their_order(tmp_path):
    cell = "<w:tc>{}</w:tc>".format
    rows = [cell(paragraph("a1")) + cell(paragraph("a2")), cell(paragraph("b1"))]
    table = f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>"
    drawing = (
        "<w:p><w:r><mc:AlternateContent><mc:Choice><w:txbxContent><w:p><w:r><w:t>box</w:t></w:r></w:p></w:txbxContent>"
        "</mc:Choice><mc:Fallback><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent></w:r></w:p>"
    )
    deleted = (
        "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:r><w:instrText>PAGE</w:instrText></w:r></w:p>"
    )
    breaks = "<w:p><w:r><w:t>x</w:t><w:br/><w:t>y</w:t><w:tab/><w:t>z</w:t></w:r></w:p>"
    body = paragraph("Все ", "счастливые") + table + drawing + deleted + breaks + paragraph("end")
    file = written(tmp_path, "a.docx", document(body))
    (record,) = read(read_docx, file)
    assert record == Record("Все счастливые\na1\na2\nb1\nbox\nx\ny\tz\nend", "a.docx", "set")
    assert len(read(read_docx, file, document="line")) == 8


def test_indentation_of_a_paragraph_is_text(tmp_path):
    body = (
        paragraph("def f():")
        + paragraph("    return 1 ")
        + "<w:p><w:r><w:tab/><w:t>a</w:t></w:r></w:p>"
        + paragraph(" ")
    )
    (record,) = read(read_docx, written(tmp_path, "a.docx", document(body)))
    assert record.text == "def f():\n    return 1 \n\ta"


ENTITY = f'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]>{WORD.format(paragraph("&a;"))}'
LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
BROKEN = {
    "damaged": (b"PK\3\4 no archive", archive(BOOK)[:-40]),
    "incomplete": (archive({"a": "b"}),),
    "bad_xml": (
        archive({"_rels/.rels": RELATIONS, "word/document.xml": "<w:p>"}),
        archive({"_rels/.rels": b"\xff\xfe"}),
    ),
    "entities": (
        archive({"_rels/.rels": RELATIONS, "word/document.xml": ENTITY}),
        archive({"_rels/.rels": RELATIONS, "word/document.xml": ENTITY.encode("utf-16")}),
        archive({"_rels/.rels": f'<!DOCTYPE x [<!ENTITY l0 "l">{LAUGHS}]><x>&l9;</x>'}),
    ),
    "encrypted": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),),
    "unreadable": (archive({"_rels/.rels": RELATIONS}, zipfile.ZIP_LZMA),),
    "too_large": (document(paragraph("a" * 300_000)), archive({"_rels/.rels": " " * 300_000})),
}


@pytest.mark.parametrize(("reason", "content"), [(reason, each) for reason, files in BROKEN.items() for each in files])
def test_a_hostile_archive_is_a_rejected_record(tmp_path, reason, content):
    (rejected,) = read(read_docx, written(tmp_path, "a.docx", content), max_document=100_000)
    assert rejected.reason == reason
    assert rejected.origin == "a.docx"


def test_all_chapters_of_a_book_together_have_a_limit(tmp_path):
    """Of a bomb no more is unpacked than data.max_document, however many chapters it has."""
    large = BOOK | {name: PAGE.format(f"<p>{'a' * 60_000}</p>") for name in BOOK if "/text/" in name}
    _, first, rejected = read(read_epub, written(tmp_path, "a.epub", archive(large)), max_document=100_000)
    assert first.text == "a" * 60_000
    assert (rejected.reason, rejected.origin) == ("too_large", "a.epub[2] OEBPS/text/2 b.xhtml")


def test_a_password_is_refused(tmp_path):
    content = bytearray(archive(BOOK, zipfile.ZIP_STORED))
    for at in range(len(content)):
        if content[at : at + 4] == b"PK\1\2":
            content[at + 8] |= 1  # the flag of an encrypted member, in the directory
    (rejected,) = read(read_epub, written(tmp_path, "a.epub", bytes(content)))
    assert rejected.reason == "encrypted"


def test_they_are_found_in_folders_and_read_by_their_suffix(tmp_path):
    written(tmp_path, "book.epub", archive(BOOK))
    written(tmp_path, "a.docx", document(paragraph("Word")))
    checked(tmp_path)
    assert list(unread_files(DataConfig.model_validate({"sources": [{"path": str(tmp_path)}]}))) == []
    assert sorted(item.text for item in items(tmp_path)) == ["", "Word", "Глава I\nВсе счастливые семьи", "похожи"]
    texts, ledger = read_texts(tmp_path)
    assert (len(texts), ledger["documents"]["read"], ledger["documents"]["dropped"]) == (3, 4, {"empty": 1})
