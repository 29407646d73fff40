"""Datasets over a split of a token store: its samples, blocks of equal length, or packed blocks.

Packing puts whole documents or samples into blocks by best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve
Language Modeling"): the longest first, each into the block where it leaves the least space. Only documents longer than
a block are split; samples never are. The assignment is computed when a split is opened, from lengths only: a pure
function of the store and the block length.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from artel.tokens.store import Sample, StoreSplit

PREDICTED = 1
"""Bit of a token's flags in a block: it may be predicted from the previous token. The other bits are the number of its
document in the block, from 1; 0 is padding."""


def document_numbers(flags: np.ndarray) -> np.ndarray:
    """Return each token's document number in its block, int64, from 1; 0 for padding. `flags` may have any shape."""
    return (flags >> 1).astype(np.int64)


def is_predictable(flags: np.ndarray) -> np.ndarray:
    """Return True for tokens that may be predicted from the previous one in the block. `flags` may have any shape."""
    return (flags & PREDICTED) > 0


class TokenBlocks:
    """The token stream of a split, cut into blocks of `length` tokens.

    With `lookahead` 1 a block includes the token after its end, so every token of the stream except the first is
    predicted exactly once per epoch. `leftover_tokens`: number of tokens after the last full block. With `documents`
    the flags of a block contain document numbers.
    """

    def __init__(self, split: StoreSplit, length: int, lookahead: int, *, documents: bool = False) -> None:
        self.split = split
        self.length = length
        self.lookahead = lookahead
        self._num_blocks = max(0, (split.tokens - lookahead) // length)
        self.leftover_tokens = split.tokens - self._num_blocks * length
        self._ends = split.ends() if documents else None

    def __len__(self) -> int:
        return self._num_blocks

    def read(self, index: int) -> Sample:
        """Return ids (length + lookahead,), with `documents` also flags of that shape."""
        start, num_tokens = index * self.length, self.length + self.lookahead
        ids = self.split.read(start, num_tokens)
        if self._ends is None:
            return Sample(ids)
        # As uint64: to compare with other integers, numpy would convert all ends to floats.
        first, last = np.searchsorted(self._ends, np.array([start, start + num_tokens], dtype=np.uint64), side="right")
        block_ends = self._ends[first:last].astype(np.int64) - start
        numbers = 1 + np.searchsorted(block_ends, np.arange(num_tokens), side="right")
        return Sample(ids, (2 * numbers + PREDICTED).astype(np.uint32))

    def origins(self, index: int) -> list[str]:
        return self.split.origins(index * self.length, (index + 1) * self.length)


class UnpackedSamples:
    """The samples of a split: pairs, windows, conversations."""

    def __init__(self, split: StoreSplit) -> None:
        self.split = split

    def __len__(self) -> int:
        return self.split.samples

    def read(self, index: int) -> Sample:
        return self.split.sample(index)

    def origins(self, index: int) -> list[str]:
        return [self.split.origin(index)]


class PackedBlocks(TokenBlocks):
    """Blocks of complete documents, padded to `length`. No token is left over.

    A document longer than a block is split into chunks of `length` tokens, each a separate block. Its last chunk is
    packed. With `lookahead` 1 a full chunk includes the token after it, which is not predicted again in the next chunk.
    So each token of a document except the first is predicted exactly once per epoch, from its own document. The first
    token is predicted from the end of the previous document in the block, if there is one.

    10 million documents take 3 s. Each process needs 13 bytes per chunk and 8 per block, and 45 bytes per chunk while
    packing.
    """

    def __init__(self, split: StoreSplit, length: int, lookahead: int) -> None:
        super().__init__(split, length, lookahead)
        starts, sizes, is_continued = _split_documents(split.ends(), length, lookahead)
        blocks, self._num_blocks = best_fit(np.minimum(sizes, length), length)
        # A block keeps the order of the store, but the last chunks of long documents come first: their first token is
        # predicted in another block, and the first token of a block is not predicted.
        order = np.argsort(2 * blocks.astype(np.int64) + ~is_continued, kind="stable")
        self._starts, self._sizes, self._is_continued = starts[order], sizes[order], is_continued[order]
        self._block_starts = np.concatenate([[0], np.cumsum(np.bincount(blocks, minlength=self._num_blocks))])
        self.leftover_tokens = 0

    def read(self, index: int) -> Sample:
        """Return ids and flags (length + lookahead,). Padding has id 0."""
        ids = np.zeros(self.length + self.lookahead, dtype=np.int64)
        flags = np.zeros(len(ids), dtype=np.uint32)
        position = 0
        for document_number, chunk in enumerate(self._block_chunks(index), start=1):
            size = int(self._sizes[chunk])
            ids[position : position + size] = self.split.read(int(self._starts[chunk]), size)
            flags[position : position + size] = 2 * document_number + PREDICTED
            if self._is_continued[chunk]:
                flags[position] = 2 * document_number
            position += size
        return Sample(ids, flags)

    def origins(self, index: int) -> list[str]:
        ranges = ((int(self._starts[chunk]), int(self._sizes[chunk])) for chunk in self._block_chunks(index))
        return [origin for start, size in ranges for origin in self.split.origins(start, start + size)]

    @property
    def padding(self) -> float:
        """The fraction of padding in all blocks, 0 to 1."""
        num_tokens = float(np.minimum(self._sizes, self.length).sum(dtype=np.int64))
        return 1 - num_tokens / max(1, self._num_blocks * self.length)

    def _block_chunks(self, index: int) -> range:
        return range(int(self._block_starts[index]), int(self._block_starts[index + 1]))


class PackedSamples:
    """Blocks of complete independent samples (conversations). Unused space in a block is padding.

    With `lookahead` 1 the last token of a sample is only predicted, and takes no space in its block of `length` tokens.
    The tokens of a block are those of its samples, in the order of the store. Its flags contain sample numbers
    (`sample_numbers`) and the samples' own flags (`sample_flags`). Raise ValueError for a sample longer than a block.
    """

    def __init__(self, split: StoreSplit, length: int, lookahead: int) -> None:
        self.split = split
        self.length = length
        sizes = sample_sizes(np.diff(split.ends().astype(np.int64), prepend=0), lookahead)
        if len(sizes) and sizes.max() > length:
            raise ValueError(f"a sample of {sizes.max():,} tokens does not fit into a block of {length:,}")
        blocks, self._num_blocks = best_fit(sizes, length)
        self._members = np.argsort(blocks, kind="stable")
        self._block_starts = np.concatenate([[0], np.cumsum(np.bincount(blocks, minlength=self._num_blocks))])
        self._tokens = int(sizes.sum(dtype=np.int64))

    def __len__(self) -> int:
        return self._num_blocks

    def members(self, index: int) -> np.ndarray:
        """Return the indices of the samples in a block."""
        return self._members[self._block_starts[index] : self._block_starts[index + 1]]

    def samples_in(self, num_blocks: int) -> int:
        """Return the number of samples in the first `num_blocks` blocks."""
        return int(self._block_starts[num_blocks])

    def read(self, index: int) -> Sample:
        return join_samples([self.split.sample(int(sample_index)) for sample_index in self.members(index)])

    def origins(self, index: int) -> list[str]:
        return [self.split.origin(int(sample_index)) for sample_index in self.members(index)]

    @property
    def padding(self) -> float:
        """The fraction of padding in all blocks, 0 to 1."""
        return 1 - self._tokens / max(1, self._num_blocks * self.length)


_SAMPLE_FLAG_BITS = 8  # the samples' own flags in a packed block: objectives that pack use one byte


def sample_sizes(tokens: np.ndarray, lookahead: int) -> np.ndarray:
    """Return the space that samples take in a block, int32 (samples,)."""
    return np.maximum(tokens - lookahead, 1).astype(np.int32)


def join_samples(samples: list[Sample]) -> Sample:
    """Join samples. The uint32 flags contain each token's sample number, from 1, and in the low byte its own flags."""
    ids = np.concatenate([sample.ids for sample in samples])
    flags = [
        (np.uint32(number) << _SAMPLE_FLAG_BITS) + (np.zeros(len(sample.ids)) if sample.flags is None else sample.flags)
        for number, sample in enumerate(samples, 1)
    ]
    return Sample(ids, np.concatenate(flags).astype(np.uint32))


def sample_numbers(flags: np.ndarray) -> np.ndarray:
    """Return each token's sample number in its block, int64, from 1; 0 for padding. `flags` may have any shape."""
    return (flags >> _SAMPLE_FLAG_BITS).astype(np.int64)


def sample_flags(flags: np.ndarray) -> np.ndarray:
    """Return each token's flags in its sample, uint8. `flags` may have any shape."""
    return (flags & ((1 << _SAMPLE_FLAG_BITS) - 1)).astype(np.uint8)


def _split_documents(ends: np.ndarray, length: int, lookahead: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents longer than `length`, given the ends of all documents.

    Return for each chunk: start in the stream, int64; number of tokens including the lookahead, int32, at most
    length + lookahead; True if it continues a document.
    """
    ends = ends.astype(np.int64)
    tokens = np.diff(ends, prepend=0)
    starts = ends - tokens
    # With a lookahead the last token of a document is only predicted and takes no space.
    cuts = np.maximum(0, -(-(tokens - lookahead) // length) - 1)
    if cuts.any():
        num_chunks = cuts + 1
        chunk_index = np.arange(num_chunks.sum()) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
        starts = np.repeat(starts, num_chunks) + chunk_index * length
        tokens = np.repeat(tokens, num_chunks) - chunk_index * length
        is_continued = chunk_index > 0
    else:
        is_continued = np.zeros(len(tokens), dtype=bool)
    sizes = np.minimum(tokens, length + lookahead).astype(np.int32)
    is_kept = sizes > 0  # a text may have no tokens
    return starts[is_kept], sizes[is_kept], is_continued[is_kept]


def best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing for sizes from 1 to `length`. Return (block of each item, int32; number of blocks).

    Items of equal size are placed together. The block that took the previous item has the least sufficient space for
    the next one, so it is filled until nothing fits. So all blocks with equal space are filled in one step.
    """
    # numpy sorts 16-bit integers by counting: 0.1 s instead of 1 s for 10 million items.
    unused_space = (length - sizes).astype(np.uint16 if length < 2**16 else np.int32)
    order = np.argsort(unused_space, kind="stable")
    counts = np.bincount(sizes, minlength=length + 1)
    placed = np.empty(len(sizes), dtype=np.int32)
    open_blocks: dict[int, list[np.ndarray]] = {}  # by remaining space
    spaces: list[int] = []  # its keys, ascending

    def add_blocks(space: int, blocks: np.ndarray) -> None:
        if space == 0 or len(blocks) == 0:
            return
        if space not in open_blocks:
            open_blocks[space] = []
            insort(spaces, space)
        open_blocks[space].append(blocks)

    def take_blocks(index: int) -> np.ndarray:
        space = spaces[index]
        blocks = open_blocks[space].pop()
        if not open_blocks[space]:
            del open_blocks[space], spaces[index]
        return blocks

    num_placed = num_blocks = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        num_left = int(counts[size])
        while num_left:
            index = bisect_left(spaces, size)
            if index < len(spaces):
                space = spaces[index]
                blocks = take_blocks(index)
            else:
                space = length
                blocks = np.arange(num_blocks, num_blocks - (-num_left // (length // size)), dtype=np.int32)
                num_blocks += len(blocks)
            per_block = space // size
            num_full = min(len(blocks), num_left // per_block)
            placed[num_placed : num_placed + num_full * per_block] = np.repeat(blocks[:num_full], per_block)
            add_blocks(space - per_block * size, blocks[:num_full])
            num_placed, num_left = num_placed + num_full * per_block, num_left - num_full * per_block
            if num_left and num_full < len(blocks):  # fewer are left than fit into another block
                placed[num_placed : num_placed + num_left] = blocks[num_full]
                add_blocks(space - num_left * size, blocks[num_full : num_full + 1])
                num_placed, num_left, num_full = num_placed + num_left, 0, num_full + 1
            add_blocks(space, blocks[num_full:])
    block_of_item = np.empty_like(placed)
    block_of_item[order] = placed
    return block_of_item, num_blocks
