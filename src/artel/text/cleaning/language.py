"""The language of a text, by py3langid: 140 languages; its model is in the package."""

from __future__ import annotations

from functools import cache
from typing import Any

from artel.errors import InputError, missing_extra

# The language of shorter texts is uncertain: of paragraphs in Russian novels one in ten is taken for Bulgarian or
# Serbian.
_MIN_CHARACTERS = 100
# Characters examined at the start, in the middle and at the end: the first page may be in another language than the
# text, and three pages tell as much as a book.
_PAGE = 1000


def share_of_languages(text: str, languages: tuple[str, ...]) -> float | None:
    """The probability (0 to 1) that a text is in one of the languages (ISO 639 codes: ru, en); None if it is too short.

    Raises InputError at `data.clean.languages` if py3langid is not installed or does not know one of them.
    """
    identifier, known = _identifier()
    unknown = [code for code in languages if code not in known]
    if unknown:
        what = f"{', '.join(unknown)}: no language that can be identified"
        raise InputError.at("data.clean.languages", what, f"write some of: {', '.join(known)}")
    if len(text) < _MIN_CHARACTERS:
        return None
    if len(text) > 3 * _PAGE:
        middle = len(text) // 2 - _PAGE // 2
        text = "\n".join((text[:_PAGE], text[middle : middle + _PAGE], text[-_PAGE:]))
    return sum(share for code, share in identifier.rank(text) if code in languages)


@cache
def _identifier() -> tuple[Any, list[str]]:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise missing_extra("py3langid", "languages", "data.clean.languages") from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier, sorted(identifier.labels)
