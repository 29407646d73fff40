"""Web pages to text: all visible text, line by line (`html_to_text`), or only the article (`main_text`)."""

from __future__ import annotations

import codecs
import logging
import re
from contextlib import suppress

from selectolax.lexbor import LexborDocumentOptions, LexborHTMLParser, LexborNode

from artel.errors import missing_extra
from artel.text.reading.encodings import decode_unchanged, detect_encoding, is_text_encoding, marked_encoding
from artel.text.records import BadRecord

_HIDDEN_TAGS = frozenset("script style noscript template head iframe object svg select textarea button".split())
_BLOCK_TAGS = frozenset(
    "address article aside blockquote body br caption center dd details div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header hr html legend li main nav ol p pre section summary table tbody td tfoot th thead "
    "tr ul".split()
)
_DECLARED_CHARSET = re.compile(
    rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)|<\?xml[^>]+encoding\s*=\s*["']([\w-]+)""", re.IGNORECASE
)
# Browsers treat these encodings as their superset, which has quotation marks and dashes.
_SUPERSETS = dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"), "windows-1252")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)
# The site lib.ru wraps the work itself in these comments: the inner pair if a page has it, else the outer one.
_LIB_RU = tuple(
    (re.compile(start.encode()), re.compile(end.encode()))
    for start, end in (
        ("<!--Section Begins-->", "<!--Section Ends-->"),
        ("<!-+ *Собственно произведение *-*>", "<!-+ *Блок описания произведения|<!-{20,}>"),
    )
)
# Marks that are inserted into the tree as text. Zeros are removed from the page first.
_LINE, _PRE, _PRE_END = "\0 ", "\0\1", "\0\2"
_MARKS = b"\0\1\2\3"
# These characters replace the white space of <pre> while other white space is folded.
_PRE_SPACES = (("\x01", " "), ("\x02", "\n"), ("\x03", "\t"))
# The tree takes up to 600 bytes per tag: 600 MB.
MAX_TAGS = 1_000_000
# For smaller pages and tags the parser takes a few seconds at most, whatever their attributes.
_LONG_PAGE_BYTES, _LONG_TAG_BYTES, _MAX_ATTRIBUTES = 100_000, 20_000, 5_000
_TAG = re.compile(rb"<[a-zA-Z]")
_SCRIPT = re.compile(rb"<(script|style)(?=[\s/>])", re.IGNORECASE)
_SCRIPT_END = {name: re.compile(b"</" + name, re.IGNORECASE) for name in (b"script", b"style")}
_QUOTED = re.compile(rb"\"[^\"]*\"|'[^']*'")
# The parser takes less than a second for any page with fewer tags; browsers nest 512 deep.
_MAX_UNCHECKED_TAGS = 20_000
_MAX_DEPTH = 2_000
_MAX_END_TAG_DISTANCE = 100  # an end tag closes its element only if it is among the last 100 open ones
_NAMES = re.compile(rb"<(/?[a-zA-Z][a-zA-Z0-9]*)")
_KEPT_TAGS = _HIDDEN_TAGS | {"html", "title", "body"}
_TAGS = re.compile(rb"</?([a-zA-Z][a-zA-Z0-9]*)[^<>]*>")
# Elements without content, and elements closed by the next of their kind or by their container.
_UNNESTED_NAMES = (
    b"area base br col embed hr img input link meta param source track wbr "
    b"p li dd dt tr td th tbody thead tfoot caption colgroup option optgroup html head body".split()
)
_UNNESTED_TAGS = frozenset([*_UNNESTED_NAMES, *(b"/" + tag for tag in _UNNESTED_NAMES)])
# Characters that XML does not allow. lxml refuses pages with one.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def html_to_text(data: bytes, content_type: str = "", profile: str = "none", encoding: str = "auto") -> str:
    """Return the text of a page, one block per line.

    The encoding is `encoding`, else that of a byte order mark, HTTP header, `<meta>` or XML declaration, else detected.
    Raise BadRecord if the bytes cannot be decoded, or the page has too many tags.
    """
    code = page_source(data, content_type, profile, encoding)
    if code.count(b"<") > _MAX_UNCHECKED_TAGS and _is_deep(code):
        code = _flatten(code)
    # Without events for scripts, parsing is twice as fast.
    tree = LexborHTMLParser(code, options=LexborDocumentOptions.WO_EVENTS)
    root = tree.body or tree.root
    return _split_lines(_mark_text(root)) if root is not None else ""


def page_source(data: bytes, content_type: str, profile: str, encoding: str) -> bytes:
    """Return the HTML of a page in UTF-8, without comments. A site's profile keeps only the work itself."""
    code = _to_utf_8(data, encoding) if encoding != "auto" else _detect_and_convert(data, content_type)
    if any(mark in code for mark in _MARKS):
        code = code.translate(None, _MARKS)
    if profile == "lib.ru":
        code = _extract_lib_ru_work(code)
    # Removed before parsing, since an unclosed comment would swallow the rest of the page.
    code = _remove_comments(code)
    if _parser_limit_error(code) is not None:
        code = _remove_scripts(code)
        if (error := _parser_limit_error(code)) is not None:
            raise error
    return code


