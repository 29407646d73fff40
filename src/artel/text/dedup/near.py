"""Near-duplicates: documents with similar sets of shingles (word n-grams), found by MinHash and then verified.

Four steps over files. Workers can share the first two:

1. `SignatureWriter` writes, for each document of at least five words, the hashes of its distinct shingles, 4 bytes
   each (about 0.7 bytes per byte of English text, 0.4 of Russian in UTF-8), and one key of 8 bytes per band of its
   MinHash signature (128 permutations at a threshold of 0.8: 25 bands, 200 bytes).
2. Documents with equal keys in a band are candidates. They form a pair if their Jaccard similarity, computed from the
   shingles, is at least the threshold (`find_similar_pairs`, for some of the bands).
3. Connected pairs form a cluster (`select_near_duplicates`), by union-find.
4. The first document of each cluster is kept.

Memory: 33 bytes per document to sort the keys of one band, and less than 150 MB for the documents being signed. One
document of 100 MB takes 540 MB. On disk, a document takes 200 bytes plus its shingles: 200 million documents of 4,000
bytes take 0.6 TB.

Shorter documents have no shingles, so only the exact rule applies: "Yes!" and "Yes?" are not duplicates.

Broder 1997, "On the resemblance and containment of documents"; bands as in Leskovec, Rajaraman and Ullman, "Mining of
Massive Datasets", chapter 3.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from artel.config import NearConfig
from artel.errors import missing_extra
from artel.text.dedup.shingles import Shingler, jaccard, shingle_set

NEAR_DUPLICATE, NEAR_VALIDATION = "near_duplicate", "near_validation"
# Tasks that the bands are divided into. Tasks do not share pairs, so more tasks would repeat more
# comparisons.
BAND_GROUPS = 4

# Any constant would do. The run's seed is not used, so that runs of all seeds drop the same documents.
_SEED = 20_261_121
# The probability that the bands find a pair exactly at the threshold. It is higher for more similar pairs; less similar
# ones cost a comparison and are rejected.
_RECALL = 0.999
# Documents signed at a time: 8 MB of shingles, or 4096 documents, whose signatures become Python integers.
_BATCH_SHINGLES = 1_000_000
_BATCH_DOCUMENTS = 4096
# Characters whose shingles are computed at a time. Documents of 100 characters are then 16 times as fast as one by one.
_BATCH_CHARACTERS = 50_000
# Values in a MinHash signature. More values avoid useless comparisons.
_PERMUTATIONS = 128
# Words in a shingle.
_SHINGLE_WORDS = 5
# Maximum comparisons per document with others that share a key but not a cluster. A million pages from one template,
# similar but below the threshold, would otherwise take 10^12 comparisons.
_MAX_COMPARISONS = 1000
# Shingle files open at a time, one per shard.
_MAX_OPEN_FILES = 200


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return (bands, rows per band): the fewest bands that find a pair at the threshold 999 times in 1000.

    One band agrees with probability similarity^rows, and at least one band with 1 - (1 - similarity^rows)^bands.
    """
    for rows_per_band in range(_PERMUTATIONS, 1, -1):
        bands = _PERMUTATIONS // rows_per_band
        if 1 - (1 - threshold**rows_per_band) ** bands >= _RECALL:
            return bands, rows_per_band
    return _PERMUTATIONS, 1


def check_near() -> None:
    """Raise InputError at `data.dedup.near` if rensa is not installed."""
    _import_minhash()


