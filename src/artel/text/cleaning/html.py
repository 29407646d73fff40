"""Web pages to text: what a reader sees, line by line, without the page's machinery."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from typing import Literal

from selectolax.lexbor import LexborDocumentOptions, LexborHTMLParser, LexborNode

from artel.text.reading.encodings import decode_unchanged, detect_encoding, is_text_encoding, marked_encoding
from artel.text.records import BadRecord

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
_LIB_RU = tuple(
    (re.compile(begin.encode()), re.compile(end.encode()))
    for begin, end in (
        ("<!--Section Begins-->", "<!--Section Ends-->"),
        ("<!-+ *Собственно произведение *-*>", "<!-+ *Блок описания произведения|<!-{20,}>"),
    )
)
# Put into the tree as text, to be found in the text of the whole page, which has no zeros of its own.
_LINE, _PRE, _PRE_END = "\0 ", "\0\1", "\0\2"
_MARKS = b"\0\1\2\3"
# While white space is folded, that of <pre> goes by other characters.
_STAND_INS = (("\x01", " "), ("\x02", "\n"), ("\x03", "\t"))


def html_to_text(
    data: bytes, content_type: str = "", profile: Literal["none", "lib.ru"] = "none", encoding: str = "auto"
) -> str:
    """The text of a page, a block of it per line.

    The encoding is the one given, else by byte order mark, HTTP header, `<meta>` or XML declaration, else detected.
    Raises BadRecord if the bytes are no text in the encoding given or declared, or the page has too many tags.
    """
    code = page_source(data, content_type, profile, encoding)
    if code.count(b"<") > _MANY_TAGS and _is_deep(code):
        code = _flat(code)
    # Twice as fast without events, which scripts would listen to.
    tree = LexborHTMLParser(code, options=LexborDocumentOptions.WO_EVENTS)
    root = tree.body or tree.root
    return _lines(_marked_text(root)) if root is not None else ""


def page_source(data: bytes, content_type: str, profile: Literal["none", "lib.ru"], encoding: str) -> bytes:
    """The HTML of a page in UTF-8, without its comments; by the profile of its site only of the work itself."""
    code = _in_utf_8(data, encoding) if encoding != "auto" else _found_in_utf_8(data, content_type)
    if any(mark in code for mark in _MARKS):
        code = code.translate(None, _MARKS)
    if profile == "lib.ru":
        code = _lib_ru(code)
    # Removed before parsing: an unclosed comment would swallow the rest of the page.
    code = _without_comments(code)
    if _too_much(code) is not None:
        code = _without_scripts(code)
        if (wrong := _too_much(code)) is not None:
            raise wrong
    return code


def _too_much(code: bytes) -> BadRecord | None:
    """What is wrong with a page that would take the parser minutes, or all memory."""
    if len(code) > MOST_TAGS and (tags := code.count(b"<")) > MOST_TAGS:  # counting takes 6 % of a small page's time
        what = f"has {tags:,} tags, and of a page no more than {MOST_TAGS:,} are read; cut it up, or leave it out"
        return BadRecord("too_many_tags", what)
    if len(code) > _LONG_PAGE:
        most = max((_attributes(piece) for piece in code.split(b">") if len(piece) > _LONG_TAG), default=0)
        if most > _MOST_ATTRIBUTES:
            what = f"has a tag with {most:,} attributes; take it out, or leave the page out"
            return BadRecord("too_many_attributes", what)
    return None


def _without_scripts(code: bytes) -> bytes:
    """The page without what stands in its scripts and styles, which is no text and looks like tags."""
    pieces: list[bytes] = []
    at = 0
    while (start := _SCRIPT.search(code, at)) and (end := _SCRIPT_END[start[1].lower()].search(code, start.end())):
        pieces += code[at : start.start()], b"<%s></%s" % (start[1], start[1])
        at = end.end()
    return b"".join(pieces) + code[at:]


def _attributes(piece: bytes) -> int:
    """How many attributes the tag at the end of a piece has: the parser compares each with all before it."""
    tag = _TAG.search(piece)
    return len(_QUOTED.sub(b"", piece[tag.start() :]).replace(b"/", b" ").split()) if tag else 0


def _found_in_utf_8(data: bytes, content_type: str) -> bytes:
    if marked_encoding(data):
        return _in_utf_8(data, detect_encoding(data))
    declared = _DECLARED.search(data[:4096])
    for name in (encoding_in_header(content_type), declared and (declared[1] or declared[2]).decode()):
        # A page that can be read so far is not in UTF-16.
        if name and is_text_encoding(name) and not name.lower().startswith("utf-16"):
            with suppress(BadRecord):  # a wrong declaration is common; the bytes decide
                return _in_utf_8(data, _MEANT.get(name.lower(), name))
    return _in_utf_8(data, detect_encoding(data))


def _in_utf_8(data: bytes, encoding: str) -> bytes:
    """The page in UTF-8, its line ends as they are: the parser reads all kinds."""
    page = decode_unchanged(data, encoding)
    code = data if codecs.lookup(encoding).name == "utf-8" else page.encode("utf-8", "replace")
    return code.removeprefix(codecs.BOM_UTF8)


def encoding_in_header(content_type: str) -> str:
    """The encoding that an HTTP header Content-Type names, if any."""
    found = _HEADER.search(content_type)
    return found[1] if found else ""


def _without_comments(code: bytes) -> bytes:
    if b"<!--" not in code:
        return code
    pieces: list[bytes] = []
    at = 0
    # Not a regular expression: `<!--.*?-->` takes quadratic time where many comments begin and none ends.
    while (start := code.find(b"<!--", at)) >= 0 and (end := code.find(b"-->", start + 2)) >= 0:
        pieces.append(code[at:start])
        at = end + 3
    return b"".join(pieces) + code[at:].replace(b"<!--", b"")


def _lib_ru(code: bytes) -> bytes:
    """The work between the site's own marks; the whole page where they are missing."""
    for begin, end in _LIB_RU:
        first = begin.search(code)
        if first:
            last = end.search(code, first.end())
            return b"<body>" + code[first.end() : last.start() if last else len(code)]
    return code


