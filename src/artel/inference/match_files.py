"""Matches and corpora from files, and the vectors of their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from artel.config import DataConfig
from artel.errors import InputError
from artel.inference.open import OpenedModel
from artel.text import Document, Ledger, Match, count_drops, read_documents

_TEXTS = 1024
"""Texts between two lines about progress."""


def check_embeds(opened: OpenedModel) -> None:
    """Raise InputError for a model that gives texts no vectors."""
    if "embed" not in opened.objective.tasks:
        what = f"learned {opened.objective.config.objective}, which gives texts no vectors"
        raise InputError.at(opened.name, what, "give a model of objective embedding, or of sentence-transformers")


def merged_matches(data: str, ledger: Ledger) -> dict[str, tuple[list[str], list[str]]]:
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


def corpus_texts(path: str, ledger: Ledger) -> list[str]:
    """The texts of a file or glob: a line each, or JSON lines."""
    return [document.record.text for document in _documents({"path": path, "document": "line"}, ledger)]


def _documents(source: dict[str, Any], ledger: Ledger) -> Iterator[Document]:
    data = DataConfig.model_validate({"sources": [source], "validation": 0.0})
    return read_documents(data, ledger)


def tell_dropped(path: str, ledger: Ledger, tell: Callable[[str], None]) -> None:
    """Say how much of what was read is not used, and of what cannot be used (the first 1,000) where it stands."""
    total = ledger.total
    if total.dropped:
        tell(f"{path}: {total.read:,} documents read, {total.kept:,} kept, {count_drops(total.dropped)}")
    for rejected in ledger.listed:
        tell(f"{rejected.origin}: {rejected.detail}")


def unit_vectors(opened: OpenedModel, texts: Sequence[str], kind: str, tell: Callable[[str], None]) -> np.ndarray:
    """float32 (texts, size), of length 1."""
    found = []
    for start in range(0, len(texts), _TEXTS):
        part = [{"text": text, "input_type": kind} for text in texts[start : start + _TEXTS]]
        answers = opened.objective.answers(opened.model, "embed", part)
        found.append(np.array([answer["embedding"] for answer in answers], dtype=np.float32))
        tell(f"{min(start + _TEXTS, len(texts)):,} of {len(texts):,} {kind} texts have their vectors")
    vectors = np.concatenate(found)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