def _parser_limit_error(code: bytes) -> BadRecord | None:
    """Return the error for a page that would take the parser minutes or all memory; None for other pages."""
    if len(code) > MAX_TAGS and (tags := code.count(b"<")) > MAX_TAGS:  # counting takes 6 % of a small page's time
        what = f"has {tags:,} tags, more than the maximum of {MAX_TAGS:,}; split it, or remove it"
        return BadRecord("too_many_tags", what)
    if len(code) > _LONG_PAGE_BYTES:
        max_attributes = max(
            (_count_attributes(chunk) for chunk in code.split(b">") if len(chunk) > _LONG_TAG_BYTES), default=0
        )
        if max_attributes > _MAX_ATTRIBUTES:
            what = f"has a tag with {max_attributes:,} attributes; remove it, or the page"
            return BadRecord("too_many_attributes", what)
    return None


def _remove_scripts(code: bytes) -> bytes:
    """Return the page without the content of scripts and styles, which is not text and may look like tags."""
    chunks: list[bytes] = []
    offset = 0
    while (start := _SCRIPT.search(code, offset)) and (end := _SCRIPT_END[start[1].lower()].search(code, start.end())):
        chunks += code[offset : start.start()], b"<%s></%s" % (start[1], start[1])
        offset = end.end()
    return b"".join(chunks) + code[offset:]


def _count_attributes(chunk: bytes) -> int:
    """Count the attributes of the tag at the end of `chunk`. The parser compares each with all before it."""
    tag = _TAG.search(chunk)
    return len(_QUOTED.sub(b"", chunk[tag.start() :]).replace(b"/", b" ").split()) if tag else 0


def _detect_and_convert(data: bytes, content_type: str) -> bytes:
    if marked_encoding(data):
        return _to_utf_8(data, detect_encoding(data))
    declared = _DECLARED_CHARSET.search(data[:4096])
    for name in (encoding_in_header(content_type), declared and (declared[1] or declared[2]).decode()):
        # A declaration that can be read as ASCII is not in UTF-16.
        if name and is_text_encoding(name) and not name.lower().startswith("utf-16"):
            with suppress(BadRecord):  # wrong declarations are common
                return _to_utf_8(data, _SUPERSETS.get(name.lower(), name))
    return _to_utf_8(data, detect_encoding(data))


def _to_utf_8(data: bytes, encoding: str) -> bytes:
    """Return the page in UTF-8. Line ends stay: the parser reads all kinds."""
    page = decode_unchanged(data, encoding)
    code = data if codecs.lookup(encoding).name == "utf-8" else page.encode("utf-8", "replace")
    return code.removeprefix(codecs.BOM_UTF8)


def encoding_in_header(content_type: str) -> str:
    """Return the encoding in an HTTP Content-Type header; empty if it has none."""
    match = _CHARSET.search(content_type)
    return match[1] if match else ""


def _remove_comments(code: bytes) -> bytes:
    if b"<!--" not in code:
        return code
    chunks: list[bytes] = []
    position = 0
    # Not a regular expression: `<!--.*?-->` takes quadratic time if many comments begin and none ends.
    while (start := code.find(b"<!--", position)) >= 0 and (end := code.find(b"-->", start + 2)) >= 0:
        chunks.append(code[position:start])
        position = end + 3
    return b"".join(chunks) + code[position:].replace(b"<!--", b"")


def _extract_lib_ru_work(code: bytes) -> bytes:
    """Return the work between the marks of the site; the full page if they are missing."""
    for start_mark, end_mark in _LIB_RU:
        if start_match := start_mark.search(code):
            end_match = end_mark.search(code, start_match.end())
            return b"<body>" + code[start_match.end() : end_match.start() if end_match else len(code)]
    return code


def _is_deep(code: bytes) -> bool:
    """True if thousands of elements are nested, or may be, because as many are closed in the wrong order.

    At each <div> the parser searches all open elements: 100,000 nested ones take half a minute.
    """
    open_tags: list[bytes] = []
    unclosed = 0
    for tag in _NAMES.findall(code):
        if tag in _UNNESTED_TAGS or (tag := tag.lower()) in _UNNESTED_TAGS:
            continue
        if tag[0] != ord("/"):
            open_tags.append(tag)
            if len(open_tags) + unclosed > _MAX_DEPTH:
                return True
        elif tag[1:] in open_tags[-_MAX_END_TAG_DISTANCE:]:
            while open_tags.pop() != tag[1:]:
                unclosed += 1  # the parser closes them by its own rules, or never
    return False


