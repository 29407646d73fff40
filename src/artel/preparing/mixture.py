"""Weights and budgets: how often each training document of a source occurs in an epoch."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from artel.config import RunConfig, SourceConfig
from artel.tokens.sampling.order import splitmix64

WEIGHT, BUDGET = "weight", "budget"
"""Reasons in the ledger for which a document is dropped."""


def depends_on_seed(config: RunConfig) -> bool:
    """True if the run's seed chooses documents."""
    return any(
        source.budget_bytes is not None
        or source.budget_documents is not None
        or any(not float(weight).is_integer() for weight in _weights(source).values())
        for source in config.data.sources
    )


def copies_by_weight(
    source: SourceConfig, set_names: list[str], sets: NDArray, digests: NDArray, seed: int
) -> NDArray[np.uint16]:
    """Return copies of each document, uint16 (documents,): with weight 2.3 two, and three for three of ten documents.

    Which three depends only on the seed and the documents' digests: they stay the same when files are added.

    Args:
        sets: (documents,) indices into `set_names`.
        digests: (documents,) DIGEST.
    """
    by_name = _weights(source)
    weights = np.array([by_name.get(name, by_name.get("", 1.0)) for name in set_names], np.float64)[sets]
    whole = np.floor(weights)
    return (whole + (chances(digests, seed, "weight") < weights - whole)).astype(np.uint16)


def over_budget(
    source: SourceConfig, copies: NDArray[np.uint16], sizes: NDArray, digests: NDArray, seed: int
) -> NDArray[np.bool_]:
    """Return bool (documents,): True beyond the source's budget, in an order drawn by the seed.

    `sizes`: in bytes. A document with two copies counts twice.
    """
    order = np.argsort(chances(digests, seed, "budget"), kind="stable")
    count = copies[order].astype(np.int64)
    is_over = np.zeros(len(copies), np.bool_)
    costs = (source.budget_bytes, sizes[order].astype(np.int64) * count), (source.budget_documents, count)
    for budget, cost in costs:
        if budget is not None:
            is_over[order[np.cumsum(cost) > budget]] = True
    return is_over


def chances(digests: NDArray, seed: int, purpose: str) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), float64 (documents,): splitmix64 (Steele et al. 2014) of digest and seed."""
    salt = np.uint64(xxhash.xxh3_64_intdigest(f"{purpose} {seed}".encode()))
    return splitmix64(digests["low"].astype(np.uint64) ^ salt) / 2.0**64


def _weights(source: SourceConfig) -> dict[str, float]:
    """Return weights by names of sets; "" for all other sets."""
    return source.weight if isinstance(source.weight, dict) else {"": source.weight}