def _is_deep(code: bytes) -> bool:
    """Whether thousands of elements stand in one another, or may, as so many are closed in the wrong order.

    The parser looks through all that are open at each <div>: 100,000 of them in one another take half a minute.
    """
    opened: list[bytes] = []
    unclosed = 0
    for tag in _NAMES.findall(code):
        if tag in _FLAT or (tag := tag.lower()) in _FLAT:
            continue
        if tag[0] != ord("/"):
            opened.append(tag)
            if len(opened) + unclosed > _DEEP:
                return True
        elif tag[1:] in opened[-_NEAR:]:
            while opened.pop() != tag[1:]:
                unclosed += 1  # by this tag or never: the parser has its own rules
    return False


def _flat(code: bytes) -> bytes:
    """The page without its structure: blocks end lines as <br> does, what is not to be read is still marked as such."""

    def flat(tag: re.Match[bytes]) -> bytes:
        name = tag[1].lower().decode("ascii", "replace")
        return tag[0] if name in _KEPT_TAGS else b"<br>" if name in _BLOCKS else b""

    return _TAGS.sub(flat, code)


def _marked_text(root: LexborNode) -> str:
    """All the text to be read, with marks where lines end and where preformatted text begins and ends."""
    gone: list[LexborNode] = []
    blocks: list[LexborNode] = []
    preformatted: list[LexborNode] = []
    lists = dict.fromkeys(_GONE_IDS, gone) | dict.fromkeys(_BLOCK_IDS, blocks) | {_PRE_ID: preformatted}
    for node in root.traverse():
        if (found := lists.get(node.tag_id)) is not None:
            found.append(node)
    for node in gone:
        node.decompose(recursive=False)
    inside = _inside(preformatted)
    for node in blocks[1:]:  # the first is the root
        node.insert_before(_LINE)
        # A mark costs three times as much as to look; but in <pre> white space is a line too.
        if (inside and node.mem_id in inside) or not _ends_with_others(node):
            node.insert_after(_LINE)
    for node in preformatted:
        node.insert_before(_PRE)
        node.insert_after(_PRE_END)
    return root.text()


