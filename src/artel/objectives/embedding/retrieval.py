"""Metrics of vectors: retrieval of documents in a corpus, and the correlation of cosines with scores.

recall, MRR and nDCG at k as trec_eval and MTEB define them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artel.config import EmbeddingConfig
from artel.objectives.embedding.losses import MatchKeys, Texts, loss_sum, match_keys
from artel.objectives.embedding.matches import DOCUMENT, HASH, NEGATIVE, POSITIVE, QUERY, ROLE, SCORE
from artel.objectives.statistics import spearman
from artel.tokens import StoreSplit

Judgements = dict[int, float]
"""Index of a document in the corpus -> its relevance to a query, above 0; 1 for a match."""
DEPTH = 10
_RECALLS = (1, 5, DEPTH)
_MAX_COSINES = 1 << 24
"""Cosines in memory at a time."""


def retrieval_metrics(
    queries: np.ndarray, corpus: np.ndarray, judgements: Sequence[Judgements], excluded: Mapping[int, int]
) -> dict[str, float]:
    """Return recall_at_1, _5 and _10, mrr_at_10 and ndcg_at_10, means over the queries.

    Args:
        queries: (queries, size), unit vectors.
        corpus: (documents, size), unit vectors; ties rank in corpus order.
        judgements: relevant documents of each query, at least one.
        excluded: query -> a document to ignore, because it is the text of the query itself.
    """
    ranked = nearest(queries, corpus, DEPTH, excluded)
    gains = np.array(
        [
            [relevance.get(document, 0.0) for document in row]
            for row, relevance in zip(ranked.tolist(), judgements, strict=True)
        ]
    )
    counts = np.array([len(relevance) for relevance in judgements])
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    ideal = [sorted(relevance.values(), reverse=True)[:DEPTH] for relevance in judgements]
    ideal_gains = np.array([float(np.dot(discounts[: len(scores)], scores)) for scores in ideal])
    hits = gains > 0
    reciprocal_ranks = np.where(hits.any(axis=1), 1 / (1 + hits.argmax(axis=1)), 0.0)
    metrics = {f"recall_at_{depth}": float((hits[:, :depth].sum(axis=1) / counts).mean()) for depth in _RECALLS}
    return metrics | {
        f"mrr_at_{DEPTH}": float(reciprocal_ranks.mean()),
        f"ndcg_at_{DEPTH}": float(((gains * discounts[: gains.shape[1]]).sum(axis=1) / ideal_gains).mean()),
    }


def nearest(queries: np.ndarray, corpus: np.ndarray, num_nearest: int, excluded: Mapping[int, int]) -> np.ndarray:
    """Return the indices of up to `num_nearest` nearest documents of each query, nearest first; -1 for none."""
    num_nearest = min(num_nearest, len(corpus))
    indices = np.empty((len(queries), num_nearest), dtype=np.int64)
    chunk_size = max(1, _MAX_COSINES // max(1, len(corpus)))
    for start in range(0, len(queries), chunk_size):
        cosines = queries[start : start + chunk_size] @ corpus.T
        for row in range(len(cosines)):
            if (document := excluded.get(start + row)) is not None:
                cosines[row, document] = -np.inf
        order = np.argsort(-cosines, axis=1, kind="stable")[:, :num_nearest]
        order[np.take_along_axis(cosines, order, axis=1) == -np.inf] = -1
        indices[start : start + chunk_size] = order
    return indices


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Return unit vectors, (vectors, size)."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def lookup_metrics(validated: ValidatedTexts, vectors: np.ndarray, embedding: EmbeddingConfig) -> dict[str, float]:
    """Return retrieval metrics of the split's queries among all its documents, or `spearman` of scored pairs.

    `vectors`: (texts, size).
    """
    if not len(vectors):
        return {}
    directions = normalize(vectors)
    if embedding.learns_scores:
        pairs = [(match[0], match[1]) for match in validated.matches]
        cosines = np.array([directions[query] @ directions[document] for query, document in pairs])
        return {"spearman": spearman(cosines, np.array([validated.scores[query] for query, _ in pairs]))}
    queries, relevant, excluded = validated.distinct_queries()
    judgements = [dict.fromkeys(documents.tolist(), 1.0) for documents in relevant]
    return retrieval_metrics(directions[queries], directions[validated.documents], judgements, excluded)


def mean_loss(validated: ValidatedTexts, embedding: EmbeddingConfig, batch: int) -> float:
    """Return the mean loss per query over batches of `batch` matches, in order."""
    import torch

    total = 0.0
    for start in range(0, len(validated.matches), batch):
        matches = [
            _match_keys(validated, match, embedding.max_negatives) for match in validated.matches[start : start + batch]
        ]
        keys = torch.from_numpy(match_keys([keys for keys, _ in matches]))
        order = [texts[0] for _, texts in matches] + [texts[1] for _, texts in matches]
        order += [text for _, texts in matches for text in texts[2:]]
        texts = Texts.from_vectors(torch.from_numpy(validated.vectors[order]), keys)
        with torch.no_grad():
            total += float(loss_sum(texts, embedding, slice(None)))
    return total / max(1, len(validated.matches))


def _match_keys(validated: ValidatedTexts, match: list[int], max_negatives: int) -> tuple[MatchKeys, list[int]]:
    """Return the keys of a match, and the indices of its query, first positive and first negatives."""
    hashes, roles = validated.hashes, validated.roles
    positives = [text for text in match if roles[text] == POSITIVE]
    negatives = [text for text in match if roles[text] == NEGATIVE][:max_negatives]
    keys = MatchKeys(
        int(hashes[match[0]]),
        int(hashes[positives[0]]),
        [int(hashes[text]) for text in negatives],
        [int(hashes[text]) for text in positives[1:]],
        int(validated.scores[match[0]]),
    )
    return keys, [match[0], positives[0], *negatives]


@dataclass(frozen=True, slots=True)
class ValidatedTexts:
    """The vectors of a split, grouped into matches and a corpus. Skips matches without all vectors."""

    vectors: np.ndarray
    """float32 (texts, size)."""
    roles: np.ndarray
    hashes: np.ndarray
    scores: np.ndarray
    matches: list[list[int]]
    """Indices of the texts of each match, its query first."""
    documents: np.ndarray
    """Indices of the corpus: distinct documents."""

    @classmethod
    def from_outputs(cls, outputs: np.ndarray, split: StoreSplit) -> ValidatedTexts:
        numbers = np.asarray(split.numbers())
        count = len(outputs)
        if 0 < count < len(numbers):
            incomplete = numbers[count, DOCUMENT]
            count = int(np.searchsorted(numbers[:count, DOCUMENT], incomplete))
        numbers = numbers[:count]
        starts = np.flatnonzero(np.diff(numbers[:, DOCUMENT], prepend=-1))
        matches = [list(map(int, texts)) for texts in np.split(np.arange(count), starts[1:])] if count else []
        roles, hashes = numbers[:, ROLE], numbers[:, HASH]
        documents = np.flatnonzero(roles != QUERY)
        documents = documents[np.sort(np.unique(hashes[documents], return_index=True)[1])]
        return cls(outputs[:count], roles, hashes, numbers[:, SCORE], matches, documents)

    def distinct_queries(self) -> tuple[np.ndarray, list[np.ndarray], dict[int, int]]:
        """Return (indices of distinct queries, matching documents of each, query -> the document with its own text).

        Documents are given by their index in the corpus.
        """
        corpus = {int(self.hashes[text]): index for index, text in enumerate(self.documents)}
        distinct: dict[int, int] = {}
        matching: dict[int, set[int]] = {}
        for match in self.matches:
            query = int(self.hashes[match[0]])
            distinct.setdefault(query, match[0])
            positives = (int(self.hashes[text]) for text in match if self.roles[text] == POSITIVE)
            matching.setdefault(query, set()).update(corpus[text_hash] for text_hash in positives)
        relevant = [np.array(sorted(matching[query])) for query in distinct]
        own_texts = {index: corpus[query] for index, query in enumerate(distinct) if query in corpus}
        own_texts = {index: document for index, document in own_texts.items() if document not in relevant[index]}
        return np.array(list(distinct.values()), dtype=np.int64), relevant, own_texts
