"""Sources, pages, cleaning, duplicates, split: raw text to documents, each accounted for."""

import functools
import gzip
import http.server

import pytest

from artel.config import DataConfig
from artel.errors import InputError
from artel.text import check_sources, html_to_text
from artel.text.reading.encodings import detect_encoding
from artel.text.records import BadRecord
from support.reading import documents
from support.servers import http_server

RUSSIAN = "Все счастливые семьи похожи друг на друга,\nкаждая несчастливая семья несчастлива по-своему.\n"


def texts(**data):
    return [document.record.text for document in documents(**data)[0]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "windows-1251", "koi8-r", "cp866"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_encodings_and_line_ends_give_the_same_text(tmp_path, encoding, ends):
    (tmp_path / "a.txt").write_bytes(RUSSIAN.replace("\n", ends).encode(encoding))
    source = {"path": str(tmp_path / "a.txt")}
    assert texts(sources=[source]) == [RUSSIAN.strip()]
    assert texts(sources=[{**source, "document": "line"}]) == RUSSIAN.strip().split("\n")


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("gb18030", "这是一个用来测试编码识别的中文文本，里面有很多常用的汉字和标点符号。"),
        ("shift_jis", "これは文字コードの判定を試すための日本語の文章です。ひらがなとカタカナと漢字が混ざっています。"),
        ("big5", "這是一個用來測試編碼識別的中文文本，裡面有很多常用的漢字和標點符號。"),
        ("euc_kr", "이것은 인코딩 판별을 시험하기 위한 한국어 문장입니다. 여러 글자가 들어 있습니다."),
        ("iso8859_5", "Это русский текст в кодировке, которой почти никто не пользуется."),
    ],
)
def test_an_encoding_that_is_not_recognized_is_said_and_can_be_named(tmp_path, encoding, text):
    """Their bytes are letters of Russian to windows-1251 and koi8-r, and nonsense."""
    (tmp_path / "a.txt").write_bytes((text * 10).encode(encoding))
    with pytest.raises(BadRecord, match=r"unknown encoding.*encoding: gb18030"):
        detect_encoding((text * 10).encode(encoding))
    assert texts(sources=[{"path": str(tmp_path / "a.txt"), "encoding": encoding}]) == [text * 10]


@pytest.mark.parametrize(
    "text",
    [
        "Це український текст, щоб перевірити, як розпізнається кодування файлу.",
        "Ово је текст на српском језику, ћирилицом, да се провери како се препознаје.",
        "Това е български текст, за да проверим как се разпознава кодирането на файла.",
        "ВСЕ БУКВЫ ЗДЕСЬ ЗАГЛАВНЫЕ, КАК В СТАРОЙ БАЗЕ ДАННЫХ.",
    ],
)
def test_other_languages_and_capitals_are_still_windows_1251(text):
    assert detect_encoding((text * 10).encode("windows-1251")) == "windows-1251"


@pytest.mark.parametrize(
    ("encoding", "line"),
    [
        ("cp866", "│  1 │ Болт М1 оцинкованный  │      7 │      3 │\n"),
        ("windows-1251", "00001;кВт;3;МПа;ГГц\n"),
        ("koi8-r", "00001;кВт;3;МПа;ГГц\n"),
        ("windows-1251", "ЧП «ЮжЭнергоФлот-1», ООО «ФосАгро», МВт·ч, кВт·ч\n"),
    ],
)
def test_tables_units_and_names_of_firms_are_read(encoding, line):
    assert detect_encoding((line * 40).encode(encoding)) == encoding


