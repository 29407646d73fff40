"""The main text of a page that is mostly menus, teasers and notices: what trafilatura takes for it."""

from __future__ import annotations

import logging
import re

from artel.errors import missing_extra

# What XML has no characters for, and lxml refuses the whole page for.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def main_text(code: bytes, needed_for: str) -> str:
    """The main text of a page, given as HTML in UTF-8, a paragraph a line; empty where none is found.

    None is found either where elements nest over 255 deep: lxml reads no such page. It takes a core about a second for
    1.5 MB. Raises InputError when trafilatura is not installed; `needed_for` is the key or place that asks for it.
    """
    try:
        import trafilatura
    except ImportError:
        raise missing_extra("trafilatura", "pages", needed_for) from None
    # It tells of each page in which it finds nothing; the ledger counts them.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL + 1)
    # Neither its recall nor its precision is favoured: on old pages either loses the text.
    found = trafilatura.extract(_NOT_XML.sub("", code.decode("utf-8", "replace")), include_comments=False)
    return (found or "").strip()