class SignatureWriter:
    """Context manager that writes the shingles and band keys of the documents of a shard into a folder.

        shingles   uint32: the sorted shingle hashes of each signed document, one document after another
        ends       int64: the end of the shingles of each document
        documents  int64: the index of each document within the shard
        batches    int64: the number of documents in each batch
        keys       uint64: for each batch (bands, documents), the keys of the documents in each band

    Raise InputError if rensa is not installed.
    """

    def __init__(
        self,
        folder: Path,
        config: NearConfig,
        *,
        batch_documents: int = _BATCH_DOCUMENTS,
        batch_characters: int = _BATCH_CHARACTERS,
    ) -> None:
        self._batch_documents, self._batch_characters = batch_documents, batch_characters
        self._folder = folder
        self._bands, self._rows_per_band = choose_bands(config.threshold)
        self._shingler = Shingler(_SHINGLE_WORDS)
        self._minhash = _import_minhash()
        factors = [
            xxhash.xxh3_64_intdigest(bytes([0, row % 256, row // 256])) | 1 for row in range(self._rows_per_band)
        ]
        self._factors = np.array(factors, np.uint64)
        self._texts: list[tuple[int, str]] = []
        self._characters = 0
        self._documents = array("q")
        self._ends = array("q")
        self._batches = array("q")
        self._num_written = 0
        self._batch: list[NDArray[np.uint64]] = []
        self._batch_shingles = 0

    def __enter__(self) -> SignatureWriter:
        self._folder.mkdir(parents=True)
        self._shingle_file = (self._folder / "shingles").open("wb")
        self._key_file = (self._folder / "keys").open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._hash_texts()
            self._write_batch()
            for name, values in (("ends", self._ends), ("documents", self._documents), ("batches", self._batches)):
                (self._folder / name).write_bytes(values.tobytes())
        self._shingle_file.close()
        self._key_file.close()

    def add(self, document: int, text: str) -> None:
        """Sign the document at index `document` of the shard, unless it is too short for a shingle."""
        self._texts.append((document, text))
        self._characters += len(text)
        if self._characters >= self._batch_characters or len(self._texts) == self._batch_documents:
            self._hash_texts()

    def _hash_texts(self) -> None:
        hashes = self._shingler.hashes([text for _, text in self._texts])
        for (document, _), shingles in zip(self._texts, hashes, strict=True):
            if not shingles.size:
                continue
            self._documents.append(document)
            self._batch.append(shingles)
            self._batch_shingles += shingles.size
            if self._batch_shingles >= _BATCH_SHINGLES or len(self._batch) == self._batch_documents:
                self._write_batch()
        self._texts = []
        self._characters = 0

    def _write_batch(self) -> None:
        if not self._batch:
            return
        ends = np.cumsum([0, *(shingles.size for shingles in self._batch)], dtype=np.uint64)
        signatures = self._minhash(np.concatenate(self._batch), ends, _PERMUTATIONS, _SEED).to_rows()
        values = np.array(signatures, np.uint64)[:, : self._bands * self._rows_per_band]
        bands = values.reshape(-1, self._bands, self._rows_per_band)
        self._key_file.write((bands * self._factors).sum(axis=2, dtype=np.uint64).T.tobytes())
        self._batches.append(len(self._batch))
        for shingles in self._batch:
            distinct = shingle_set(shingles)
            self._shingle_file.write(distinct.data)
            self._num_written += distinct.size
            self._ends.append(self._num_written)
        self._batch = []
        self._batch_shingles = 0


class Signatures:
    """The signatures of all shards, as one sequence of signed documents.

    Args:
        folders: the folder of each shard.
        counts: the number of documents of each shard.
        is_kept: bool (all documents,): documents that were not dropped before.
    """

    def __init__(
        self, folders: list[Path], counts: list[int], is_kept: NDArray[np.bool_], *, open_files: int = _MAX_OPEN_FILES
    ) -> None:
        self._open_files = open_files
        self._folders = folders
        self._kept_indices = []
        """Indices of the signed documents that are kept, per shard."""
        documents_of_shards = [np.empty(0, np.int64)]
        for folder, start in zip(folders, accumulate(counts, initial=0), strict=False):
            documents = start + np.fromfile(folder / "documents", np.int64)
            kept_indices = np.flatnonzero(is_kept[documents])
            self._kept_indices.append(kept_indices)
            documents_of_shards.append(documents[kept_indices])
        self.documents = np.concatenate(documents_of_shards)
        """int64 (signed documents,): the index of each one among all documents."""
        self._shard_starts = list(accumulate((kept_indices.size for kept_indices in self._kept_indices), initial=0))
        self._opened: OrderedDict[int, tuple[NDArray[np.uint32], NDArray[np.int64]]] = OrderedDict()

    def __len__(self) -> int:
        return self._shard_starts[-1]

    def shingles(self, index: int) -> NDArray[np.uint32]:
        """Return the sorted shingle hashes of a signed document."""
        shard = bisect_right(self._shard_starts, index) - 1
        shingles, ends = self._map_shard(shard)
        index_in_shard = int(self._kept_indices[shard][index - self._shard_starts[shard]])
        return shingles[int(ends[index_in_shard - 1]) if index_in_shard else 0 : int(ends[index_in_shard])]

    def keys(self, band: int) -> NDArray[np.uint64]:
        """Return uint64 (signed documents,): the key of each document in one band."""
        keys = [np.empty(0, np.uint64)]
        for folder, kept_indices in zip(self._folders, self._kept_indices, strict=True):
            if kept_indices.size:
                keys.append(_band_keys(folder, band)[kept_indices])
        return np.concatenate(keys)

    def _map_shard(self, shard: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        if shard not in self._opened:
            folder = self._folders[shard]
            shingles = np.memmap(folder / "shingles", np.uint32, "r").view(np.ndarray)
            self._opened[shard] = shingles, np.fromfile(folder / "ends", np.int64)
            if len(self._opened) > self._open_files:
                self._opened.popitem(last=False)
        self._opened.move_to_end(shard)
        return self._opened[shard]


def find_similar_pairs(
    signatures: Signatures, bands: Iterable[int], threshold: float, max_comparisons: int = _MAX_COMPARISONS
) -> NDArray[np.int64]:
    """Return int64 (pairs, 2): documents that share a key and reach the threshold, enough to connect each cluster."""
    clusters = _Clusters(len(signatures))
    pairs: list[tuple[int, int]] = []
    for band in bands:
        keys = signatures.keys(band)
        order = np.argsort(keys, kind="stable")  # documents with the same key stay in order
        keys = keys[order]
        equal = np.flatnonzero(keys[1:] == keys[:-1])  # positions whose successor has the same key
        starts = equal[np.diff(equal, prepend=-2) != 1]
        ends = equal[np.diff(equal, append=keys.size + 1) != 1] + 2
        for start, end in zip(starts, ends, strict=True):
            pairs += _join_similar(order[start:end].tolist(), signatures, clusters, threshold, max_comparisons)
    return np.array(pairs, np.int64).reshape(-1, 2)


def select_near_duplicates(
    signatures: Signatures,
    pairs: Iterable[NDArray[np.int64]],
    is_protected: NDArray[np.bool_],
    is_unusable: NDArray[np.bool_],
) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the documents to drop, by reason.

    A document is dropped if its cluster has one of `is_protected` (near_validation: a validation text given by a path),
    or an earlier usable document (near_duplicate). Both arrays are bool (all documents,).
    """
    clusters = _Clusters(len(signatures))
    for group in pairs:
        for first, second in group.tolist():
            clusters.join(clusters.find_root(first), clusters.find_root(second))
    validation_roots = {
        clusters.find_root(index) for index in np.flatnonzero(is_protected[signatures.documents]).tolist()
    }
    dropped: dict[str, list[int]] = {NEAR_DUPLICATE: [], NEAR_VALIDATION: []}
    kept_roots: set[int] = set()
    for index, document in enumerate(signatures.documents.tolist()):
        if is_protected[document] or is_unusable[document]:
            continue
        root = clusters.find_root(index)
        if root in validation_roots:
            dropped[NEAR_VALIDATION].append(document)
        elif root in kept_roots:
            dropped[NEAR_DUPLICATE].append(document)
        else:
            kept_roots.add(root)
    return {reason: np.array(documents, np.int64) for reason, documents in dropped.items()}


def _band_keys(folder: Path, band: int) -> NDArray[np.uint64]:
    """Return the keys of all signed documents of a shard in one band."""
    batches = np.fromfile(folder / "batches", np.int64)
    bands = (folder / "keys").stat().st_size // 8 // int(batches.sum())
    keys, start = [], 0
    with (folder / "keys").open("rb") as file:
        for count in batches.tolist():
            file.seek((start + band * count) * 8)
            keys.append(np.frombuffer(file.read(count * 8), np.uint64))
            start += count * bands
    return np.concatenate(keys)


class _Clusters:
    """Union-find. The root of a cluster is its first document."""

    def __init__(self, num_documents: int) -> None:
        self._parents = array("q", range(num_documents))

    def find_root(self, index: int) -> int:
        parents = self._parents
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    def join(self, root: int, other_root: int) -> int:
        """Join two clusters, given their roots; return the new root."""
        first, second = sorted((root, other_root))
        self._parents[second] = first
        return first


def _join_similar(
    candidates: list[int], signatures: Signatures, clusters: _Clusters, threshold: float, max_comparisons: int
) -> list[tuple[int, int]]:
    """Compare each document with earlier ones of the same key outside its cluster. Return the similar pairs."""
    pairs = []
    members: dict[int, list[int]] = {}  # by the root of their cluster
    for index in candidates:
        own_root = clusters.find_root(index)
        remaining = max_comparisons
        for root in list(islice(members, remaining)):
            if root == own_root or root not in members:  # the latter: joined in this loop
                continue
            compared = members[root][:remaining]
            match = next((member for member in compared if _are_similar(signatures, index, member, threshold)), None)
            if match is not None:
                pairs.append((match, index))
                cluster = members.pop(root) + members.pop(own_root, [])
                own_root = clusters.join(own_root, root)
                members[own_root] = cluster
                continue
            remaining -= len(compared)
            if remaining == 0:
                break
        members.setdefault(own_root, []).append(index)
    return pairs


def _are_similar(signatures: Signatures, first: int, second: int, threshold: float) -> bool:
    first_set, second_set = signatures.shingles(first), signatures.shingles(second)
    smaller, larger = sorted((first_set.size, second_set.size))
    return smaller / larger >= threshold and jaccard(first_set, second_set) >= threshold


def _import_minhash() -> Callable[..., Any]:
    """Return the function of rensa that computes MinHash signatures from the shingle hashes of many documents."""
    try:
        from rensa import RMinHash
    except ImportError:
        raise missing_extra("rensa", "near", "data.dedup.near") from None
    return RMinHash.digest_matrix_from_flat_token_hashes
