"""Documents of other records that stand in for ones that do not match a query.

Which ones is a function of (seed, epoch, sample), as the order of the samples is: not of what else is in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from artel.objectives.rerank.pairs import COLUMNS, DOCUMENT, DOCUMENT_FLAG, HAS_SCORE, QUERY
from artel.tokens import StoreSplit
from artel.tokens.sampling.order import splitmix64

_TRIES = 8
"""Rounds of drawing, each of four times as many numbers as documents are needed."""


class DrawnNegatives:
    """The documents of a split, to be drawn from."""

    def __init__(self, split: StoreSplit, seed: int) -> None:
        numbers = split.numbers().reshape(-1, COLUMNS)  # a split without samples has no columns
        self._split, self._seed = split, seed
        self._queries, self._documents = np.asarray(numbers[:, QUERY]), np.asarray(numbers[:, DOCUMENT])
        self._scored = np.asarray(numbers[:, HAS_SCORE])
        self._by_query = np.argsort(self._queries, kind="stable")
        self._sorted = self._queries[self._by_query]

    @property
    def has_matches(self) -> bool:
        """Whether any record says that its document matches, and not how well by a score."""
        return bool((self._scored == 0).any())

    def choose(self, own: list[np.ndarray], sample: int, epoch: int, count: int) -> list[np.ndarray]:
        """Up to `count` of a record's own negatives, others in each epoch where it has more."""
        if len(own) <= count:
            return own
        key = np.uint64(xxhash.xxh3_64_intdigest(f"{self._seed}:own:{epoch}:{sample}".encode()))
        with np.errstate(over="ignore"):
            order = np.argsort(splitmix64(key + np.arange(len(own), dtype=np.uint64)))
        return [own[number] for number in order[:count].tolist()]

    def draw(self, sample: int, epoch: int, count: int, own: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """Ids of up to `count` different documents that no record names for the query of a sample.

        `own` are the ids of the negatives that its record names. Fewer where the split has too few others.
        """
        named = {document.tobytes() for document in own}
        key = np.uint64(xxhash.xxh3_64_intdigest(f"{self._seed}:negatives:{epoch}:{sample}".encode()))
        known = set(self._documents[self._same_query(sample)].tolist())
        chosen: list[int] = []
        size = 4 * count
        for turn in range(_TRIES if count else 0):
            with np.errstate(over="ignore"):  # arithmetic modulo 2**64
                drawn = splitmix64(key + np.arange(turn * size, (turn + 1) * size, dtype=np.uint64))
            for index in (drawn % np.uint64(len(self._queries))).tolist():
                document = int(self._documents[index])
                if document not in known:
                    known.add(document)
                    if not named or self._document(index).tobytes() not in named:
                        chosen.append(index)
                if len(chosen) == count:
                    return [self._document(index) for index in chosen]
        return [self._document(index) for index in chosen]

    def _same_query(self, sample: int) -> np.ndarray:
        """The samples with the query of one."""
        query = self._queries[sample]
        first, last = (np.searchsorted(self._sorted, query, side) for side in ("left", "right"))
        return self._by_query[first:last]

    def _document(self, index: int) -> np.ndarray:
        sample = self._split.sample(index)
        assert sample.flags is not None
        return sample.ids[sample.flags == DOCUMENT_FLAG]
