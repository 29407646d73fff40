"""Samples of a reranker, their rows `[CLS] query [SEP] document [SEP]`, and negatives drawn from other records.

A sample is the concatenation of a query, a document and the negatives of their record. The flag of a token tells which
text it belongs to. Its numbers are hashes of the query and the document, the bits of the score, and 1 if it has a
score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from artel.objectives.statistics import bits_to_floats, float_to_bits
from artel.objectives.types import DocumentSamples
from artel.text import Document, DroppedRecord, Match, Rejected
from artel.tokens import Sample, StoreSplit, Tokenizer
from artel.tokens.order import splitmix64

COLUMNS = 4
QUERY, DOCUMENT, SCORE, HAS_SCORE = range(COLUMNS)
"""The columns of a sample's numbers."""
QUERY_FLAG, DOCUMENT_FLAG, MAX_NEGATIVES = 0, 1, 254


class PairWriter:
    """Turns records into samples, and a query and a document into a row of at most `block` tokens."""

    def __init__(self, tokenizer: Tokenizer, block: int) -> None:
        """Raise InputError for a tokenizer without a separator between two texts."""
        self._tokenizer = tokenizer
        self._frame = tokenizer.frame(pair=True)
        self._block = block
        self.has_types = self._frame.second_type > 0

    @property
    def max_query_tokens(self) -> int:
        """Maximum tokens of a query: half of a row. Longer documents are truncated, longer queries are rejected."""
        return (self._block - self._frame.size) // 2

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        """Yield a sample for each query and matching document."""
        fields = [document.record.fields for document in documents]
        texts = [text for match in fields if isinstance(match, Match) for text in match.texts]
        encoded = self._tokenizer.encode(texts)
        for document, match in zip(documents, fields, strict=True):
            assert isinstance(match, Match)
            ids = [next(encoded) for _ in match.texts]
            yield self._convert(document, match, ids)

    def _convert(self, document: Document, match: Match, ids: list[np.ndarray]) -> DocumentSamples | Rejected:
        record = document.record
        query, count = ids[0], 1 + len(match.positives)
        positives, negatives = ids[1:count], [negative for negative in ids[count:] if len(negative)]
        num_empty = len(ids) - count - len(negatives)
        if not positives:
            detail = "none of its documents matches the query; add one, or remove it"
            return Rejected(record.origin, "no_positive", detail, record.set_name)
        if not len(query) or not all(map(len, positives)):
            name = "a document" if len(query) else "the query"
            return Rejected(record.origin, "empty", f"{name} has no token", record.set_name)
        if len(query) > self.max_query_tokens:
            detail = f"its query has {len(query)} tokens, more than the {self.max_query_tokens} of half a row: "
            detail += "raise data.block, or shorten the query"
            return Rejected(record.origin, "query_too_long", detail, record.set_name)
        if match.score is not None and not 0 <= match.score <= 1:
            detail = f"its score is {match.score:g}; write a number from 0 (does not match) to 1 (matches)"
            return Rejected(record.origin, "bad_score", detail, record.set_name)
        max_tokens = self._block - self._frame.size - len(query)
        num_truncated = sum(len(document_ids) > max_tokens for document_ids in (*positives, *negatives))
        counts = {"truncated": num_truncated} if num_truncated else {}
        num_skipped = num_empty + max(0, len(negatives) - MAX_NEGATIVES)
        if num_skipped:
            counts["negatives_left_out"] = num_skipped
        stored_negatives = [negative[: self._block] for negative in negatives[:MAX_NEGATIVES]]
        numbers = _hash(match.query), float_to_bits(match.score or 0.0), int(match.score is not None)
        samples = []
        for text, positive in zip(match.positives, positives, strict=True):
            texts = [query, positive[: self._block], *stored_negatives]
            flags = np.repeat(np.arange(len(texts), dtype=np.uint8), list(map(len, texts)))
            samples.append(Sample(np.concatenate(texts), flags, (numbers[0], _hash(text), *numbers[1:])))
        return DocumentSamples(samples, counts=counts)

    def row(self, query: np.ndarray, document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, token types), int64 (tokens,) each. Long documents are truncated."""
        frame = self._frame
        document = document[: self._block - frame.size - len(query)]
        first, second = (*frame.before, *query, *frame.between), (*document, *frame.after)
        types = np.repeat([0, frame.second_type], [len(first), len(second)])
        return np.array([*first, *second], dtype=np.int64), types


def split_texts(ids: np.ndarray, flags: np.ndarray) -> list[np.ndarray]:
    """Split a sample into its query, its document and its negatives."""
    ends = np.flatnonzero(np.diff(flags)) + 1
    return np.split(ids, ends)


def read_scores(numbers: np.ndarray) -> np.ndarray:
    """Return the scores in samples' numbers, float64 (samples,); NaN for samples without a score."""
    scores = bits_to_floats(numbers[:, SCORE])
    return np.where(numbers[:, HAS_SCORE] > 0, scores, np.nan)


