"""Samples for training embeddings, and the choice of texts per step.

A training sample is a match: the concatenated ids of its query, positives and negatives. The flag of each first token
is the role of its text. A validation sample is one text: every text of the split gets a vector, and queries are looked
up among all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from artel.config import EmbeddingConfig
from artel.objectives.decoding import first_words
from artel.objectives.types import DocumentSamples
from artel.text import Document, Match, Rejected
from artel.tokens import Sample, Tokenizer

QUERY, POSITIVE, NEGATIVE = 1, 2, 3
"""The role of a text in its match."""
PADDING, OTHER_POSITIVE = 0, 4
"""Roles of rows without loss: a padding row; a positive that is not used in this step."""
DOCUMENT, ROLE, HASH, SCORE = range(4)
"""The columns of a sample's numbers: its match in the split; the role of a validation text (0 in training); the
`text_hash` of that text, or of the match's query; the score in millionths.

A query is hashed with the documents' prompt, so that a query that is also a document gets the same hash.
"""
SCORE_SCALE = 1_000_000


class MatchReader:
    """Turns matches into samples."""

    def __init__(self, tokenizer: Tokenizer, embedding: EmbeddingConfig, block: int) -> None:
        self.frame = tokenizer.frame(required=False)
        self._tokenizer = tokenizer
        self._embedding = embedding
        self._max_length = block - self.frame.size

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected]:
        """Yield the samples of each match. Texts are cut to `block` tokens, which the ledger counts."""
        matches = [document.record.fields for document in documents]
        prompts, texts = self._embedding.prompts, []
        for match in matches:
            assert isinstance(match, Match)
            texts += [prompts.query + match.query, *(prompts.document + text for text in match.texts[1:])]
        as_documents = [prompts.document + match.query for match in matches if isinstance(match, Match)]
        ids = self._tokenizer.encode(texts)
        queries = self._tokenizer.encode(as_documents if prompts.query != prompts.document else [])
        for document, match in zip(documents, matches, strict=True):
            assert isinstance(match, Match)
            encoded = [next(ids) for _ in match.texts]
            query = self.add_special_tokens(next(queries, encoded[0]))
            problem = self._find_problem(match, encoded)
            if problem is not None:
                yield Rejected(document.record.origin, *problem, document.record.set_name)
            else:
                yield self._convert(match, encoded, text_hash(query), is_validation=document.split == "validation")

    def add_special_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return a text's ids with special tokens, cut to the block, int64."""
        return np.concatenate([self.frame.before, ids[: self._max_length], self.frame.after]).astype(np.int64)

    def first_query_words(self, sample: Sample) -> str:
        """Return the first words of a training sample's query, without its prompt."""
        assert sample.flags is not None
        query = np.split(sample.ids, np.flatnonzero(sample.flags)[1:])[0]
        (prompt,) = self._tokenizer.encode([self._embedding.prompts.query.rstrip()])
        text_ids = query[len(self.frame.before) : len(query) - len(self.frame.after)]
        return first_words(self._tokenizer, text_ids[len(prompt) :])

    def _find_problem(self, match: Match, encoded: list[np.ndarray]) -> tuple[str, str] | None:
        """Return (reason, detail with a fix) for a match that the loss cannot learn from, or None."""
        loss, uses_scores = self._embedding.loss, self._embedding.learns_scores
        if any(len(ids) == 0 for ids in encoded):
            return "empty", "one of its texts is empty after tokenization"
        if uses_scores and match.score is None:
            return "no_score", f"it has no score, but loss {loss} needs one; set loss: in_batch_negatives"
        if not uses_scores and match.score is not None:
            return "score", f"it has a score, but loss {loss} does not use scores; set loss: cosine"
        if loss == "triplet" and not match.negatives:
            return "no_negative", "it has no negative, but loss triplet needs one; set loss: in_batch_negatives"
        largest_score = self._embedding.largest_score
        if loss == "cosine" and match.score is not None and abs(match.score) > largest_score:
            what = f"its score is {match.score:g}, over embedding.largest_score ({largest_score:g})"
            return "score", f"{what}: set it to the score of identical texts"
        return None

    def _convert(self, match: Match, encoded: list[np.ndarray], query: int, *, is_validation: bool) -> DocumentSamples:
        """Return the samples. `query`: hash of the query."""
        roles = [QUERY, *(POSITIVE for _ in match.positives), *(NEGATIVE for _ in match.negatives)]
        score = round((match.score or 0.0) / self._embedding.largest_score * SCORE_SCALE)
        texts = [self.add_special_tokens(ids) for ids in encoded]
        num_truncated = sum(len(ids) > self._max_length for ids in encoded)
        counts = {"truncated": num_truncated} if num_truncated else {}
        if is_validation:
            hashes = [query, *map(text_hash, texts[1:])]
            samples = [
                Sample(ids, np.zeros(len(ids), dtype=np.uint8), (0, role, hashed, score))
                for ids, role, hashed in zip(texts, roles, hashes, strict=True)
            ]
            return DocumentSamples(samples, counts=counts)
        flags = np.zeros(sum(map(len, texts)), dtype=np.uint8)
        flags[np.cumsum([0, *map(len, texts[:-1])])] = roles
        return DocumentSamples([Sample(np.concatenate(texts), flags, (0, 0, query, score))], counts=counts)


@dataclass(frozen=True, slots=True)
class StepTexts:
    """The texts of a match for one step."""

    query: np.ndarray
    positive: np.ndarray
    negatives: list[np.ndarray]
    other_positives: list[np.ndarray]


def choose_texts(ids: np.ndarray, flags: np.ndarray, max_negatives: int, key: str) -> StepTexts:
    """Choose one positive and at most `max_negatives` negatives of a training sample. Depends only on `key`."""
    starts = np.flatnonzero(flags)
    texts = np.split(ids, starts[1:])
    roles = flags[starts]
    positives, negatives = (
        [text for text, role in zip(texts, roles, strict=True) if role == kind] for kind in (POSITIVE, NEGATIVE)
    )
    positive_index, negative_indices = 0, list(range(len(negatives)))
    if len(positives) > 1 or len(negatives) > max_negatives:
        random = np.random.Generator(np.random.Philox(xxhash.xxh3_64_intdigest(key.encode())))
        positive_index = int(random.integers(len(positives)))
        negative_indices = sorted(random.permutation(len(negatives))[:max_negatives].tolist())
    return StepTexts(
        texts[0],
        positives[positive_index],
        [negatives[index] for index in negative_indices],
        [text for index, text in enumerate(positives) if index != positive_index],
    )


def text_hash(ids: np.ndarray) -> int:
    """Return 63 bits of a hash of a text's ids, the same in all processes."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes()) >> 1
