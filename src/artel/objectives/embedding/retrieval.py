"""Figures of vectors: whether queries find their documents in a corpus, and whether cosines are in the order of scores.

recall, MRR and nDCG at k as trec_eval and MTEB define them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Judgements = dict[int, float]
"""Place of a document in the corpus -> how well it answers a query, above 0; 1 for a match."""
DEPTH = 10
_RECALLS = (1, 5, DEPTH)
_AT_ONCE = 1 << 24
"""Cosines that are held at a time."""


def retrieval_figures(
    queries: np.ndarray, corpus: np.ndarray, judged: Sequence[Judgements], left_out: Mapping[int, int]
) -> dict[str, float]:
    """recall_at_1, _5 and _10, mrr_at_10, ndcg_at_10: means over the queries.

    Args:
        queries: (queries, size), of length 1.
        corpus: (documents, size), of length 1; of equally near documents the first is found first.
        judged: of each query how well the documents that answer it do, at least one.
        left_out: query -> a document that is the query's own text, and is not looked for.
    """
    found = nearest(queries, corpus, DEPTH, left_out)
    gains = np.array(
        [[judgements.get(place, 0.0) for place in row] for row, judgements in zip(found.tolist(), judged, strict=True)]
    )
    counts = np.array([len(judgements) for judgements in judged])
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    ideal = [sorted(judgements.values(), reverse=True)[:DEPTH] for judgements in judged]
    best = np.array([float(np.dot(discounts[: len(scores)], scores)) for scores in ideal])
    hits = gains > 0
    first = np.where(hits.any(axis=1), 1 / (1 + hits.argmax(axis=1)), 0.0)
    figures = {f"recall_at_{depth}": float((hits[:, :depth].sum(axis=1) / counts).mean()) for depth in _RECALLS}
    return figures | {
        f"mrr_at_{DEPTH}": float(first.mean()),
        f"ndcg_at_{DEPTH}": float(((gains * discounts[: gains.shape[1]]).sum(axis=1) / best).mean()),
    }


def nearest(queries: np.ndarray, corpus: np.ndarray, count: int, left_out: Mapping[int, int]) -> np.ndarray:
    """The places of each query's `count` nearest documents (or as many as there are), nearest first; -1 for none."""
    count = min(count, len(corpus))
    found = np.empty((len(queries), count), dtype=np.int64)
    at_once = max(1, _AT_ONCE // max(1, len(corpus)))
    for start in range(0, len(queries), at_once):
        cosines = queries[start : start + at_once] @ corpus.T
        for row in range(len(cosines)):
            if (document := left_out.get(start + row)) is not None:
                cosines[row, document] = -np.inf
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
        best[np.take_along_axis(cosines, best, axis=1) == -np.inf] = -1
        found[start : start + at_once] = best
    return found


def unit(vectors: np.ndarray) -> np.ndarray:
    """The same directions, (vectors, size), with the length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
