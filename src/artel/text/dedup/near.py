"""Near-duplicates: documents whose sets of word n-grams are alike, found by MinHash, verified, left out but the first.

Four steps, each over files, so that workers can share the first and the second:

1. Of each document of `words` words and more are written (`Signer`): the hashes of its different n-grams, 4 bytes each
   (of English about 0.7 bytes for a byte of text, of Russian in UTF-8 0.4), and of its MinHash signature a key of 8
   bytes for each band (128 permutations at a threshold of 0.8: 25 bands, 200 bytes).
2. Two documents with an equal key in a band are candidates; they are a pair when their Jaccard similarity, counted on
   the n-grams themselves, reaches the threshold (`alike`, for some of the bands).
3. Chains of pairs are clusters (`reasons`), by union-find.
4. The first of a cluster is kept.

Memory: 33 bytes a document to sort the keys of one band, and under 150 MB for the documents being signed, of a single
one of 100 MB 540 MB. On disk each costs 200 bytes and its n-grams: 200 million of 4,000 bytes 0.6 TB.

Shorter documents have no n-gram and are left to the exact rule: "Yes!" and "Yes?" are no copies of one another.
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
from artel.text.dedup.shingles import Grams, as_set, jaccard

NEAR_DUPLICATE, NEAR_VALIDATION = "near_duplicate", "near_validation"
# The bands are looked at in so many tasks, each knowing nothing of the others' pairs: more of them would compare the
# same documents more often.
BAND_GROUPS = 4

# Any constant would do; the run's seed does not enter, so that runs of all seeds leave out the same documents.
_SEED = 20_261_121
# How surely bands are to find a pair exactly at the threshold. More alike pairs are found more surely; less alike
# ones cost a comparison and are refused.
_FOUND = 0.999
# Documents are signed together: 8 MB of n-grams, or 4096 documents, whose signatures pass through Python's integers.
_BATCH_GRAMS = 1_000_000
_BATCH_DOCUMENTS = 4096
# Their n-grams are found for so many characters together: a document of 100 then costs a sixteenth of it alone.
_CHARACTERS = 50_000
# A document is compared with at most so many others that share one of its keys and are not of its cluster: a million
# pages from one template, alike but under the threshold, would else be 10^12 comparisons.
_COMPARISONS = 1000
# Files of n-grams held open at a time, of one part each.
_OPEN_FILES = 200


def bands_and_rows(threshold: float, permutations: int) -> tuple[int, int]:
    """How a signature is cut: as few bands, of as many rows, as find a pair at the threshold 999 times of 1000.

    A band agrees with probability similarity^rows, so one of them with 1 - (1 - similarity^rows)^bands.
    """
    for rows in range(permutations, 1, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _FOUND:
            return bands, rows
    return permutations, 1


def check_near() -> None:
    """Raise InputError at `data.dedup.near` where rensa is not installed."""
    _signatures()


class Signer:
    """Writes the n-grams and the band keys of a part's documents into a folder; use it with `with`.

        grams    uint32: the sorted n-gram hashes of each signed document, one document after another
        ends     int64: for each of them where its n-grams end
        places   int64: and which document of the part it is, from 0
        blocks   int64: how many documents were signed together, each time
        keys     uint64: of each block (bands, documents), the documents' keys in each band

    Raises InputError where rensa is not installed.
    """

    def __init__(
        self,
        folder: Path,
        config: NearConfig,
        *,
        batch_documents: int = _BATCH_DOCUMENTS,
        batch_characters: int = _CHARACTERS,
    ) -> None:
        self._folder = folder
        self._batch_documents, self._batch_characters = batch_documents, batch_characters
        self._bands, self._rows = bands_and_rows(config.threshold, config.permutations)
        self._permutations = config.permutations
        self._grams = Grams(config.words)
        self._sign = _signatures()
        self._factors = np.array([xxhash.xxh3_64_intdigest(bytes([0, row % 256, row // 256])) | 1
                                  for row in range(self._rows)], np.uint64)  # fmt: skip
        self._texts: list[tuple[int, str]] = []
        self._characters = 0
        self._places = array("q")
        self._ends = array("q")
        self._blocks = array("q")
        self._written = 0
        self._batch: list[NDArray[np.uint64]] = []
        self._batch_grams = 0

    def __enter__(self) -> Signer:
        self._folder.mkdir(parents=True)
        self._gram_file = (self._folder / "grams").open("wb")
        self._key_file = (self._folder / "keys").open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._find()
            self._write()
            for name, numbers in (("ends", self._ends), ("places", self._places), ("blocks", self._blocks)):
                (self._folder / name).write_bytes(numbers.tobytes())
        self._gram_file.close()
        self._key_file.close()

    def add(self, place: int, text: str) -> None:
        """The document at this place in the part, unless it is too short to have an n-gram."""
        self._texts.append((place, text))
        self._characters += len(text)
        if self._characters >= self._batch_characters or len(self._texts) == self._batch_documents:
            self._find()

    def _find(self) -> None:
        for (place, _), grams in zip(self._texts, self._grams.of([text for _, text in self._texts]), strict=True):
            if not grams.size:
                continue
            self._places.append(place)
            self._batch.append(grams)
            self._batch_grams += grams.size
            if self._batch_grams >= _BATCH_GRAMS or len(self._batch) == self._batch_documents:
                self._write()
        self._texts = []
        self._characters = 0

    def _write(self) -> None:
        if not self._batch:
            return
        ends = np.cumsum([0, *(grams.size for grams in self._batch)], dtype=np.uint64)
        signatures = self._sign(np.concatenate(self._batch), ends, self._permutations, _SEED).to_rows()
        cut = np.array(signatures, np.uint64)[:, : self._bands * self._rows].reshape(-1, self._bands, self._rows)
        self._key_file.write((cut * self._factors).sum(axis=2, dtype=np.uint64).T.tobytes())
        self._blocks.append(len(self._batch))
        for grams in self._batch:
            found = as_set(grams)
            self._gram_file.write(found.data)
            self._written += found.size
            self._ends.append(self._written)
        self._batch = []
        self._batch_grams = 0


class Signatures:
    """What signers wrote for the parts of a run, seen as one: signed documents are numbered in the order of all.

    `counts` are the documents of each part, `alive` (all documents,) bool says which are still there: the others are
    no one's copies.
    """

    def __init__(
        self, folders: list[Path], counts: list[int], alive: NDArray[np.bool_], *, open_files: int = _OPEN_FILES
    ) -> None:
        self._folders = folders
        self._open_files = open_files
        starts = list(accumulate(counts, initial=0))
        local = [np.fromfile(folder / "places", np.int64) for folder in folders]
        kept = [alive[start + places] for start, places in zip(starts, local, strict=False)]
        self._numbers = [np.flatnonzero(each) for each in kept]
        """Of each part, which of its signed documents are alive."""
        self._firsts = list(accumulate((each.size for each in self._numbers), initial=0))
        self.places = np.concatenate(
            [np.empty(0, np.int64), *(start + places[each] for start, places, each in
                                      zip(starts, local, self._numbers, strict=False))]
        )  # fmt: skip
        """int64: of each its place among all documents."""
        self._open: OrderedDict[int, tuple[NDArray[np.uint32], NDArray[np.int64]]] = OrderedDict()

    def __len__(self) -> int:
        return self._firsts[-1]

    def grams(self, number: int) -> NDArray[np.uint32]:
        part = bisect_right(self._firsts, number) - 1
        grams, ends = self._files(part)
        local = int(self._numbers[part][number - self._firsts[part]])
        return grams[int(ends[local - 1]) if local else 0 : int(ends[local])]

    def keys(self, band: int) -> NDArray[np.uint64]:
        """The key of each document in one band."""
        found = [np.empty(0, np.uint64)]
        for folder, numbers in zip(self._folders, self._numbers, strict=True):
            if numbers.size:
                found.append(_band(folder, band)[numbers])
        return np.concatenate(found)

    def _files(self, part: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        if part not in self._open:
            folder = self._folders[part]
            self._open[part] = (
                np.memmap(folder / "grams", np.uint32, "r").view(np.ndarray),
                np.fromfile(folder / "ends", np.int64),
            )
            if len(self._open) > self._open_files:
                self._open.popitem(last=False)
        self._open.move_to_end(part)
        return self._open[part]


def alike(
    signatures: Signatures, bands: Iterable[int], threshold: float, comparisons: int = _COMPARISONS
) -> NDArray[np.int64]:
    """int64 (pairs, 2): numbers of documents that share a key in one of the bands and are as alike as `threshold`.

    Of a cluster as many pairs as hold it together. A document is compared with at most `comparisons` others of a key.
    """
    clusters = _Clusters(len(signatures))
    pairs: list[tuple[int, int]] = []
    for band in bands:
        keys = signatures.keys(band)
        order = np.argsort(keys, kind="stable")  # documents of one key stay in their order
        keys = keys[order]
        again = np.flatnonzero(keys[1:] == keys[:-1])  # those whose successor has the same key
        starts = again[np.diff(again, prepend=-2) != 1]
        ends = again[np.diff(again, append=keys.size + 1) != 1] + 2
        for start, end in zip(starts, ends, strict=True):
            _join(order[start:end].tolist(), signatures, clusters, threshold, pairs, comparisons)
    return np.array(pairs, np.int64).reshape(-1, 2)


def reasons(signatures: Signatures, pairs: Iterable[NDArray[np.int64]], stays: NDArray[np.bool_]) -> dict[str, Any]:
    """For each reason the places (int64) of the documents that are left out for it.

    `stays` (all documents,): those that stay however alike, validation texts given by a path. The others go when one
    of these is in their cluster (near_validation), or one that came before (near_duplicate).
    """
    clusters = _Clusters(len(signatures))
    for some in pairs:
        for one, other in some.tolist():
            clusters.join(clusters.root(one), clusters.root(other))
    held = {clusters.root(number) for number in np.flatnonzero(stays[signatures.places]).tolist()}
    found: dict[str, list[int]] = {NEAR_DUPLICATE: [], NEAR_VALIDATION: []}
    for number, place in enumerate(signatures.places.tolist()):
        root = clusters.root(number)
        if stays[place]:
            continue
        if root in held:
            found[NEAR_VALIDATION].append(place)
        elif root != number:
            found[NEAR_DUPLICATE].append(place)
    return {reason: np.array(places, np.int64) for reason, places in found.items()}


def _band(folder: Path, band: int) -> NDArray[np.uint64]:
    """The keys of all documents that were signed into a folder, in one band."""
    blocks = np.fromfile(folder / "blocks", np.int64)
    bands = (folder / "keys").stat().st_size // 8 // int(blocks.sum())
    keys, start = [], 0
    with (folder / "keys").open("rb") as file:
        for count in blocks.tolist():
            file.seek((start + band * count) * 8)
            keys.append(np.frombuffer(file.read(count * 8), np.uint64))
            start += count * bands
    return np.concatenate(keys)


class _Clusters:
    """Union-find; the root of a cluster is its first document."""

    def __init__(self, count: int) -> None:
        self._above = array("q", range(count))

    def root(self, number: int) -> int:
        above = self._above
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    def join(self, one: int, other: int) -> int:
        """The root of both, which are roots."""
        first, second = sorted((one, other))
        self._above[second] = first
        return first


def _join(
    candidates: list[int],
    signatures: Signatures,
    clusters: _Clusters,
    threshold: float,
    pairs: list[tuple[int, int]],
    comparisons: int,
) -> None:
    """Compare the documents of one key, each with those before it that are not of its cluster already."""
    groups: dict[int, list[int]] = {}  # by the root of their cluster
    for number in candidates:
        own = clusters.root(number)
        left = comparisons
        for root in list(islice(groups, left)):
            if root == own or root not in groups:  # it may have been joined just now
                continue
            compared = groups[root][:left]
            match = next((member for member in compared if _are_alike(signatures, number, member, threshold)), None)
            if match is not None:
                pairs.append((match, number))
                members = groups.pop(root) + groups.pop(own, [])
                own = clusters.join(own, root)
                groups[own] = members
                continue
            left -= len(compared)
            if left == 0:
                break
        groups.setdefault(own, []).append(number)


def _are_alike(signatures: Signatures, one: int, other: int, threshold: float) -> bool:
    first, second = signatures.grams(one), signatures.grams(other)
    smaller, larger = sorted((first.size, second.size))
    if smaller / larger < threshold:  # they cannot share enough
        return False
    return jaccard(first, second) >= threshold


def _signatures() -> Callable[..., Any]:
    """rensa's function from the hashes of many sets to their signatures."""
    try:
        from rensa import RMinHash
    except ImportError:
        raise missing_extra("rensa", "near", "data.dedup.near") from None
    return RMinHash.digest_matrix_from_flat_token_hashes
