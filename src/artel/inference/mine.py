"""Hard negatives: documents that a model takes for answers to a query, though the data name others.

Of the documents nearest to a query those are taken that are no positives of it, and not as near as one: what is as near
may well answer it, and the data do not say so (Moreira et al. 2024, "NV-Retriever", positive-aware mining).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from artel.config import DataConfig
from artel.errors import InputError
from artel.inference.open import OpenedModel
from artel.storage import check_new, write_file
from artel.text import Document, Ledger, Match, describe_drops, read_documents

_AT_ONCE = 1 << 24
"""Cosines that are held at a time."""
_TEXTS = 1024
"""Texts between two lines about progress."""


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
    if "embed" not in opened.objective.tasks:
        what = f"learned {opened.objective.run.objective}, which gives texts no vectors"
        raise InputError.at(opened.name, what, "give a model of objective embedding, or of sentence-transformers")
    check_new(out)
    of_data, of_corpus = Ledger(), Ledger()
    matches = _merged(data, of_data)
    texts = dict.fromkeys(text for positives, known in matches.values() for text in [*positives, *known])
    if corpus is not None:
        texts |= dict.fromkeys(_texts(corpus, of_corpus))
    for path, ledger in ((data, of_data), (corpus, of_corpus)):
        _tell_dropped(str(path), ledger, tell)
    documents = list(texts)
    places = {text: place for place, text in enumerate(documents)}
    corpus_vectors = _vectors(opened, documents, "document", tell)
    query_vectors = _vectors(opened, list(matches), "query", tell)
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
    write_file(out, b"\n".join(lines) + b"\n")
    return Mined(len(matches), len(documents), count, without, of_data.rejected + of_corpus.rejected)


def _merged(data: str, ledger: Ledger) -> dict[str, tuple[list[str], list[str]]]:
    """query -> (its positives, its negatives in the data), of all matches of a query."""
    merged: dict[str, tuple[list[str], list[str]]] = {}
    for document in _documents({"path": data, "format": "matches"}, ledger):
        match = document.record.fields
        assert isinstance(match, Match)
        if match.score is not None:
            what = "is a pair with a score: nothing in it says which documents answer a query"
            raise InputError.at(document.record.origin, what, "give queries with texts that match them")
        positives, known = merged.setdefault(match.query, ([], []))
        positives += [text for text in match.positives if text not in positives]
        known += [text for text in match.negatives if text not in known]
    return merged


def _texts(path: str, ledger: Ledger) -> list[str]:
    return [document.record.text for document in _documents({"path": path, "document": "line"}, ledger)]


def _documents(source: dict[str, Any], ledger: Ledger) -> Iterator[Document]:
    data = DataConfig.model_validate({"sources": [source], "validation": 0.0})
    return read_documents(data, ledger)


def _tell_dropped(path: str, ledger: Ledger, tell: Callable[[str], None]) -> None:
    """Say how much of what was read is not used, and of what cannot be used (the first 1,000) where it stands."""
    total = ledger.total
    if dropped := describe_drops(total.dropped):
        tell(f"{path}: {total.read:,} documents read, {total.kept:,} kept, {dropped} dropped")
    for rejected in ledger.listed:
        tell(f"{rejected.origin}: {rejected.detail}")


def _vectors(opened: OpenedModel, texts: list[str], kind: str, tell: Callable[[str], None]) -> np.ndarray:
    """float32 (texts, size), of length 1."""
    found = []
    for start in range(0, len(texts), _TEXTS):
        part = [{"text": text, "input_type": kind} for text in texts[start : start + _TEXTS]]
        answers = opened.objective.answers(opened.model, "embed", part)
        found.append(np.array([answer["embedding"] for answer in answers], dtype=np.float32))
        tell(f"{min(start + _TEXTS, len(texts)):,} of {len(texts):,} {kind} texts have their vectors")
    vectors = np.concatenate(found)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
