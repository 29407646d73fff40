"""Figures of the vectors of a validation split: what queries find, and the loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from artel.config import EmbeddingConfig
from artel.objectives.embedding.losses import MatchKeys, Texts, loss_sum, match_keys
from artel.objectives.embedding.matches import NEGATIVE, POSITIVE, QUERY
from artel.objectives.embedding.retrieval import retrieval_figures, unit
from artel.objectives.embedding.validated import ValidatedTexts
from artel.objectives.statistics import spearman


def lookup_figures(found: ValidatedTexts, vectors: np.ndarray, config: EmbeddingConfig) -> dict[str, float]:
    """Of looking up the split's queries among all its documents, by `vectors` (texts, size); or, of scored pairs, of
    the order of their cosines.
    """
    if not len(vectors):
        return {}
    directions = unit(vectors)
    if config.learns_scores:
        pairs = [(match[0], match[1]) for match in found.matches]
        cosines = np.array([directions[query] @ directions[document] for query, document in pairs])
        return {"spearman": spearman(cosines, np.array([found.scores[query] for query, _ in pairs]))}
    queries, relevant, left_out = found.questions()
    judged = [dict.fromkeys(each.tolist(), 1.0) for each in relevant]
    return retrieval_figures(directions[queries], directions[found.documents], judged, left_out)


def shorter_figures(found: ValidatedTexts, config: EmbeddingConfig) -> list[dict[str, Any]]:
    """The same of the beginnings of vectors (`embedding.matryoshka`), a row each."""
    sizes = [size for size in config.matryoshka if size < found.vectors.shape[1]]
    return [{"dimensions": str(size), **lookup_figures(found, found.vectors[:, :size], config)} for size in sizes]


def mean_loss(found: ValidatedTexts, config: EmbeddingConfig, batch: int) -> float:
    """The loss of a query, among the matches of `batch` at a time, in their order."""
    import torch

    total = 0.0
    for start in range(0, len(found.matches), batch):
        matches = [_kept(found, match, config.most_negatives) for match in found.matches[start : start + batch]]
        keys = torch.from_numpy(match_keys([keys for keys, _ in matches]))
        order = [texts[0] for _, texts in matches] + [texts[1] for _, texts in matches]
        order += [text for _, texts in matches for text in texts[2:]]
        texts = Texts.of(torch.from_numpy(found.vectors[order]), keys)
        with torch.no_grad():
            total += float(loss_sum(texts, config, slice(None)))
    return total / max(1, len(found.matches))


def _kept(found: ValidatedTexts, match: list[int], most_negatives: int) -> tuple[MatchKeys, list[int]]:
    """The keys of a match, and the places of its query, its first positive and its first negatives."""
    hashes, roles = found.hashes, found.roles
    positives = [text for text in match if roles[text] == POSITIVE]
    negatives = [text for text in match if roles[text] == NEGATIVE][:most_negatives]
    keys = MatchKeys(
        int(hashes[match[0]]),
        int(hashes[positives[0]]),
        [int(hashes[text]) for text in negatives],
        [int(hashes[text]) for text in positives[1:]],
        int(found.scores[match[0]]),
    )
    return keys, [match[0], positives[0], *negatives]


def corpus_counts(found: ValidatedTexts) -> dict[str, int]:
    """How much is looked up, and in how much."""
    return {"queries": int((found.roles == QUERY).sum()), "documents": len(found.documents)}
