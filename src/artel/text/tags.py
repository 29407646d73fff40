"""Tags of words (B-PER, I-PER, O) and the entities that they stand for, as conlleval and seqeval read them."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE = "O"
BEGIN, INSIDE, END, SINGLE = "B", "I", "E", "S"
_PREFIXES = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}


def split_tag(tag: str) -> tuple[str, str]:
    """(prefix, type) of a tag: the prefix is one of BIOES, whichever letters the scheme has for it.

    A tag without a prefix continues its type; `O` has the type "".
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    letter, dash, kind = tag.partition("-")
    return (_PREFIXES[letter], kind) if dash and kind and letter in _PREFIXES else (INSIDE, tag)


def has_prefix(tag: str) -> bool:
    """True for B-PER, L-PER; False for O, PER, NOUN."""
    return split_tag(tag)[1] not in ("", tag)


def entities_of(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first word, word after the last, type) of each entity that the tags of a sequence stand for.

    Every scheme is read by one rule, that of conlleval (Tjong Kim Sang and Buchholz 2000) and of seqeval's default: an
    entity begins at B and S, and at I and E where none of its type is open. So IOB1, IOB2 (BIO), BIOES and BILOU all
    give what they mean, and a sequence that is not well formed gives the nearest thing.
    """
    entities = []
    start, open_kind = 0, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        begins = kind != "" and (prefix in (BEGIN, SINGLE) or kind != open_kind)
        if open_kind and (begins or not kind):
            entities.append((start, place, open_kind))
            open_kind = ""
        if begins:
            start, open_kind = place, kind
        if open_kind and prefix in (END, SINGLE):
            entities.append((start, place + 1, open_kind))
            open_kind = ""
    return entities
