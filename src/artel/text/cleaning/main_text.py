"""The main text of a page without menus, teasers and notices, by trafilatura."""

from __future__ import annotations

import logging
import re

from artel.errors import missing_extra

# Characters that XML does not allow; lxml refuses a page that has one.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def main_text(code: bytes, key: str) -> str:
    """The main text of a page (HTML in UTF-8), a paragraph per line; empty if none is found.

    None is found either if elements nest over 255 deep: lxml reads no such page. A core takes about a second for 1.5
    MB. Raises InputError at `key` if trafilatura is not installed.
    """
    try:
        import trafilatura
    except ImportError:
        raise missing_extra("trafilatura", "pages", key) from None
    # It logs each page in which it finds nothing; the ledger counts them.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL + 1)
    # Neither recall nor precision is favored: on old pages either loses the text.
    text = trafilatura.extract(_NOT_XML.sub("", code.decode("utf-8", "replace")), include_comments=False)
    return (text or "").strip()