def _flatten(code: bytes) -> bytes:
    """Return the page without nesting: each block becomes a <br>, and only elements that hide text stay."""

    def flatten_tag(tag: re.Match[bytes]) -> bytes:
        name = tag[1].lower().decode("ascii", "replace")
        return tag[0] if name in _KEPT_TAGS else b"<br>" if name in _BLOCK_TAGS else b""

    return _TAGS.sub(flatten_tag, code)


def _mark_text(root: LexborNode) -> str:
    """Return the visible text, with marks at line ends and around preformatted text."""
    hidden: list[LexborNode] = []
    blocks: list[LexborNode] = []
    preformatted: list[LexborNode] = []
    lists = dict.fromkeys(_HIDDEN_IDS, hidden) | dict.fromkeys(_BLOCK_IDS, blocks) | {_PRE_ID: preformatted}
    for node in root.traverse():
        if (nodes := lists.get(node.tag_id)) is not None:
            nodes.append(node)
    for node in hidden:
        node.decompose(recursive=False)
    inside_pre = _ids_inside(preformatted)
    for node in blocks[1:]:  # the first is the root
        node.insert_before(_LINE)
        # Inserting a second mark costs three times as much as checking for one. In <pre>, white space is a line too.
        if (inside_pre and node.mem_id in inside_pre) or not _next_ends_line(node):
            node.insert_after(_LINE)
    for node in preformatted:
        node.insert_before(_PRE)
        node.insert_after(_PRE_END)
    return root.text()


def _ids_inside(nodes: list[LexborNode]) -> set[int]:
    """Return the ids of all elements inside `nodes`, which are in document order."""
    ids: set[int] = set()
    for node in nodes:
        if node.mem_id not in ids:
            ids.update(inner.mem_id for inner in node.traverse())
    return ids


def _next_ends_line(node: LexborNode) -> bool:
    """True if the element after a block ends the line anyway."""
    neighbour = node.next
    if neighbour is not None and neighbour.is_empty_text_node:
        neighbour = neighbour.next
    if neighbour is None:
        neighbour = node.parent
    return neighbour is not None and neighbour.tag_id in _BLOCK_IDS


def _split_lines(marked_text: str) -> str:
    """Return the non-empty lines of a marked text. White space is folded, except in <pre>."""
    lines: list[str] = []
    preformatted = 0
    for section in marked_text.split(_PRE) if _PRE[1] in marked_text else [marked_text]:
        for index, chunk in enumerate(section.split(_PRE_END) if _PRE_END[1] in section else [section]):
            preformatted -= index > 0
            lines += map(_fold_preformatted, chunk.split(_LINE)) if preformatted else _fold_lines(chunk)
        preformatted += 1
    return "\n".join(line for line in lines if line).strip("\n ")


def _fold_preformatted(line: str) -> str:
    """Fold white space of a line of <pre>, except spaces, tabs and line feeds."""
    for placeholder, space in _PRE_SPACES:
        line = line.replace(space, placeholder)
    line = " ".join(line.split())
    for placeholder, space in _PRE_SPACES:
        line = line.replace(placeholder, space)
    return line


def _fold_lines(text: str) -> list[str]:
    text = text.replace("\n", " ").replace("\t", " ").replace("\xa0", " ")
    return [_fold_spaces(line.strip(" ")) for line in text.split("\0")]  # strips the space of the mark too


def _fold_spaces(line: str) -> str:
    """Return `" ".join(line.split())`, five times as fast for most lines."""
    if not line.isprintable():  # the space is the only printable white space
        return " ".join(line.split())
    while "  " in line:
        line = line.replace("  ", " ")
    return line


def _tag_ids(names: frozenset[str]) -> frozenset[int]:
    tree = LexborHTMLParser("")
    return frozenset(tree.create_node(name).tag_id for name in names)


_HIDDEN_IDS, _BLOCK_IDS = _tag_ids(_HIDDEN_TAGS), _tag_ids(_BLOCK_TAGS)
(_PRE_ID,) = _tag_ids(frozenset({"pre"}))


def main_text(code: bytes, key: str) -> str:
    """Return the main text of a page (HTML in UTF-8), found by trafilatura: no menus, teasers and notices.

    A line is a paragraph. The text is empty if none is found, or if elements nest over 255 deep, which lxml cannot
    read. One core takes about a second for 1.5 MB. Raise InputError at `key` if trafilatura is not installed.
    """
    try:
        import trafilatura
    except ImportError:
        raise missing_extra("trafilatura", "pages", key) from None
    # trafilatura logs each page without main text. The ledger counts these pages.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL + 1)
    # Favoring recall or precision loses the text of old pages.
    text = trafilatura.extract(_NOT_XML.sub("", code.decode("utf-8", "replace")), include_comments=False)
    return (text or "").strip()
