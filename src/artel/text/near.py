"""Near-duplicates: documents whose sets of word n-grams are alike, found by MinHash, verified, left out but the first.

Every text is read once before the first is handed on. Of each document of `words` words and more are kept, in unnamed
temporary files: the hashes of its different n-grams, 4 bytes each (of English about 0.7 bytes for a byte of text, of
Russian in UTF-8 0.4), and of its signature a key of 8 bytes for each band (128 permutations at a threshold of 0.8: 25
bands, 200 bytes). Two documents with an equal key are candidates. They are one cluster when their Jaccard similarity,
counted on the n-grams themselves, reaches the threshold; so are chains of such pairs.

Memory: at most 70 bytes a document (25 while texts are read: where it stands and its n-grams end, digest, verdict; then
10 for clusters and reasons, and 33 to sort the keys of one band), and under 150 MB for the documents being signed, of a
single one of 100 MB 540 MB; 200 million documents are 14 GB. On disk each costs 200 bytes and its n-grams: those 200
million, of 4,000 bytes, 0.6 TB.

Shorter documents have no n-gram and are left to the exact rule: "Yes!" and "Yes?" are no copies of one another.
"""

from __future__ import annotations

import os
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from artel.config import NearConfig
from artel.errors import Problem, WorkError, missing_extra
from artel.storage import disk_errors

NearReason = Literal["near_duplicate", "near_validation"]
_REASONS: tuple[NearReason | None, ...] = (None, "near_duplicate", "near_validation")

# A word is a run of letters and digits; case and punctuation are no difference. Kana and Han are written without
# spaces, so each of their characters is a word.
_APART = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[^\W{_APART}]+|[{_APART}]")

# Any constant would do; the run's seed does not enter, so that runs of all seeds leave out the same documents.
_SEED = 20_261_121
# How surely bands are to find a pair exactly at the threshold. More alike pairs are found more surely; less alike
# ones cost a comparison and are refused.
_FOUND = 0.999
# Documents are signed together: 8 MB of n-grams, or 4096 documents, whose signatures pass through Python's integers.
_BATCH_GRAMS = 1_000_000
_BATCH_DOCUMENTS = 4096
# Different words remembered with their hashes: 30 to 40 MB.
_KNOWN_WORDS = 200_000
# A document is compared with at most so many others that share one of its keys and are not of its cluster: a million
# pages from one template, alike but under the threshold, would else be 10^12 comparisons.
_COMPARISONS = 1000


