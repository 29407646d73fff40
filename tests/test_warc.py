"""Archives of crawled pages: every page in them comes out, and every way to damage them is told."""

import gzip
import io
import zlib
from functools import partial

import pytest
from fastwarc.warc import WarcRecord, WarcRecordType

from artel.text import html_to_text
from artel.text.formats.pages import read_warc
from artel.text.records import Record, Rejected
from support.reading import read as read_with_reader
from support.reading import written

ANSWER = "application/http; msgtype=response"


def entry(kind, address, block, content_type=ANSWER, more=""):
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {address}\r\nContent-Type: {content_type}\r\n{more}"
    return f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def answer(body, content_type="text/html; charset=utf-8", status="200 OK", more=""):
    return f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{more}\r\n".encode() + body


def chunked(body, size=7):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def packed(body, coding, **more):
    return answer(body, more=f"Content-Encoding: {coding}\r\n" + more.get("and_", ""))


RAW_DEFLATE = zlib.compressobj(wbits=-zlib.MAX_WBITS)
CHUNKS = "Transfer-Encoding: chunked\r\n"
PAGES = {
    "<p>Анна</p>": answer("<p>Анна</p>".encode()),
    "<p>Вронский</p>": answer("<p>Вронский</p>".encode("cp1251"), "text/html; charset=windows-1251"),
    "<p>Китти</p>": answer("<p>Китти</p>".encode("koi8-r"), "text/html"),
    "<p>packed</p>": packed(gzip.compress(b"<p>packed</p>"), "gzip"),
    "<p>deflated</p>": packed(zlib.compress(b"<p>deflated</p>"), "deflate"),
    "<p>bare</p>": packed(RAW_DEFLATE.compress(b"<p>bare</p>") + RAW_DEFLATE.flush(), "deflate"),
    "<p>in several chunks</p>": answer(chunked(b"<p>in several chunks</p>"), more=CHUNKS),
    "<p>both at once</p>": packed(chunked(gzip.compress(b"<p>both at once</p>")), "gzip", and_=CHUNKS),
    "<p>said to be both</p>": packed(b"<p>said to be both</p>", "gzip", and_=CHUNKS),
    "<p>old</p>": b"HTTP/1.0 200 OK\ncontent-type: TEXT/HTML\n\n<p>old</p>",
    "as it is": answer("as it is".encode("utf-16"), "text/plain; charset=utf-16"),
}
NOT_PAGES = [
    entry("warcinfo", "", b"software: x\r\n", "application/warc-fields"),
    entry("request", "http://a/", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
    entry("response", "http://a/", answer(b"\x89PNG" + bytes(10_000), "image/png")),
    entry("response", "http://a/", answer(b"<p>gone", status="404 Not Found")),
    entry("response", "dns:a", b"a. 300 IN A 1.2.3.4", "text/dns"),
    entry("revisit", "http://a/", b"HTTP/1.1 200 OK\r\n\r\n"),
    entry("metadata", "http://a/", b"x: y", "application/warc-fields"),
]
ARCHIVE = [
    *NOT_PAGES,
    *(entry("response", f"http://a/{n}", block) for n, block in enumerate(PAGES.values())),
    *NOT_PAGES,
]
TEXTS = [page.removeprefix("<p>").removesuffix("</p>") for page in PAGES]


read = partial(read_with_reader, read_warc)


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "whole.warc.gz"])
def test_pages_in_every_dress_come_out_and_nothing_else(tmp_path, name):
    pack = {"a.warc": b"".join, "a.warc.gz": lambda all_: b"".join(map(gzip.compress, all_))}
    content = pack.get(name, lambda all_: gzip.compress(b"".join(all_)))(ARCHIVE)
    items = read(written(tmp_path, name, content))
    assert [item.text for item in items] == TEXTS
    assert items[1].origin == f"{name}[8] http://a/1"
    assert items[1].set_name == "set"


