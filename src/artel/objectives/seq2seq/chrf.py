"""chrF: how near a text is to the one that was expected, by n-grams of characters (Popović 2015).

Words of a language with many endings count in part where their stems are right, and nothing depends on a tokenizer of
words. As sacrebleu computes it with its defaults: n-grams of 1 to 6 characters without white space, recall twice as
important as precision, over all texts together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_ORDER = 6
_BETA = 2


def chrf(pairs: Iterable[tuple[str, str]]) -> float:
    """chrF2 of (written, expected) texts together, from 0 to 100."""
    written, expected, common = ([0] * _ORDER for _ in range(3))
    for text, reference in pairs:
        characters = "".join(text.split()), "".join(reference.split())
        for order in range(_ORDER):
            here, there = (_ngrams(each, order + 1) for each in characters)
            # As in sacrebleu: a text without n-grams of a length has no precision there.
            written[order] += here.total() if there else 0
            expected[order] += there.total()
            common[order] += (here & there).total()
    precisions, recalls, orders = 0.0, 0.0, 0
    for order in range(_ORDER):
        if written[order] and expected[order]:
            precisions += common[order] / written[order]
            recalls += common[order] / expected[order]
            orders += 1
    if not orders or not precisions + recalls:
        return 0.0
    precision, recall = precisions / orders, recalls / orders
    return 100 * (1 + _BETA**2) * precision * recall / (_BETA**2 * precision + recall)


def _ngrams(text: str, size: int) -> Counter[str]:
    return Counter(text[start : start + size] for start in range(len(text) - size + 1))