class NearDuplicates:
    """Which of a run's documents are near-duplicates. Found once, by `find`; then asked in the same order, many times.

    Raises InputError at `data.dedup.near` where rensa is not installed.
    """

    def __init__(self, config: NearConfig, tell: Callable[[str], None] = lambda _: None) -> None:
        _signatures()
        self.found = False
        self._config = config
        self._tell = tell
        self._digests = array("I")  # by which a document is known again
        self._reasons = b""

    def find(self, texts: Iterable[tuple[str, bool]], folder: Path) -> None:
        """Read all texts, each with whether it must stay (a validation text), and judge them.

        Those that must stay do, however alike; the others go when one that must stay is in their cluster
        (near_validation) or one that came before (near_duplicate). The result depends on texts and order alone.
        `folder` has room for the temporary files; it is made. Raises WorkError when its disk is full, InputError when
        it cannot be written.
        """
        self._tell("looking for near-duplicates")
        self._digests = array("I")
        stays = bytearray()
        with _Signed(self._config, folder) as signed:
            for place, (text, must_stay) in enumerate(texts):
                self._digests.append(_digest(text))
                stays.append(must_stay)
                signed.add(place, text)
            signed.write()
            roots = _clusters(signed, self._config.threshold)
            self._reasons = _judged(signed.places, roots, stays)
        self.found = True

    def reason(self, place: int, text: str, origin: str) -> NearReason | None:
        """Why the document at this place (from 0) is left out; None when it is kept.

        Raises WorkError when another text stood there when they were compared.
        """
        if place >= len(self._digests) or self._digests[place] != _digest(text):
            what = "the texts changed between the reading that compares them and this one"
            raise WorkError([Problem(origin, what, "start again when the files (or your converter) are at rest")])
        return _REASONS[self._reasons[place]]


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """The similarity of two sorted sets (0 to 1): what they share, of all that is in either."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    return shared / (first.size + second.size - shared)


def bands_and_rows(threshold: float, permutations: int) -> tuple[int, int]:
    """How a signature is cut: as few bands, of as many rows, as find a pair at the threshold 999 times of 1000.

    A band agrees with probability similarity^rows, so one of them with 1 - (1 - similarity^rows)^bands.
    """
    for rows in range(permutations, 1, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _FOUND:
            return bands, rows
    return permutations, 1


class Grams:
    """The n-grams of texts, as hashes."""

    def __init__(self, words: int) -> None:
        self._known = _WordHashes()
        # Odd, so that no two words give the same product.
        self._factors = [np.uint64(xxhash.xxh3_64_intdigest(bytes([place])) | 1) for place in range(words)]

    def of(self, text: str) -> NDArray[np.uint64]:
        """The 64-bit hash of each n-gram in its order, repeats and all; empty for texts of fewer words."""
        if len(self._known) > _KNOWN_WORDS:
            self._known.clear()
        words = map(itemgetter(0), _WORD.finditer(text.casefold()))
        hashes = np.fromiter(map(self._known.__getitem__, words), np.uint64)
        count = hashes.size - len(self._factors) + 1
        if count <= 0:
            return hashes[:0]
        grams = hashes[:count] * self._factors[0]
        for place, factor in enumerate(self._factors[1:], 1):
            grams += hashes[place : place + count] * factor
        return grams


def as_set(grams: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The different n-grams, sorted, by the upper half of their hashes.

    Of n n-grams that another text does not have, n / 2^32 are taken for one of its own by chance: the similarity of
    books of a million words is wrong by 0.0003, that of a page by nothing.
    """
    return np.unique((grams >> np.uint64(32)).astype(np.uint32))


class _WordHashes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        self[word] = found = xxhash.xxh3_64_intdigest(word.encode())
        return found


