"""Hard negatives: documents that a model takes for answers to a query, though the data name others.

Of the documents nearest to a query those are taken that are no positives of it, and not as near as one: what is as near
may well answer it, and the data do not say so (Moreira et al. 2024, "NV-Retriever", positive-aware mining).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from artel.inference.match_files import check_embeds, corpus_texts, merged_matches, tell_dropped, unit_vectors
from artel.inference.open import OpenedModel
from artel.storage import check_new_file, write_output
from artel.text import Ledger

_AT_ONCE = 1 << 24
"""Cosines that are held at a time."""


@dataclass(frozen=True, slots=True)
class Mined:
    """What was mined, and written."""

    queries: int
    documents: int
    """Of the corpus."""
    negatives: int
    without: int
    """Queries for which no document was left."""
    rejected: int
    """Records of the data and the corpus that cannot be used."""


def mine(
    opened: OpenedModel,
    data: str,
    out: Path,
    *,
    negatives: int,
    margin: float,
    corpus: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Mined:
    """Write the matches of `data` with negatives from among all of its documents, as JSON lines for format `matches`.

    Args:
        opened: a model of vectors.
        data: a file or glob of matches.
        out: the file to write.
        negatives: how many for each query, at most; those nearest to it.
        margin: by how much the cosine of a negative must be below that of the query's farthest positive.
        corpus: a file or glob of texts, a line each (or JSON lines), that are documents too.

    Raises InputError.
    """
    check_embeds(opened)
    check_new_file(out)
    of_data, of_corpus = Ledger(), Ledger()
    matches = merged_matches(data, of_data)
    texts = dict.fromkeys(text for positives, known in matches.values() for text in [*positives, *known])
    if corpus is not None:
        texts |= dict.fromkeys(corpus_texts(corpus, of_corpus))
    for path, ledger in ((data, of_data), (corpus, of_corpus)):
        tell_dropped(str(path), ledger, tell)
    documents = list(texts)
    places = {text: place for place, text in enumerate(documents)}
    corpus_vectors = unit_vectors(opened, documents, "document", tell)
    query_vectors = unit_vectors(opened, list(matches), "query", tell)
    lines, count, without = [], 0, 0
    at_once = max(1, _AT_ONCE // len(documents))
    for number, (query, (positives, known)) in enumerate(matches.items()):
        if number % at_once == 0:
            cosines = query_vectors[number : number + at_once] @ corpus_vectors.T
        row = cosines[number % at_once]
        own = [places[text] for text in positives]
        limit = row[own].min() - margin
        row[own] = -np.inf
        row[[places[text] for text in (query, *known) if text in places]] = -np.inf
        nearest = np.argsort(-np.where(row <= limit, row, -np.inf), kind="stable")[:negatives]
        found = [documents[place] for place in nearest if -np.inf < row[place] <= limit]
        count, without = count + len(found), without + (not found)
        lines.append(orjson.dumps({"query": query, "pos": positives, "neg": [*known, *found]}))
    write_output(out, b"\n".join(lines) + b"\n")
    return Mined(len(matches), len(documents), count, without, of_data.rejected + of_corpus.rejected)
