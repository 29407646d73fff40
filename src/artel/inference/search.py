"""Search a text with an embedder or a reranker: rank its paragraphs by how well they match a query."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from artel.errors import InputError
from artel.inference.match_files import unit_vectors
from artel.inference.open import OpenedModel
from artel.training.evaluation import ProgressMessages

_PAIRS = 64  # scored by a reranker between two lines of progress


@dataclass(frozen=True, slots=True)
class Hit:
    """A paragraph of the searched text."""

    line: int
    """Its first line, from 1."""
    text: str
    score: float
    """Cosine of query and paragraph (embedder), or the probability that they match (reranker)."""


def can_search(opened: OpenedModel) -> bool:
    """Return True if the model ranks texts by a query."""
    return not {"embed", "rerank"}.isdisjoint(opened.objective.tasks)


def search(opened: OpenedModel, query: str, text: str, tell: Callable[[str], None]) -> list[Hit]:
    """Rank the paragraphs of `text` by how well they match `query`, best first.

    Raise InputError if the query is empty or the text has no words.
    """
    if not query.strip():
        raise InputError.at("--prompt", "there is no query", 'write --prompt "WHAT TO LOOK FOR"')
    found = list(paragraphs(text))
    if not found:
        raise InputError.at("--context", "the text to search has no words", "give a text or a file with some")
    texts = [text for _, text in found]
    if "embed" in opened.objective.tasks:
        (vector,) = unit_vectors(opened, [query], "query", lambda line: None)
        scores = (unit_vectors(opened, texts, "document", tell) @ vector).tolist()
    else:
        scores = _pair_scores(opened, query, texts, tell)
    hits = [Hit(line, text, score) for (line, text), score in zip(found, scores, strict=True)]
    return sorted(hits, key=lambda hit: -hit.score)  # equal scores stay in the order of the text


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line from 1, paragraph). A text without blank lines has a paragraph a line."""
    separator = r"\n[ \t]*\n" if re.search(r"\S[ \t]*\n[ \t]*\n\s*\S", text) else r"\n"
    line, start = 1, 0
    for end, after in [*(match.span() for match in re.finditer(separator, text)), (len(text), len(text))]:
        paragraph = text[start:end]
        if paragraph.strip():
            blank = len(paragraph) - len(paragraph.lstrip())
            yield line + paragraph.count("\n", 0, blank), paragraph.strip()
        line += text.count("\n", start, after)
        start = after


def _pair_scores(opened: OpenedModel, query: str, texts: list[str], tell: Callable[[str], None]) -> list[float]:
    news, scores = ProgressMessages(tell, "scoring paragraphs:"), list[float]()
    for start in range(0, len(texts), _PAIRS):
        pairs = [(query, text) for text in texts[start : start + _PAIRS]]
        scores += [answer["score"] for answer in opened.objective.answers(opened.model, "rerank", pairs)]
        news(len(scores) / len(texts))
    return scores