class _Signed:
    """The n-grams and the band keys of documents, in two temporary files that vanish with the process."""

    def __init__(self, config: NearConfig, folder: Path) -> None:
        self.places = array("q")
        """Of each signed document its place among all; signed documents are numbered in their order."""
        self.bands, self._rows = bands_and_rows(config.threshold, config.permutations)
        self._permutations = config.permutations
        self._grams = Grams(config.words)
        self._sign = _signatures()
        self._factors = np.array([xxhash.xxh3_64_intdigest(bytes([0, row % 256, row // 256])) | 1
                                  for row in range(self._rows)], np.uint64)  # fmt: skip
        self._folder = folder
        self._ends = array("q", [0])  # of each document, in n-grams from the start of the file
        self._blocks: list[int] = []  # documents in each written batch
        self._batch: list[NDArray[np.uint64]] = []
        self._batch_grams = 0

    def __enter__(self) -> _Signed:
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._gram_file = tempfile.TemporaryFile(dir=self._folder)
            self._band_file = tempfile.TemporaryFile(dir=self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gram_file.close()
        self._band_file.close()

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: int, text: str) -> None:
        grams = self._grams.of(text)
        if not grams.size:
            return
        self.places.append(place)
        self._batch.append(grams)
        self._batch_grams += grams.size
        if self._batch_grams >= _BATCH_GRAMS or len(self._batch) == _BATCH_DOCUMENTS:
            self.write()

    def write(self) -> None:
        """Sign the documents that wait for it."""
        if not self._batch:
            return
        ends = np.cumsum([0, *(grams.size for grams in self._batch)], dtype=np.uint64)
        signatures = self._sign(np.concatenate(self._batch), ends, self._permutations, _SEED).to_rows()
        cut = np.array(signatures, np.uint64)[:, : self.bands * self._rows].reshape(-1, self.bands, self._rows)
        keys = (cut * self._factors).sum(axis=2, dtype=np.uint64)
        with disk_errors(self._folder):
            for grams in self._batch:
                found = as_set(grams)
                self._gram_file.write(found.data)
                self._ends.append(self._ends[-1] + found.size)
            self._band_file.write(keys.T.tobytes())
            self._gram_file.flush()
            self._band_file.flush()
        self._blocks.append(len(self._batch))
        self._batch = []
        self._batch_grams = 0

    def size(self, number: int) -> int:
        """How many different n-grams a document has."""
        return self._ends[number + 1] - self._ends[number]

    def grams(self, number: int) -> NDArray[np.uint32]:
        data = os.pread(self._gram_file.fileno(), self.size(number) * 4, self._ends[number] * 4)
        return np.frombuffer(data, np.uint32)

    def keys(self, band: int) -> NDArray[np.uint64]:
        """The key of each document in one band."""
        keys = np.empty(len(self), np.uint64)
        start = 0
        for count in self._blocks:  # a block holds the keys of its documents band after band
            at = (start * self.bands + band * count) * 8
            keys[start : start + count] = np.frombuffer(os.pread(self._band_file.fileno(), count * 8, at), np.uint64)
            start += count
        return keys


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


def _clusters(signed: _Signed, threshold: float) -> _Clusters:
    clusters = _Clusters(len(signed))
    for band in range(signed.bands):
        keys = signed.keys(band)
        order = np.argsort(keys, kind="stable")  # documents of one key stay in their order
        keys = keys[order]
        again = np.flatnonzero(keys[1:] == keys[:-1])  # those whose successor has the same key
        starts = again[np.diff(again, prepend=-2) != 1]
        ends = again[np.diff(again, append=keys.size + 1) != 1] + 2
        for start, end in zip(starts, ends, strict=True):
            _join(order[start:end].tolist(), signed, clusters, threshold)
    return clusters


def _join(candidates: list[int], signed: _Signed, clusters: _Clusters, threshold: float) -> None:
    """Compare the documents of one key, each with those before it that are not of its cluster already."""
    groups: dict[int, list[int]] = {}  # by the root of their cluster
    for number in candidates:
        own = clusters.root(number)
        left = _COMPARISONS
        for root in list(islice(groups, left)):
            if root == own or root not in groups:  # it may have been joined just now
                continue
            compared = groups[root][:left]
            if any(_alike(signed, number, member, threshold) for member in compared):
                members = groups.pop(root) + groups.pop(own, [])
                own = clusters.join(own, root)
                groups[own] = members
                continue
            left -= len(compared)
            if left == 0:
                break
        groups.setdefault(own, []).append(number)


def _alike(signed: _Signed, one: int, other: int, threshold: float) -> bool:
    smaller, larger = sorted((signed.size(one), signed.size(other)))
    if smaller / larger < threshold:  # they cannot share enough
        return False
    return jaccard(signed.grams(one), signed.grams(other)) >= threshold


def _judged(places: array[int], clusters: _Clusters, stays: bytearray) -> bytes:
    """Of each document the number of its reason in _REASONS."""
    kept, near_duplicate, near_validation = range(3)
    reasons = bytearray(len(stays))
    held = {clusters.root(number) for number, place in enumerate(places) if stays[place]}
    for number, place in enumerate(places):
        root = clusters.root(number)
        if stays[place]:
            reasons[place] = kept
        elif root in held:
            reasons[place] = near_validation
        elif root != number:
            reasons[place] = near_duplicate
    return bytes(reasons)


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 32


def _signatures() -> Callable[..., Any]:
    """rensa's function from the hashes of many sets to their signatures."""
    try:
        from rensa import RMinHash
    except ImportError:
        raise missing_extra("rensa", "near", "data.dedup.near") from None
    return RMinHash.digest_matrix_from_flat_token_hashes
