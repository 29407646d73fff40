"""Web pages to text: the fast way gives what a plain walk over the tree gives, soon, whatever the page."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selectolax.lexbor import LexborHTMLParser

from artel.config import DataConfig, SourceConfig
from artel.text import html_to_text
from artel.text.cleaning import html
from artel.text.cleaning.html import _BLOCK_TAGS, _HIDDEN_TAGS, _flatten, main_text, page_source
from artel.text.formats.pages import read_html
from artel.text.reading.source_file import SourceFile
from artel.text.records import DroppedRecord, Record
from support.reading import written

TAGS = (
    "p div span b a br pre table tr td ul li dl dd h1 form select option button textarea script style svg path math "
    "object iframe template noscript title head body html frameset center hr img input font section noframes"
).split()
TEXTS = [
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    "b c",
    "Слово",
    "\xa0",
    "&nbsp;",
    "&#10;",
    "&#13;",
    "&lt;",
    "&amp;",
    "\u2003",
    "\x0b",
]
TEXTS += ["\u200b", "\xad", "<", "</", ">", "<!x>", "<?y?>", "<!--c-->", "<!--", "\x01", "&#0;", "x\ny", "  z  ", "😀"]
PIECES = st.one_of(
    st.sampled_from([f"<{tag}>" for tag in TAGS] + [f"<{tag.upper()} x='1>2'>" for tag in TAGS]),
    st.sampled_from([f"</{tag}>" for tag in TAGS]),
    st.sampled_from(TEXTS),
)
STAND_INS = {" ": "\x01", "\n": "\x02", "\t": "\x03"}
MAIN = "<p>" + "The main text of the page, in sentences that are long enough, and several of them. " * 5 + "</p>"


def plain(page: bytes, encoding: str = "utf-8") -> str:
    """The text by a walk over the tree, node by node, as anyone would write it."""
    tree = LexborHTMLParser(page_source(page, "", "none", encoding).decode())
    pieces: list[str] = []

    def walk(node, preformatted):
        if node.is_text_node:
            text = node.text_content or ""
            pieces.append(text.translate(str.maketrans(STAND_INS)) if preformatted else text)
        elif node.tag not in _HIDDEN_TAGS:
            ends = ["\0"] if node.tag in _BLOCK_TAGS else []
            pieces.extend(ends)
            for child in node.iter(include_text=True):
                walk(child, preformatted or node.tag == "pre")
            pieces.extend(ends)

    walk(tree.body or tree.root, False)
    lines = (" ".join(line.split()) for line in "".join(pieces).split("\0"))
    text = "\n".join(line for line in lines if line)
    return text.translate({ord(stand_in): space for space, stand_in in STAND_INS.items()}).strip("\n ")


@given(pieces=st.lists(PIECES, max_size=40))
@settings(max_examples=500)
def test_any_page_gives_the_text_of_a_plain_walk(pieces):
    page = "".join(pieces).encode()
    assert html_to_text(page, encoding="utf-8") == plain(page)


def test_real_pages_give_the_text_of_a_plain_walk(shared_data):
    for file in sorted((shared_data / "html").iterdir()):
        assert html_to_text(file.read_bytes()) == plain(file.read_bytes(), "auto")


DEEP = 100_000
HOSTILE = {
    "unclosed": b"<div>" * DEEP + b"text",
    "closed": b"<div>" * DEEP + b"text" + b"</div>" * DEEP,
    "lists": b"<ul><li>" * DEEP + b"text",
    "closed in the wrong order": b"<span><div></span></div>" * DEEP + b"text",
    "ended by others": b"<div><table><td></div></table>" * DEEP + b"text",
    "preformatted": b"<pre>" * DEEP + b"text",
    "fonts": b"<font color=1><p>" * DEEP + b"text",
    "inline": b"<i>" * DEEP + b"<p>text",
}


def depth(tree):
    """Elements that stand in one another."""
    depths = {}
    for node in (tree.body or tree.root).traverse():
        depths[node.mem_id] = 1 + depths.get(node.parent.mem_id, 0)
    return max(depths.values())


@pytest.mark.parametrize("page", HOSTILE.values(), ids=HOSTILE)
def test_a_page_that_is_100_000_deep_is_made_flat_before_it_is_parsed(page, monkeypatch):
    """The parser looks through all elements that are open at each <div>: it would take half a minute and more."""
    parsed = []
    monkeypatch.setattr(
        html, "LexborHTMLParser", lambda *given, **more: parsed.append(LexborHTMLParser(*given, **more)) or parsed[-1]
    )
    assert html_to_text(page) == "text"
    (tree,) = parsed
    assert depth(tree) < 2_000


def test_a_page_without_its_structure_still_has_its_lines_and_not_its_machinery():
    page = (
        b"<html><head><title>no</title></head><body><P>one <b>two</b><div>three<script>var no</script><svg>no</svg>four"
    )
    assert html_to_text(_flatten(page)) == html_to_text(page) == "one two\nthreefour"


def test_the_main_text_is_without_menus():
    links = "".join(f"<li><a href=/{number}>Section {number}</a></li>" for number in range(30))
    paragraphs = "".join(MAIN.replace("several", f"{number}") for number in range(20, 23))
    page = f"<body><nav><ul>{links}</ul></nav><article>{paragraphs}</article><footer>Copyright</footer></body>"
    text = main_text(page.encode(), "data.sources.0")
    assert text.count("The main text of the page") == 15
    assert "Section" not in text
    assert "Copyright" not in text


@pytest.mark.parametrize("page", [b"", b"<", b"\xff\xfe", b"<" * DEEP, b"<?xml version='1.0'?>", *HOSTILE.values()])
def test_hostile_pages_have_no_main_text(page):
    """A walk over the page takes as many calls as the page has tags: one for each pair of them would be 10^10."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        text = main_text(page, "data.sources.0")
    finally:
        sys.setprofile(None)
    assert text in ("", "text")
    assert calls < 100_000 + len(page)


def test_control_characters_do_not_cost_the_main_text():
    page = f"<html><body><article>{MAIN * 3}</article></body></html>".replace("long enough", "long\x01 \ufffe enough")
    assert "sentences that are long enough" in " ".join(main_text(page.encode(), "data.sources.0").split())


@given(pieces=st.lists(st.one_of(PIECES, st.just(MAIN)), max_size=30))
@settings(max_examples=60)
def test_any_page_has_a_main_text_or_none(pieces):
    assert isinstance(main_text("".join(pieces).encode("utf-8", "replace"), "data.sources.0"), str)


def test_a_page_without_main_text_is_dropped_and_not_a_bad_one(tmp_path):
    source = SourceConfig(path=["x"], extract="main")
    file = written(tmp_path, "a.html", "<html><body><script>var home</script></body></html>")
    assert list(read_html(SourceFile(file, "a.html", "set", source, DataConfig()))) == [
        DroppedRecord("no_main_text", "set")
    ]
    file = written(tmp_path, "b.html", f"<html><body><article><h1>Title</h1>{MAIN}</article></body></html>")
    (record,) = read_html(SourceFile(file, "b.html", "set", source, DataConfig()))
    assert isinstance(record, Record)
    lines = source.model_copy(update={"document": "line"})
    assert [item.origin for item in read_html(SourceFile(file, "b.html", "set", lines, DataConfig()))] == [
        "b.html:1",
        "b.html:2",
    ]