def test_converted_texts_and_resources(tmp_path):
    content = entry("conversion", "http://a/1", "Текст\nстроки".encode(), "text/plain")
    content += entry("resource", "file:///b.html", "<p>Страница".encode(), "text/html")
    content += entry("resource", "file:///c.png", b"\x89PNG", "image/png")
    file = written(tmp_path, "a.warc.wet", content)
    assert [item.text for item in read(file)] == ["Текст\nстроки", "Страница"]
    lines = read(file, document="line")
    assert [(item.text, item.origin) for item in lines[:2]] == [
        ("Текст", "a.warc.wet[0] http://a/1:1"),
        ("строки", "a.warc.wet[0] http://a/1:2"),
    ]


def test_an_archive_of_real_pages_written_by_another_program(shared_data, tmp_path):
    pages = [file.read_bytes() for file in sorted((shared_data / "html").iterdir())]
    stream = io.BytesIO()
    for page in pages:
        record = WarcRecord()
        record.init_headers(WarcRecordType.response, b"urn:uuid:00000000-0000-0000-0000-000000000000")
        record.headers["WARC-Target-URI"] = "http://az.lib.ru/"
        record.headers["Content-Type"] = ANSWER
        record.is_http = True
        record.set_bytes_content(answer(page, "text/html"))
        record.write(stream, checksum_data=True)
    items = read(written(tmp_path, "a.warc", stream.getvalue()), profile="lib.ru")
    assert [item.text for item in items] == [html_to_text(page, profile="lib.ru") for page in pages]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"no answer", "bad_http"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html", "bad_http"),
        (answer(bytes(range(256)), "text/plain"), "binary"),
        (answer(chunked(b"<p>cut off")[:-9], more=CHUNKS), "truncated"),
        (packed(gzip.compress(b"<p>cut off")[:-9], "gzip"), "truncated"),
        (packed(b"\x1f\x8bnonsense", "gzip"), "unreadable"),
        (packed(b"\x8b\x02\x80", "br"), "unreadable"),
        (answer(b"x" * 3001), "too_large"),
        (packed(gzip.compress(b"x" * 5_000_000)[:2900], "gzip"), "too_large"),  # a bomb
    ],
)
def test_a_bad_page_is_one_bad_record_and_the_next_is_read(tmp_path, block, reason):
    content = entry("response", "http://a/bad", block) + entry("response", "http://a/good", answer(b"<p>good"))
    bad, good = read(written(tmp_path, "a.warc", content), max_document=3000)
    assert (bad.reason, bad.origin, bad.set_name) == (reason, "a.warc[0] http://a/bad", "set")
    assert good.text == "good"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_archive_cut_off_anywhere_is_told(tmp_path, pack):
    parts = [pack(part) for part in ARCHIVE[4:12]]
    content = b"".join(parts)
    whole = read(written(tmp_path, "whole.warc.gz" if pack is gzip.compress else "whole.warc", content))
    name = "a.warc.gz" if pack is gzip.compress else "a.warc"
    ends = {sum(map(len, parts[:number])) for number in range(len(parts) + 1)}
    if pack is bytes:  # the line ends behind a record hold nothing
        ends |= {end - missing for end in ends for missing in range(1, 5)}
    for cut in range(len(content)):
        items = read(written(tmp_path, name, content[:cut]))
        good = [item.text for item in items if isinstance(item, Record)]
        assert good == [item.text for item in whole][: len(good)]
        assert (cut in ends) == all(isinstance(item, Record) for item in items), cut
        assert sum(isinstance(item, Rejected) for item in items) <= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no archive", "bad_warc"),
        (b"\0" * 1000, "bad_warc"),
        (b"WARC/1.0\r\n\r\n", "bad_warc"),
        (b"WARC/1.0\r\nContent-Length: -5\r\n\r\n", "bad_warc"),
        (b"WARC/1.0\r\nContent-Length: 99999999999999999\r\n\r\n", "truncated"),
        (b"WARC/1.0\r\n" + b"x: y\r\n" * 100_000, "bad_warc"),
        (b"WARC/1.0\r\n" + b"x" * 1_000_000, "bad_warc"),
    ],
)
def test_what_is_no_archive(tmp_path, content, reason):
    (item,) = read(written(tmp_path, "a.warc", content))
    assert item.reason == reason
    assert item.origin in ("a.warc", "a.warc[0]")
    assert read(written(tmp_path, "empty.warc", b"")) == []