def test_documents_are_files_lines_or_paragraphs(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    source = {"path": str(tmp_path / "*.txt")}
    assert texts(sources=[source]) == ["one\ntwo\n\n\nthree"]
    kept, _ = documents(sources=[{**source, "document": "paragraph"}])
    assert [(d.record.text, d.record.origin.split(":")[-1]) for d in kept] == [("one\ntwo", "1"), ("three", "5")]
    assert texts(sources=[{**source, "document": "line"}]) == ["one", "two", "three"]


LICENCE = (
    "The Project Gutenberg eBook of A Book\n\n{}\n\n\nOne.\n\nTwo.\n\n"
    "*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n\nTerms."
)


@pytest.mark.parametrize(
    "mark",
    ["*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***", "***START OF THIS PROJECT GUTENBERG EBOOK A BOOK***",
     "*** START OF THE PROJECT GUTENBERG EBOOK A BOOK;\nOR, A LONG TITLE ***"],
)  # fmt: skip
def test_a_book_of_project_gutenberg_is_read_without_its_licence(tmp_path, mark):
    (tmp_path / "a.txt").write_text(LICENCE.format(mark))
    (tmp_path / "b.txt").write_text("One.\n\nTwo.")
    source = {"path": str(tmp_path / "*.txt"), "profile": "gutenberg"}
    assert texts(sources=[{**source, "path": str(tmp_path / "a.txt")}]) == ["One.\n\nTwo."]
    assert texts(sources=[source], dedup={"exact": False}) == ["One.\n\nTwo."] * 2
    kept, _ = documents(sources=[{**source, "document": "paragraph"}], dedup={"exact": False})
    assert [document.record.text for document in kept] == ["One.", "Two."] * 2
    line = 3 + mark.count("\n") + 3
    assert [document.record.origin.split(":")[-1] for document in kept[:2]] == [str(line), str(line + 2)]
    (tmp_path / "a.txt").write_text(LICENCE.format(mark).replace("One.", "One.\n\n" * 9000))
    (cut, *rest) = texts(sources=[{**source, "path": str(tmp_path / "a.txt")}], validation=0.1)
    assert cut.startswith("One.")
    assert rest[-1].endswith("Two.")


@pytest.mark.parametrize(
    ("content", "source", "problem"),
    [
        ('{"id": "7", "text": "a"}\n{"id": "9", "text": "b"}\n', {}, ".format: {} holds JSON lines, not text"),
        ('<?xml version="1.0"?>\n<posts><row Body="a" /></posts>', {}, ".format: {} holds XML, not text"),
        ("one\rtwo\r", {"document": "line"}, ".path: {} has carriage returns as line ends"),
    ],
)
def test_files_that_are_not_the_text_they_seem_are_refused(tmp_path, content, source, problem):
    file = tmp_path / "wiki_00"
    file.write_bytes(content.encode())
    with pytest.raises(InputError) as refused:
        check_sources(DataConfig.model_validate({"sources": [{"path": str(file), **source}]}))
    assert str(refused.value).startswith(f"data.sources.0{problem.format(file)}")
    meant = {"document": "file"} if source else {"format": "text"}
    check_sources(DataConfig.model_validate({"sources": [{"path": str(file), **meant}]}))


def test_three_encodings_of_a_lib_ru_page_give_the_same_text(shared_data):
    pages = [
        html_to_text((shared_data / f"html/az_lib_ru_excerpt.{name}.shtml").read_bytes(), profile="lib.ru")
        for name in ("utf8", "cp1251", "koi8r")
    ]
    assert pages[0] == pages[1] == pages[2]
    assert "В начале 1806-го года Николай Ростов вернулся в отпуск." in pages[0]
    assert "А чтò поздно?" in pages[0]
    assert html_to_text("<body><p>Без меток.</p></body>".encode(), profile="lib.ru") == "Без меток."
    raw = html_to_text((shared_data / "html/az_lib_ru_excerpt.utf8.shtml").read_bytes())
    for site in ("Регистрация", "Комментарии", "Связаться с программистом", "Статистика"):
        assert site not in pages[0]
        assert site in raw


def test_pages_become_what_a_reader_sees():
    page = b"""<html><head><title>no</title><style>p {}</style></head><body><!-- over
    many <p>lines</p> --><script>var a = "<p>no</p>";</script>
    <h1>Head</h1><p>Wor<b>d</b> &amp; <i>an</i>other&nbsp;one<br>new   line<ul><li>item</ul>
    <pre>  keeps
    its   spaces</pre><noscript>no</noscript></body></html>"""
    assert html_to_text(page) == "Head\nWord & another one\nnew line\nitem\n  keeps\n    its   spaces"


@pytest.mark.parametrize("page", [b"", b"<", b"<p" * 5000, b"<div>" * 20_000 + b"deep", b"<!-- never closed <p>text"])
def test_broken_pages_do_not_break_us(page):
    assert isinstance(html_to_text(page), str)
    if b"text" in page:
        assert "text" in html_to_text(page)


def test_the_header_of_a_response_says_the_encoding():
    page = f"<body>{RUSSIAN}</body>".encode("koi8-r")
    assert "счастливые" in html_to_text(page, "text/html; charset=koi8-r")
    assert "счастливые" in html_to_text(b"<meta charset=utf-8>" + page)  # the declaration is wrong; the bytes decide


def test_json_lines_and_what_is_wrong_with_them(tmp_path):
    lines = b'{"text": "one"}\n\n{"text": "two"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    (tmp_path / "c.json").write_text('[{"text": "four"}]')
    assert texts(sources=[{"path": str(tmp_path)}]) == ["one", "two", "three", "four"]
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(lines + b'{"title": "x", "body": "y"}\n{"text": 3}\n[1]\n{"text": "cut')
    with pytest.raises(InputError) as error:
        documents(sources=[{"path": str(bad)}])
    for part in ("bad.jsonl:4: has no field 'text' (it has: title, body)", "bad.jsonl:5", "bad.jsonl:6", "bad.jsonl:7",
                 "data.max_bad"):  # fmt: skip
        assert part in str(error.value)
    kept, ledger = documents(sources=[{"path": str(bad)}], max_bad=0.9)
    assert len(kept) == 2
    assert ledger.to_json()["documents"]["dropped"] == {"bad_json": 2, "no_field": 1, "no_text": 1}


def test_all_missing_sources_are_named_at_once(tmp_path):
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty").mkdir()
    paths = ["nowhere.txt", "none/*.txt", str(tmp_path / "empty"), str(tmp_path / "book.pdf"), "s3://bucket/x"]
    with pytest.raises(InputError) as error:
        documents(sources=[{"path": paths}, {"path": "gone.txt", "encoding": "utf-9"}])
    assert len(error.value.problems) == 7
    assert "data.sources.0.path: there is no file nowhere.txt" in str(error.value)
    assert "pdftotext" in str(error.value)
    assert "data.sources.1.encoding" in str(error.value)


def test_duplicates_are_dropped_and_counted_and_the_split_is_stable(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"line {number}" for number in range(400)) + "\nline 3\nline  \nline \n")
    source = {"path": str(tmp_path / "*.txt"), "document": "line"}
    kept, ledger = documents(sources=[source], validation=0.1)
    assert ledger.to_json()["documents"]["dropped"] == {"duplicate": 2}
    held = {document.record.text for document in kept if document.split == "validation"}
    assert 20 < len(held) < 60
    (tmp_path / "0.txt").write_text("\n".join(f"another {number}" for number in range(400)))
    more, _ = documents(sources=[source], validation=0.1)
    assert held == {d.record.text for d in more if d.split == "validation" and d.record.text.startswith("line")}


