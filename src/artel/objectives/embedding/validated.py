"""The vectors of a validation split, put together again as matches, queries and a corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from artel.objectives.embedding.matches import DOCUMENT, HASH, POSITIVE, QUERY, ROLE, SCORE
from artel.tokens import StoreSplit


@dataclass(frozen=True, slots=True)
class ValidatedTexts:
    """Vectors of a split's texts, and what they are; a match that was not evaluated whole is left out."""

    vectors: np.ndarray
    """float32 (texts, size)."""
    roles: np.ndarray
    hashes: np.ndarray
    scores: np.ndarray
    matches: list[list[int]]
    """The places of the texts of each match, its query first."""
    documents: np.ndarray
    """The places of the corpus: documents, equal ones once."""

    @classmethod
    def of(cls, outputs: np.ndarray, part: StoreSplit) -> ValidatedTexts:
        numbers = np.asarray(part.numbers())
        count = len(outputs)
        if 0 < count < len(numbers):
            cut = numbers[count, DOCUMENT]
            count = int(np.searchsorted(numbers[:count, DOCUMENT], cut))
        numbers = numbers[:count]
        starts = np.flatnonzero(np.diff(numbers[:, DOCUMENT], prepend=-1))
        matches = [list(map(int, places)) for places in np.split(np.arange(count), starts[1:])] if count else []
        roles, hashes = numbers[:, ROLE], numbers[:, HASH]
        documents = np.flatnonzero(roles != QUERY)
        documents = documents[np.sort(np.unique(hashes[documents], return_index=True)[1])]
        return cls(outputs[:count], roles, hashes, numbers[:, SCORE], matches, documents)

    def questions(self) -> tuple[np.ndarray, list[np.ndarray], dict[int, int]]:
        """(places of queries, equal ones once; of each the documents that match it; its own text among the documents).

        Documents are counted in the corpus.
        """
        corpus = {int(self.hashes[place]): number for number, place in enumerate(self.documents)}
        asked: dict[int, int] = {}
        matching: dict[int, set[int]] = {}
        for match in self.matches:
            query = int(self.hashes[match[0]])
            asked.setdefault(query, match[0])
            positives = (int(self.hashes[text]) for text in match if self.roles[text] == POSITIVE)
            matching.setdefault(query, set()).update(corpus[each] for each in positives)
        relevant = [np.array(sorted(matching[query])) for query in asked]
        own = {number: corpus[query] for number, query in enumerate(asked) if query in corpus}
        own = {number: place for number, place in own.items() if place not in relevant[number]}
        return np.array(list(asked.values()), dtype=np.int64), relevant, own