def _inside(nodes: list[LexborNode]) -> set[int]:
    """The elements in some, given in their order."""
    found: set[int] = set()
    for node in nodes:
        if node.mem_id not in found:
            found.update(each.mem_id for each in node.traverse())
    return found


def _ends_with_others(node: LexborNode) -> bool:
    """Whether a line ends behind a block anyway, for what follows it."""
    after = node.next
    if after is not None and after.is_empty_text_node:
        after = after.next
    if after is None:
        after = node.parent
    return after is not None and after.tag_id in _BLOCK_IDS


def _lines(marked: str) -> str:
    """The text of the marked one: white space folded, but for that of <pre>, and empty lines left out."""
    lines: list[str] = []
    preformatted = 0
    for part in marked.split(_PRE) if _PRE[1] in marked else [marked]:
        for number, piece in enumerate(part.split(_PRE_END) if _PRE_END[1] in part else [part]):
            preformatted -= number > 0
            lines += map(_kept, piece.split(_LINE)) if preformatted else _folded_lines(piece)
        preformatted += 1
    return "\n".join(line for line in lines if line).strip("\n ")


def _kept(line: str) -> str:
    """A line of <pre>: only white space that is none of a line's own is folded."""
    for stand_in, space in _STAND_INS:
        line = line.replace(space, stand_in)
    line = " ".join(line.split())
    for stand_in, space in _STAND_INS:
        line = line.replace(stand_in, space)
    return line


def _folded_lines(text: str) -> list[str]:
    text = text.replace("\n", " ").replace("\t", " ").replace("\xa0", " ")
    return [_folded(line.strip(" ")) for line in text.split("\0")]  # a mark's own space goes too


def _folded(line: str) -> str:
    """`" ".join(line.split())`, in a fifth of the time for most lines."""
    if not line.isprintable():  # of all white space only the space is
        return " ".join(line.split())
    while "  " in line:
        line = line.replace("  ", " ")
    return line


def _ids(names: frozenset[str]) -> frozenset[int]:
    tree = LexborHTMLParser("")
    return frozenset(tree.create_node(name).tag_id for name in names)


_GONE_IDS, _BLOCK_IDS = _ids(_GONE), _ids(_BLOCKS)
(_PRE_ID,) = _ids(frozenset({"pre"}))
# The tree takes up to 600 bytes for each: so many take 600 MB.
MOST_TAGS = 1_000_000
# Smaller pages and tags take it few seconds, whatever attributes they have.
_LONG_PAGE, _LONG_TAG, _MOST_ATTRIBUTES = 100_000, 20_000, 5_000
_TAG = re.compile(rb"<[a-zA-Z]")
_SCRIPT = re.compile(rb"<(script|style)(?=[\s/>])", re.IGNORECASE)
_SCRIPT_END = {name: re.compile(b"</" + name, re.IGNORECASE) for name in (b"script", b"style")}
_QUOTED = re.compile(rb"\"[^\"]*\"|'[^']*'")
# Pages with fewer tags take the parser less than a second, whatever they are; browsers nest 512 deep.
_MANY_TAGS = 20_000
_DEEP = 2_000
_NEAR = 100  # so far up among the open elements an end tag finds its own
_NAMES = re.compile(rb"<(/?[a-zA-Z][a-zA-Z0-9]*)")
_KEPT_TAGS = _GONE | {"html", "title", "body"}
_TAGS = re.compile(rb"</?([a-zA-Z][a-zA-Z0-9]*)[^<>]*>")
# Elements that hold none, and those that the next of their kind, or their container, closes.
_FLAT_TAGS = (
    b"area base br col embed hr img input link meta param source track wbr "
    b"p li dd dt tr td th tbody thead tfoot caption colgroup option optgroup html head body".split()
)
_FLAT = frozenset([*_FLAT_TAGS, *(b"/" + tag for tag in _FLAT_TAGS)])