def test_validation_by_a_path_takes_its_texts_out_of_training(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree")
    (tmp_path / "held.txt").write_text("two\nfour")
    source = {"path": str(tmp_path / "a.txt"), "document": "line"}
    kept, ledger = documents(sources=[source], validation=str(tmp_path / "held.txt"))
    assert [(d.record.text, d.split) for d in kept] == [
        ("two", "validation"), ("four", "validation"), ("one", "train"), ("three", "train")
    ]  # fmt: skip
    assert ledger.to_json()["documents"]["dropped"] == {"duplicate": 1}


@pytest.mark.parametrize("document", ["file", "line"])
def test_binary_files_and_giants_are_refused(tmp_path, document):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 10)
    source = {"path": str(tmp_path / "a.txt"), "document": document}
    with pytest.raises(InputError, match=r"a\.txt: holds binary data"):
        documents(sources=[source])
    (tmp_path / "a.txt").write_text("word " * 1000)
    with pytest.raises(InputError, match=r"data\.max_document"):
        documents(sources=[source], max_document=1000)


def test_a_dummy_document_depends_on_its_number_alone():
    few, many = (texts(sources=[{"format": "dummy", "documents": n}]) for n in (5, 50))
    assert many[:5] == few
    assert len({*many}) == 50


def test_pages_from_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "page.html").write_bytes(f"<meta charset=koi8-r><p>{RUSSIAN}".encode("koi8-r"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "site"))
    with http_server(handler) as address:
        assert texts(sources=[{"path": f"{address}/page.html"}])[0].startswith("Все счастливые")
        with pytest.raises(InputError, match="404"):
            documents(sources=[{"path": f"{address}/none.html"}])
    assert texts(sources=[{"path": f"{address}/page.html"}])  # from the cache: the server is gone


def test_the_novels_and_pages_are_all_accounted_for(shared_data):
    sources = [
        {"path": str(shared_data / "literature"), "document": "line", "name": "literature"},
        {"path": str(shared_data / "html"), "profile": "lib.ru", "name": "pages"},
    ]
    kept, ledger = documents(sources=sources, validation=0.05)
    report = ledger.to_json()
    assert report["documents"]["read"] == report["documents"]["kept"] + sum(report["documents"]["dropped"].values())
    assert report["documents"]["kept"] == len(kept)
    assert report["rejected"] == []
    assert report["sets"]["pages"]["read"] == 4
    assert report["sets"]["pages"]["dropped"] == {"duplicate": 2}
    written = [report["sets"][name][part]["bytes"] for name in report["sets"] for part in ("train", "validation")]
    assert sum(written) == sum(report["bytes"].values()) == sum(len(d.record.text.encode()) for d in kept)
    assert not any("\r" in d.record.text or "\ufffd" in d.record.text for d in kept)
