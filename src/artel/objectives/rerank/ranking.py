"""Figures of an order of documents."""

from __future__ import annotations

import numpy as np

_CUT = 10


def ranks(scores: np.ndarray, matches: np.ndarray) -> np.ndarray:
    """The ranks of the documents that match, from 1, ascending. Among equal scores they stand behind the others.

    scores float (documents,), matches bool (documents,).
    """
    order = np.lexsort((matches, -scores))
    return np.flatnonzero(matches[order]) + 1


def ndcg(found: np.ndarray) -> float:
    """nDCG at 10 of `ranks`, where a document matches or not (Järvelin and Kekäläinen 2002)."""
    gain = (1 / np.log2(found[found <= _CUT] + 1)).sum()
    best = (1 / np.log2(np.arange(1, min(len(found), _CUT) + 1) + 1)).sum()
    return float(gain / best)


def ranking_figures(all_ranks: list[np.ndarray]) -> dict[str, float]:
    """Means over queries, each with the `ranks` of its documents: `mrr` (of the first that matches), `ndcg` at 10,
    `accuracy`: the share of queries whose best document matches."""
    first = np.array([found[0] for found in all_ranks])
    return {
        "mrr": float((1 / first).mean()),
        "ndcg": float(np.mean([ndcg(found) for found in all_ranks])),
        "accuracy": float((first == 1).mean()),
    }
