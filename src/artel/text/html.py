"""Web pages to text: what a reader sees, line by line, without the page's machinery."""

from __future__ import annotations

import re
from typing import Literal

from selectolax.lexbor import LexborHTMLParser, LexborNode

from artel.text.encodings import NotText, decode, marked_encoding

_GONE = frozenset("script style noscript template head iframe object svg select textarea button".split())
_BLOCKS = frozenset(
    "address article aside blockquote body br caption center dd details div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header hr html legend li main nav ol p pre section summary table tbody td tfoot th thead "
    "tr ul".split()
)
_DECLARED = re.compile(
    rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)|<\?xml[^>]+encoding\s*=\s*["']([\w-]+)""", re.IGNORECASE
)
# What pages mean by these names, and browsers read: its superset, that has quotation marks and dashes.
_MEANT = dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"), "windows-1252")
_HEADER = re.compile(r"charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)
# The site wraps the work itself in these comments: the inner pair where a page has it, else the outer one.
_LIB_RU = (
    (re.compile("<!--Section Begins-->"), re.compile("<!--Section Ends-->")),
    (re.compile("<!-+ *Собственно произведение *-*>"), re.compile("<!-+ *Блок описания произведения|<!-{20,}>")),
)
# While white space is folded: where a line ends, and the white space of <pre>, that stays.
_LINE_END = "\x00"
_KEPT = (("\x01", " "), ("\x02", "\n"), ("\x03", "\t"))


def html_to_text(
    data: bytes, content_type: str = "", profile: Literal["none", "lib.ru"] = "none", encoding: str = "auto"
) -> str:
    """The text of a page. Raises NotText when its bytes are none in the encoding given or declared.

    The encoding is the one given, else by byte order mark, HTTP header, `<meta>` or XML declaration, else detected.
    """
    page = _decode(data, content_type) if encoding == "auto" else decode(data, encoding)
    page = re.sub("[\x00-\x03]", "", page)
    if profile == "lib.ru":
        page = _lib_ru(page)
    # Removed before parsing: an unclosed comment would swallow the rest of the page.
    page = _without_comments(page)
    tree = LexborHTMLParser(page)
    root = tree.body or tree.root
    return _lines(_pieces(root)) if root is not None else ""


def _decode(data: bytes, content_type: str) -> str:
    if marked_encoding(data):
        return decode(data)
    named = _HEADER.search(content_type)
    declared = _DECLARED.search(data[:4096])
    for name in (named and named[1], declared and (declared[1] or declared[2]).decode()):
        if name and not name.lower().startswith("utf-16"):  # a page that can be read so far is not in it
            try:
                return decode(data, _MEANT.get(name.lower(), name))
            except (NotText, LookupError):
                continue  # a wrong declaration is common; the bytes decide
    return decode(data)


def _without_comments(page: str) -> str:
    pieces: list[str] = []
    at = 0
    # Not a regular expression: `<!--.*?-->` takes quadratic time where many comments begin and none ends.
    while (start := page.find("<!--", at)) >= 0 and (end := page.find("-->", start + 2)) >= 0:
        pieces.append(page[at:start])
        at = end + 3
    return "".join(pieces) + page[at:].replace("<!--", "")


def _lib_ru(page: str) -> str:
    """The work between the site's own marks; the whole page where they are missing."""
    for begin, end in _LIB_RU:
        first = begin.search(page)
        if first:
            last = end.search(page, first.end())
            return "<body>" + page[first.end() : last.start() if last else len(page)]
    return page


def _pieces(root: LexborNode) -> list[str]:
    """Text in document order, the white space of <pre> put by; a block element ends a line before and after it."""
    pieces: list[str] = []
    stack: list[tuple[LexborNode | None, bool]] = [(root, False)]
    while stack:  # no recursion: a page may nest ten thousand deep
        node, preformatted = stack.pop()
        if node is None:
            pieces.append(_LINE_END)
            continue
        if node.is_text_node:
            text = node.text_content or ""
            if preformatted:
                for stand_in, space in _KEPT:
                    text = text.replace(space, stand_in)
            pieces.append(text)
            continue
        if node.tag in _GONE:
            continue
        if node.tag in _BLOCKS:
            pieces.append(_LINE_END)
            stack.append((None, False))
        inside = preformatted or node.tag == "pre"
        stack.extend((child, inside) for child in reversed(list(node.iter(include_text=True))))
    return pieces


def _lines(pieces: list[str]) -> str:
    # str.split and str.replace: ten times as fast as regular expressions here.
    folded = " ".join("".join(pieces).split())
    lines = (line.strip(" ") for line in folded.split(_LINE_END))
    text = "\n".join(line for line in lines if line)
    for stand_in, space in _KEPT:
        text = text.replace(stand_in, space)
    return text.strip("\n ")
