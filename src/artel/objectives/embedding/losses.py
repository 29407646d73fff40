"""Losses over the vectors of a global batch, summed over the queries of one micro-batch.

In-batch negatives: van den Oord et al. 2018 (InfoNCE), Henderson et al. 2017 (multiple negatives ranking). Triplet:
Schroff et al. 2015, in cosines. CoSENT: Su 2022, https://kexue.fm/archives/8847.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from artel.config import EmbeddingConfig
from artel.objectives.embedding.matches import NEGATIVE, OTHER_POSITIVE, POSITIVE, QUERY, SCORE_SCALE

if TYPE_CHECKING:
    import torch

KEYS = ("role", "hash", "query", "match", "score")
"""The columns of the keys, int64: role of a text in its match, its hash, its query's hash, the number of its match in
the micro-batch, and the score in millionths. Other positives of a query have keys, but no vector."""
_ROLE, _HASH, _QUERY, _MATCH, _SCORE = range(len(KEYS))
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # the multiplier of Fibonacci hashing


@dataclass(frozen=True, slots=True)
class MatchKeys:
    """The hashes of a match's texts, and its score in millionths."""

    query: int
    positive: int
    negatives: list[int]
    other_positives: list[int]
    score: int = 0


def match_keys(matches: Sequence[MatchKeys]) -> np.ndarray:
    """Return keys of queries, then positives, negatives and other positives, int64 (texts, len(KEYS))."""
    keys = [(QUERY, match.query, match.query, index, match.score) for index, match in enumerate(matches)]
    keys += [(POSITIVE, match.positive, match.query, index, match.score) for index, match in enumerate(matches)]
    for role in (NEGATIVE, OTHER_POSITIVE):
        for index, match in enumerate(matches):
            hashes = match.negatives if role == NEGATIVE else match.other_positives
            keys += [(role, text_hash, match.query, index, match.score) for text_hash in hashes]
    return np.array(keys, dtype=np.int64).reshape(-1, len(KEYS))


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a global batch, and their matches."""

    vectors: torch.Tensor
    """float32 (texts, size)."""
    keys: torch.Tensor
    """int64 (texts, len(KEYS)), in the order of the vectors."""
    pairs: torch.Tensor
    """int64 (pairs,): the combined hash of each query and positive."""

    @classmethod
    def from_vectors(cls, vectors: torch.Tensor, keys: torch.Tensor) -> Texts:
        """Return the texts. `keys` also has rows of other positives, in between."""
        roles = keys[:, _ROLE]
        positives = keys[(roles == POSITIVE) | (roles == OTHER_POSITIVE)]
        return cls(vectors, keys[roles != OTHER_POSITIVE], _pair_hash(positives[:, _QUERY], positives[:, _HASH]))

    def indices(self, *roles: int, micro_batch: slice = slice(None)) -> torch.Tensor:
        """Return the ascending indices of the texts with these roles in `micro_batch`."""
        import torch

        start, end, _ = micro_batch.indices(len(self.keys))
        role_ids = torch.tensor(roles, device=self.keys.device)
        return torch.isin(self.keys[start:end, _ROLE], role_ids).nonzero()[:, 0] + start

    def matches(self, queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """Return bool (queries, documents): True for positives of a query and its own text.

        `queries`, `documents`: indices of texts.
        """
        import torch

        query, document = self.keys[queries][:, None], self.keys[documents][None, :]
        is_positive = torch.isin(_pair_hash(query[..., _HASH], document[..., _HASH]), self.pairs)
        return is_positive | (query[..., _HASH] == document[..., _HASH])


def _pair_hash(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    return queries * _HASH_MULTIPLIER + documents  # wraps around


def loss_sum(texts: Texts, embedding: EmbeddingConfig, micro_batch: slice) -> torch.Tensor:
    """Return the loss of the queries in `micro_batch`, float32; with `matryoshka` the mean over its sizes.

    Queries and positives of a micro-batch are both in the order of its matches.
    """
    import torch

    loss = {
        "in_batch_negatives": _in_batch_loss,
        "triplet": _triplet_loss,
        "cosine": _cosine_loss,
        "cosent": _cosent_loss,
    }[embedding.loss]
    with torch.autocast(texts.vectors.device.type, enabled=False):
        losses = [
            loss(texts, torch.nn.functional.normalize(texts.vectors[:, :size].float(), dim=1), embedding, micro_batch)
            for size in embedding.matryoshka or [texts.vectors.shape[1]]
        ]
        return torch.stack(losses).mean()


def _in_batch_loss(texts: Texts, vectors: torch.Tensor, embedding: EmbeddingConfig, micro_batch: slice) -> torch.Tensor:
    import torch

    queries, positives = texts.indices(QUERY, micro_batch=micro_batch), texts.indices(POSITIVE, micro_batch=micro_batch)
    documents = texts.indices(POSITIVE, NEGATIVE)
    cosines = vectors[queries] @ vectors[documents].T
    targets = torch.searchsorted(documents, positives)
    # Other documents that match a query are not its negatives.
    is_match = texts.matches(queries, documents).scatter(1, targets[:, None], False)
    logits = (cosines / embedding.temperature).masked_fill(is_match, -torch.inf)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def _triplet_loss(texts: Texts, vectors: torch.Tensor, embedding: EmbeddingConfig, micro_batch: slice) -> torch.Tensor:
    """Return the triplet loss. The loss of a query is the mean over its negatives."""
    import torch

    queries, positives = texts.indices(QUERY, micro_batch=micro_batch), texts.indices(POSITIVE, micro_batch=micro_batch)
    negatives = texts.indices(NEGATIVE, micro_batch=micro_batch)
    positive_cosines = (vectors[queries] * vectors[positives]).sum(dim=1)
    order = torch.searchsorted(texts.keys[queries, _MATCH].contiguous(), texts.keys[negatives, _MATCH].contiguous())
    negative_cosines = (vectors[queries][order] * vectors[negatives]).sum(dim=1)
    counts = torch.zeros_like(positive_cosines).index_add(0, order, torch.ones_like(negative_cosines))
    losses = (embedding.margin + negative_cosines - positive_cosines[order]).clamp(min=0)
    return (losses / counts[order]).sum()


def _cosine_loss(texts: Texts, vectors: torch.Tensor, embedding: EmbeddingConfig, micro_batch: slice) -> torch.Tensor:
    cosines, scores = _pairs_with_scores(texts, vectors, micro_batch)
    return ((cosines - scores) ** 2).sum()


def _cosent_loss(texts: Texts, vectors: torch.Tensor, embedding: EmbeddingConfig, micro_batch: slice) -> torch.Tensor:
    """Return the loss of the global batch times the number of queries in the micro-batch."""
    import torch

    cosines, scores = _pairs_with_scores(texts, vectors, slice(None))
    differences = (cosines[:, None] - cosines[None, :]) / embedding.temperature
    differences = differences[scores[:, None] < scores[None, :]]
    loss = torch.logsumexp(torch.cat([differences.new_zeros(1), differences]), dim=0)
    return loss * len(texts.indices(QUERY, micro_batch=micro_batch))


def _pairs_with_scores(texts: Texts, vectors: torch.Tensor, micro_batch: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosines, scores) of the pairs of a micro-batch."""
    queries, positives = texts.indices(QUERY, micro_batch=micro_batch), texts.indices(POSITIVE, micro_batch=micro_batch)
    return (vectors[queries] * vectors[positives]).sum(dim=1), texts.keys[queries, _SCORE].float() / SCORE_SCALE
