"""Rules of the selection: duplicates to drop, and weights and budgets of sources."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from artel.config import RunConfig, SourceConfig
from artel.preparing.prepared_shard import PreparedShard, prepared_shards
from artel.preparing.workspace import Workspace
from artel.storage import write_file
from artel.text.dedup.exact import DIGEST, find_repeated
from artel.text.dedup.near import BAND_GROUPS, Signatures, choose_bands, find_similar_pairs, select_near_duplicates
from artel.tokens.order import splitmix64

WEIGHT, BUDGET = "weight", "budget"
"""Reasons recorded in the ledger for dropping a document."""

# The values in the file `exact`.
FIRST, DUPLICATE, REPEATED = range(3)


def find_repeated_lines(workspace: Workspace) -> None:
    """Write, for each input shard, the digests of its lines or paragraphs that occur in an earlier shard."""
    num_shards = len(workspace.input_shards)
    digests = [np.fromfile(workspace.lines_path(shard_index) / "digests", DIGEST) for shard_index in range(num_shards)]
    is_repeated = find_repeated(digests)
    start = 0
    for shard_index, shard in enumerate(digests):
        write_file(workspace.repeated_lines_path(shard_index), shard[is_repeated[start : start + len(shard)]].tobytes())
        start += len(shard)


def find_exact_duplicates(workspace: Workspace) -> None:
    """Write the file `exact`: FIRST, DUPLICATE or REPEATED for each document.

    DUPLICATE: an earlier document has the same text. REPEATED: all its lines occur in earlier documents.
    """
    shards = prepared_shards(workspace)
    has_new_text = np.concatenate([np.empty(0, np.uint8), *(shard.rows["has_new_text"] for shard in shards)])
    kinds = np.where(has_new_text == 1, FIRST, REPEATED).astype(np.uint8)
    if workspace.config.data.dedup.exact:
        kinds[find_repeated([shard.rows["digest"] for shard in shards])] = DUPLICATE
    write_file(workspace.exact_duplicates_path, kinds.tobytes())


def find_near_duplicates(workspace: Workspace, shards: list[PreparedShard], group: int) -> None:
    """Write the pairs of near-duplicates that one group of bands finds."""
    near = workspace.config.data.dedup.near
    assert near is not None
    bands, _ = choose_bands(near.threshold)
    signatures = _open_signatures(shards, read_duplicate_kinds(workspace) == FIRST)
    pairs = find_similar_pairs(signatures, range(group, bands, BAND_GROUPS), near.threshold)
    write_file(workspace.near_duplicates_path(group), pairs.tobytes())


def near_duplicates_by_reason(
    workspace: Workspace, shards: list[PreparedShard], is_unusable: NDArray[np.bool_]
) -> dict[str, NDArray[np.int64]]:
    """Return the indices of near-duplicates to drop, by reason. `is_unusable`: documents without a sample."""
    signatures = _open_signatures(shards, read_duplicate_kinds(workspace) == FIRST)
    pairs = (
        np.fromfile(workspace.near_duplicates_path(group), np.int64).reshape(-1, 2) for group in range(BAND_GROUPS)
    )
    # Separate validation texts (data.validation is a path) are never dropped.
    is_separate = np.array([shard.key == "data.validation" for shard in workspace.input_shards], np.bool_)
    is_protected = np.repeat(is_separate, [len(shard.rows) for shard in shards])
    return select_near_duplicates(signatures, pairs, is_protected, is_unusable)


def read_duplicate_kinds(workspace: Workspace) -> NDArray[np.uint8]:
    """Read the result of `find_exact_duplicates`, uint8 (all documents,)."""
    return np.fromfile(workspace.exact_duplicates_path, np.uint8)


def _open_signatures(shards: list[PreparedShard], is_kept: NDArray[np.bool_]) -> Signatures:
    return Signatures([shard.folder / "near" for shard in shards], [len(shard.rows) for shard in shards], is_kept)


def depends_on_seed(config: RunConfig) -> bool:
    """True if the run's seed chooses documents."""
    return any(
        source.budget_bytes is not None
        or any(not float(weight).is_integer() for weight in _weights_by_set(source).values())
        for source in config.data.sources
    )


def copies_by_weight(
    source: SourceConfig, set_names: list[str], sets: NDArray, digests: NDArray, seed: int
) -> NDArray[np.uint16]:
    """Return the number of copies of each document, uint16 (documents,). Weight 2.3 means 3 for 30 % of them, else 2.

    The choice depends only on the seed and the digests of documents: it stays the same when files are added. `sets`:
    (documents,) indices into `set_names`.
    """
    weight_by_set = _weights_by_set(source)
    weights = np.array([weight_by_set.get(name, weight_by_set.get("", 1.0)) for name in set_names], np.float64)[sets]
    full_copies = np.floor(weights)
    return (full_copies + (uniform_numbers(digests, seed, "weight") < weights - full_copies)).astype(np.uint16)


def over_budget(
    budget: int, copies: NDArray[np.uint16], sizes: NDArray, digests: NDArray, seed: int
) -> NDArray[np.bool_]:
    """Return bool (documents,): True beyond `budget` bytes, in an order drawn by the seed. Each copy counts."""
    order = np.argsort(uniform_numbers(digests, seed, "budget"), kind="stable")
    cost = sizes[order].astype(np.int64) * copies[order]
    is_over = np.zeros(len(copies), np.bool_)
    is_over[order[np.cumsum(cost) > budget]] = True
    return is_over


def uniform_numbers(digests: NDArray, seed: int, purpose: str) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), float64 (documents,): splitmix64 (Steele et al. 2014) of digest and seed."""
    salt = np.uint64(xxhash.xxh3_64_intdigest(f"{purpose} {seed}".encode()))
    return splitmix64(digests["low"].astype(np.uint64) ^ salt) / 2.0**64


def _weights_by_set(source: SourceConfig) -> dict[str, float]:
    """Return weights by set name, "" for all other sets."""
    return source.weight if isinstance(source.weight, dict) else {"": source.weight}
