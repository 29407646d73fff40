"""How often each training document of a source comes in an epoch: its weight, and what the source's budget leaves."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from artel.config import RunConfig, SourceConfig

WEIGHT, BUDGET = "weight", "budget"
"""Why a document is left out, as the ledger names it."""


def depends_on_seed(run: RunConfig) -> bool:
    """Whether the run's seed chooses documents."""
    return any(
        source.budget_bytes is not None or source.budget_documents is not None
        or any(not float(weight).is_integer() for weight in _weights(source).values())
        for source in run.data.sources
    )  # fmt: skip


def copies_by_weight(
    source: SourceConfig, set_names: list[str], sets: NDArray, digests: NDArray, seed: int
) -> NDArray[np.uint16]:
    """uint16 (documents,): of weight 2.3 each document twice, and three of ten once more.

    Which these are depends on the seed and the document's digest alone: the same ones when files are added. `sets` are
    numbers of `set_names`.
    """
    named = _weights(source)
    weights = np.array([named.get(name, named.get("", 1.0)) for name in set_names], np.float64)[sets]
    whole = np.floor(weights)
    return (whole + (chances(digests, seed, "weight") < weights - whole)).astype(np.uint16)


def over_budget(
    source: SourceConfig, copies: NDArray[np.uint16], sizes: NDArray, digests: NDArray, seed: int
) -> NDArray[np.bool_]:
    """bool (documents,): those beyond the source's budget, when its documents come in an order drawn by the seed.

    `sizes` are bytes; a document that comes twice costs twice.
    """
    order = np.argsort(chances(digests, seed, "budget"), kind="stable")
    count = copies[order].astype(np.int64)
    over = np.zeros(len(copies), np.bool_)
    for budget, cost in (
        (source.budget_bytes, sizes[order].astype(np.int64) * count), (source.budget_documents, count)
    ):  # fmt: skip
        if budget is not None:
            over[order[np.cumsum(cost) > budget]] = True
    return over


def chances(digests: NDArray, seed: int, what: str) -> NDArray[np.float64]:
    """float64 (documents,) from 0 to below 1, evenly spread: splitmix64 (Steele et al. 2014) of digest and seed."""
    salt = np.uint64(xxhash.xxh3_64_intdigest(f"{what} {seed}".encode()))
    mixed = digests["low"].astype(np.uint64) ^ salt
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64


def _weights(source: SourceConfig) -> dict[str, float]:
    """By the names of sets; "" is every set that is not named."""
    return source.weight if isinstance(source.weight, dict) else {"": source.weight}