def _hash(text: str) -> int:
    return int(np.uint64(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))).astype(np.int64))


_MAX_ROUNDS = 8
"""Rounds of drawing, each with four times as many numbers as documents needed."""


class NegativeSampler:
    """Draws documents of other records as negatives. Depends only on (seed, epoch, sample)."""

    def __init__(self, split: StoreSplit, seed: int) -> None:
        numbers = split.numbers().reshape(-1, COLUMNS)  # an empty split has no columns
        self._split, self._seed = split, seed
        self._queries, self._documents = np.asarray(numbers[:, QUERY]), np.asarray(numbers[:, DOCUMENT])
        self.has_matches = bool((numbers[:, HAS_SCORE] == 0).any())
        """True if any record names a match without a score."""
        self._by_query = np.argsort(self._queries, kind="stable")
        self._sorted = self._queries[self._by_query]

    def record_negatives(self, index: int) -> list[np.ndarray]:
        """Return the negatives in a sample's record."""
        sample = self._split.sample(index)
        assert sample.flags is not None
        return split_texts(sample.ids, sample.flags)[2:]

    def choose(self, negatives: list[np.ndarray], sample: int, epoch: int, limit: int) -> list[np.ndarray]:
        """Return up to `limit` of a record's negatives. If it has more, choose different ones in each epoch."""
        if len(negatives) <= limit:
            return negatives
        key = np.uint64(xxhash.xxh3_64_intdigest(f"{self._seed}:own:{epoch}:{sample}".encode()))
        with np.errstate(over="ignore"):
            order = np.argsort(splitmix64(key + np.arange(len(negatives), dtype=np.uint64)))
        return [negatives[index] for index in order[:limit].tolist()]

    def draw(
        self, sample: int, epoch: int, num_documents: int, negatives: Sequence[np.ndarray] = ()
    ) -> list[np.ndarray]:
        """Return the ids of up to `num_documents` different documents that no record names for this query.

        `negatives`: ids of the record's negatives. Returns fewer if the split has too few documents.
        """
        negative_bytes = {document.tobytes() for document in negatives}
        key = np.uint64(xxhash.xxh3_64_intdigest(f"{self._seed}:negatives:{epoch}:{sample}".encode()))
        start, end = (np.searchsorted(self._sorted, self._queries[sample], side) for side in ("left", "right"))
        known = set(self._documents[self._by_query[start:end]].tolist())
        chosen: list[int] = []
        num_drawn = 4 * num_documents
        for round_number in range(_MAX_ROUNDS if num_documents else 0):
            with np.errstate(over="ignore"):  # arithmetic modulo 2**64
                drawn = splitmix64(
                    key + np.arange(round_number * num_drawn, (round_number + 1) * num_drawn, dtype=np.uint64)
                )
            for index in (drawn % np.uint64(len(self._queries))).tolist():
                document = int(self._documents[index])
                if document not in known:
                    known.add(document)
                    if not negative_bytes or self._read_document(index).tobytes() not in negative_bytes:
                        chosen.append(index)
                if len(chosen) == num_documents:
                    return [self._read_document(index) for index in chosen]
        return [self._read_document(index) for index in chosen]

    def _read_document(self, index: int) -> np.ndarray:
        sample = self._split.sample(index)
        assert sample.flags is not None
        return sample.ids[sample.flags == DOCUMENT_FLAG]
