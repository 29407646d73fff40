"""Imports token files of other programs as a token store, without tokenizing, in bounded memory.

    Megatron-LM   NAME.idx + NAME.bin   the index has the length and position of each sequence and the document ends
    nanoGPT       NAME.bin              only uint16; a document ends with the next end token
    llm.c         NAME.bin              256 int32 (20240520, version 1, number of tokens), then as nanoGPT; or uint32
                                        after (20240801, 7, tokens). modded-nanogpt writes the former

In the store every document ends with one end token. Its file may have the token at the end, at the beginning (llm.c) or
nowhere; the ledger counts the added tokens (`end_added`). Documents with no other token are dropped as `empty`. A
document that continues in the next file (llm.c's shards) becomes two documents.
"""

from __future__ import annotations

import os
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from artel.errors import InputError, Problem
from artel.messages import logger, silence_messages
from artel.storage import new_folder
from artel.text.split import is_held_out, smallest_fraction
from artel.tokens import Sample, StoreWriter, Tokenizer, load_tokenizer
from artel.tokens.manifest import FORMAT, SPLITS

# An arbitrary constant. Not the run's seed: all runs are evaluated on the same documents.
_SEED = 20_261_121


@dataclass(frozen=True, slots=True)
class ImportedStore:
    """The result of `import_tokens`: the store's folder, its ledger, and the seconds it took."""

    folder: Path
    ledger: dict[str, Any]
    seconds: float


def import_tokens(path: str, folder: Path, tokenizer_name: str, validation: float | str) -> ImportedStore:
    """Write the documents of token files as the token store `folder`, atomically.

    Args:
        path: a name, Megatron's prefix, or a glob.
        tokenizer_name: the tokenizer that made the tokens, a folder or a hub id.
        validation: fraction of documents to hold out (by a hash of their ids, at least one), or the path of files.

    Raise InputError for missing, damaged or unknown files (all of them at once), an existing folder, and a token that
    the tokenizer does not have; WorkError if the disk is full.
    """
    start_time = time.perf_counter()
    if os.path.lexists(folder):
        raise file_error(folder, "exists already", "choose another folder for the store, or delete it")
    tokenizer = load_tokenizer(tokenizer_name, "--tokenizer")
    vocabulary = tokenizer.vocabulary
    files = {"train": open_token_files(path, vocabulary, "PATH")}
    if isinstance(validation, str):
        files["validation"] = open_token_files(validation, vocabulary, "--validation")
    fraction = validation if isinstance(validation, float) else 0.0
    with new_folder(folder) as partial:
        tokenizer.save(partial / "tokenizer")
        imported = _write_documents(files, partial, tokenizer, fraction)
        if fraction and not imported.splits["validation"]["documents"]:
            larger_fraction = smallest_fraction(np.array(imported.hashes), fraction)
            if larger_fraction is not None:
                logger.info(
                    "--validation %g catches none of the %s documents: one is held out",
                    fraction,
                    f"{len(imported.hashes):,}",
                )
                for split in SPLITS:
                    shutil.rmtree(partial / split)
                with silence_messages():
                    imported = _write_documents(files, partial, tokenizer, larger_fraction)
        ledger = imported.ledger()
        _check_splits(ledger, validation)
        (partial / "ledger.json").write_bytes(orjson.dumps(ledger, option=orjson.OPT_INDENT_2))
        imported.writer.close({**_manifest_entries(files, tokenizer, validation), "vocabulary": vocabulary})
    return ImportedStore(folder, ledger, time.perf_counter() - start_time)


def _write_documents(
    files: dict[str, list[TokenFile]], folder: Path, tokenizer: Tokenizer, fraction: float
) -> _ImportWriter:
    """Write all documents, `fraction` of the training files into validation. Leave the store open."""
    vocabulary = tokenizer.vocabulary
    imported = _ImportWriter(StoreWriter(folder, vocabulary), tokenizer, vocabulary)
    for split, split_files in files.items():
        for file in split_files:
            logger.info("%s: %s tokens (%s)", file.path, f"{len(file.ids):,}", file.file_format)
            imported.add(file, split, fraction)
    return imported


@dataclass(slots=True)
class _ImportWriter:
    """Writes documents into a store, and counts them."""

    writer: StoreWriter
    tokenizer: Tokenizer
    vocabulary: int
    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    end_added: int = 0
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    """Hashes of the documents, which decide the documents to hold out."""
    splits: dict[str, Counter[str]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})

    def add(self, file: TokenFile, split: str, fraction: float) -> None:
        """Write the documents of a file into a split, `fraction` of them into validation."""
        count_text = make_text_counter(self.tokenizer)
        end_id, name = self.tokenizer.end_id, str(file.path)
        is_first_logged = False
        for document_index, (start, end) in enumerate(file.documents(end_id)):
            self.read[name] += 1
            has_end = end > start and int(file.ids[end - 1]) == end_id
            text = file.ids[start : end - has_end]
            if not len(text):
                self.dropped[name] += 1
                continue
            chunks = [text[first : first + CHUNK_TOKENS] for first in range(0, len(text), CHUNK_TOKENS)]
            for chunk_index, chunk in enumerate(chunks):
                self._check_ids(file, document_index, start + chunk_index * CHUNK_TOKENS, chunk)
            # Ids of another tokenizer may be in range, but the user will see that this is not text.
            if not is_first_logged:
                is_first_logged = True
                logger.info("its first document begins: %r", self.tokenizer.decode(text[:32].tolist())[:80])
            chosen_split = split
            if fraction:
                self.hashes.append(_hash_ids(chunks))
                chosen_split = "validation" if is_held_out(self.hashes[-1], fraction) else split
            num_characters, num_bytes = (sum(counts) for counts in zip(*map(count_text, chunks), strict=True))
            chunks[-1] = np.append(chunks[-1].astype(np.int64), end_id)
            self.end_added += not has_end
            self.writer.add(chosen_split, [Sample(chunk) for chunk in chunks], num_bytes, f"{name}[{document_index}]")
            counts = {"characters": num_characters, "bytes": num_bytes, "tokens": len(text) + 1, "samples": len(chunks)}
            self.splits[chosen_split].update(documents=1, **counts)

    def ledger(self) -> dict[str, Any]:
        """Return the counts in the format of the ledger of `artel prepare`."""
        sets = {name: _document_counts(num_read, self.dropped[name]) for name, num_read in self.read.items()}
        fields = ("documents", "characters", "bytes")
        return {
            "documents": _document_counts(self.read.total(), self.dropped.total()),
            "sets": sets,
            "parts": {split: {name: counts[name] for name in fields} for split, counts in self.splits.items()},
            "bytes": self._count_by_split("bytes"),
            "changed": {"end_added": self.end_added} if self.end_added else {},
            "rejected": [],
            "tokens": self._count_by_split("tokens"),
            "samples": self._count_by_split("samples"),
        }

    def _count_by_split(self, name: str) -> dict[str, int]:
        return {split: counts[name] for split, counts in self.splits.items()}

    def _check_ids(self, file: TokenFile, document_index: int, start: int, chunk: np.ndarray) -> None:
        """Raise InputError at the first id that the tokenizer does not have."""
        if chunk.max() < self.vocabulary and chunk.min() >= 0:
            return
        token_index = start + int(np.flatnonzero((chunk >= self.vocabulary) | (chunk < 0))[0])
        byte_offset = file.offset + token_index * file.ids.dtype.itemsize
        where = f"{file.path}: token {token_index:,} (byte {byte_offset:,})"
        token_id, largest_id = file.ids[token_index], self.vocabulary - 1
        what = f"id {token_id:,} in document {document_index:,}; the tokenizer's ids are 0 to {largest_id:,}"
        raise InputError.at(where, what, "use the tokenizer that made these tokens: --tokenizer FOLDER")


def _document_counts(read: int, empty: int) -> dict[str, Any]:
    return {"read": read, "kept": read - empty, "dropped": {"empty": empty} if empty else {}}


def _hash_ids(chunks: list[np.ndarray]) -> int:
    """Return a 64-bit hash of a document's ids, independent of the integer type of its file."""
    digest = xxhash.xxh3_64(seed=_SEED)
    for chunk in chunks:
        digest.update(chunk.astype("<u4").tobytes())
    return int(digest.intdigest())


def make_text_counter(tokenizer: Tokenizer) -> Callable[[np.ndarray], tuple[int, int]]:
    """Return a function from ids (tokens,) to the (characters, UTF-8 bytes) of their text, without end tokens.

    It uses a table for byte-level vocabularies, exact even if a character is cut, and decodes the ids of others.
    """
    backend = tokenizer.hf.backend_tokenizer
    decoder = orjson.loads(backend.to_str())["decoder"] or {}
    if not any(step.get("type") == "ByteLevel" for step in decoder.get("decoders", [decoder])):

        def count_decoded(ids: np.ndarray) -> tuple[int, int]:
            text = tokenizer.decode(ids[ids != tokenizer.end_id].tolist())
            return len(text), len(text.encode("utf-8", "surrogatepass"))

        return count_decoded
    character_counts, byte_counts = np.zeros((2, tokenizer.vocabulary), dtype=np.int64)
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        byte_counts[token_id] = len(token)  # each byte is one letter
        character_counts[token_id] = sum(letter not in _CONTINUATION for letter in token)
    for token_id, added in tokenizer.hf.added_tokens_decoder.items():  # added tokens are stored as plain text
        character_counts[token_id], byte_counts[token_id] = len(added.content), len(added.content.encode())
    character_counts[tokenizer.end_id] = byte_counts[tokenizer.end_id] = 0

    def count_by_table(ids: np.ndarray) -> tuple[int, int]:
        return int(character_counts[ids].sum()), int(byte_counts[ids].sum())

    return count_by_table


# The letters of byte-level vocabularies for the bytes 0x80 to 0xBF, which continue a character of UTF-8: printable
# Latin-1 letters are unchanged, other bytes are letters from U+0100 on, after 33 below space and 0x7F.
_CONTINUATION = frozenset(
    chr(byte) if byte >= 0xA1 and byte != 0xAD else chr(0x143 if byte == 0xAD else 0x122 + byte - 0x80)
    for byte in range(0x80, 0xC0)
)


def _manifest_entries(
    files: dict[str, list[TokenFile]], tokenizer: Tokenizer, validation: float | str
) -> dict[str, Any]:
    """Return the manifest's entries about the origin of the store. `key` is a digest of all inputs."""
    file_facts = [
        [split, str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns, file.file_format]
        for split, split_files in files.items()
        for file in split_files
    ]
    inputs = [FORMAT, "imported", file_facts, tokenizer.fingerprint, validation]
    key = xxhash.xxh3_128_hexdigest(orjson.dumps(inputs))
    return {"key": key, "objective": "causal", "tokenizer": tokenizer.fingerprint}


def _check_splits(ledger: dict[str, Any], validation: float | str) -> None:
    documents = ledger["documents"]["kept"]
    problems = []
    if ledger["tokens"]["train"] == 0:
        fix = "use a file with documents" if not documents else "write a smaller --validation"
        problems.append(Problem("PATH", f"none of its {documents:,} documents is left for training", fix))
    if validation != 0.0 and documents and ledger["tokens"]["validation"] == 0:
        what = "there is only one document, or all are equal, so none can be held out"
        problems.append(Problem("--validation", what, "write --validation 0, or a file of tokens"))
    if problems:
        raise InputError(problems)


Span = tuple[int, int]

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = 34  # magic 9, version 8, type 1, number of sequences 8, number of document ends 8
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_LLM_C_HEADER = 1024
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic number: (version, type)
# Tokens processed at a time: 8 to 64 MB. Longer documents become several samples, so that memory stays bounded.
CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A memory-mapped file of tokens. Its header and size are checked; its ids are not."""

    path: Path
    file_format: str
    ids: np.ndarray
    """(tokens,) of the file's own integer type."""
    offset: int
    """Bytes before the first token."""
    documents: Callable[[int], Iterable[Span]]
    """Return tokens [start, stop) of each document for an end token's id, in order, without gaps."""


def open_token_files(path: str, vocabulary: int, option: str) -> list[TokenFile]:
    """Open the files that a name, a prefix of Megatron's or a glob given at `option` matches, sorted by name.

    Raise InputError with the problems of all files.
    """
    opened: list[TokenFile] = []
    problems: list[Problem] = []
    for file in _find_files(path, option):
        try:
            opened.append(_open_token_file(file, vocabulary))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return opened


def _find_files(path: str, option: str) -> list[Path]:
    """Return the .bin files that a path matches. Raise InputError if there are none."""
    if Path(path).is_file():
        files = [Path(path)]
    elif Path(f"{path}.idx").is_file():
        files = [Path(f"{path}.bin")]
    else:
        files = [Path(name) for name in glob(path) if name.endswith((".bin", ".idx"))]  # noqa: PTH207
    if not files:
        fix = "use NAME.bin, the prefix of Megatron-LM's NAME.bin and NAME.idx, or a glob in quotes: 'tokens/*.bin'"
        what = "is a folder" if Path(path).is_dir() else "no such token files"
        raise InputError.at(f"{option} {path}", what, fix)
    return sorted({file.with_suffix(".bin") if file.suffix == ".idx" else file for file in files})


def _open_token_file(file: Path, vocabulary: int) -> TokenFile:
    if not file.is_file():
        raise file_error(file, "is missing next to its .idx", "use both files of Megatron-LM, NAME.bin and NAME.idx")
    if file.stat().st_size == 0:
        raise file_error(file, "is empty", "use a file with tokens in it")
    index = file.with_suffix(".idx")
    if index.is_file():
        return _open_megatron(file, index)
    with file.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    if int(header[0]) in _LLM_C:
        return _open_llm_c(file, header)
    if vocabulary > 2**16:
        fix = "use the tokenizer that made them; or add NAME.idx if Megatron-LM wrote them"
        what = f"is uint16 as nanoGPT writes it, which cannot hold the {vocabulary:,} ids of this tokenizer"
        raise file_error(file, what, fix)
    return _open_with_end_tokens(file, "nanoGPT", "<u2", 0)


def _open_llm_c(file: Path, header: np.ndarray) -> TokenFile:
    supported_version, dtype = _LLM_C[int(header[0])]
    version, num_tokens = int(header[1]), int(header[2])
    if version != supported_version:
        raise file_error(file, f"is llm.c's format in version {version}", f"write it in version {supported_version}")
    file_size, expected_size = file.stat().st_size, _LLM_C_HEADER + num_tokens * np.dtype(dtype).itemsize
    if file_size != expected_size:
        what = f"has {file_size:,} bytes, but its header says {num_tokens:,} tokens, which need {expected_size:,}"
        raise file_error(file, what, "download or write it again: it is incomplete")
    if num_tokens == 0:
        raise file_error(file, "holds no tokens", "remove it")
    return _open_with_end_tokens(file, "llm.c", dtype, _LLM_C_HEADER)


def _open_with_end_tokens(file: Path, file_format: str, dtype: str, offset: int) -> TokenFile:
    """Open a file in which every document ends with an end token."""
    width = np.dtype(dtype).itemsize
    if file.stat().st_size % width:
        what = f"has {file.stat().st_size:,} bytes, not a multiple of the token size, {width} bytes"
        raise file_error(file, what, "download or write it again: it is truncated, or not a file of tokens")
    ids = np.asarray(np.memmap(file, dtype=dtype, mode="r", offset=offset))

    def documents(end_id: int) -> Iterator[Span]:
        start = 0
        for first in range(0, len(ids), CHUNK_TOKENS):
            for index in np.flatnonzero(ids[first : first + CHUNK_TOKENS] == end_id).tolist():
                yield start, first + index + 1
                start = first + index + 1
        if start < len(ids):
            yield start, len(ids)

    return TokenFile(file, file_format, ids, offset, documents)


def _open_megatron(file: Path, index: Path) -> TokenFile:
    fix = "write it again with Megatron-LM's tools/preprocess_data.py"
    with index.open("rb") as stream:
        header = stream.read(_MEGATRON_HEADER)
    if not header.startswith(_MEGATRON):
        raise file_error(
            index, f"is not an index of Megatron-LM: it begins with {header[:9]!r}, not {_MEGATRON!r}", fix
        )
    if len(header) < _MEGATRON_HEADER:
        raise file_error(index, f"is cut off after {len(header)} bytes, within its header", fix)
    version, num_sequences, num_ends = (int.from_bytes(header[offset : offset + 8], "little") for offset in (9, 18, 26))
    code = header[17]
    if version != 1:
        raise file_error(index, f"is of version {version}", "this artel reads version 1, which Megatron-LM writes")
    if code not in _MEGATRON_TYPES:
        raise file_error(index, f"has the token type {code}, which is not an integer type", fix)
    content = f"{num_sequences:,} sequences and {num_ends:,} ends of documents"
    actual, expected = index.stat().st_size, _MEGATRON_HEADER + 12 * num_sequences + 8 * num_ends
    if actual == expected + num_sequences and num_sequences:
        raise file_error(index, "has a mode for each sequence: it also contains images", "use text only")
    if actual != expected:
        raise file_error(index, f"has {actual:,} bytes, but its header says {content}, which need {expected:,}", fix)
    width = np.dtype(_MEGATRON_TYPES[code]).itemsize
    if num_sequences == 0 or num_ends < 2 or file.stat().st_size % width:
        what = f"its {file.stat().st_size:,} bytes are not {content} of tokens of {width} bytes each"
        raise file_error(file, what, fix)
    offsets = [_MEGATRON_HEADER, _MEGATRON_HEADER + 4 * num_sequences, _MEGATRON_HEADER + 12 * num_sequences]
    array_lengths = (num_sequences, num_sequences, num_ends)
    lengths, pointers, bounds = (
        np.memmap(index, dtype=dtype, mode="r", offset=offset, shape=(array_length,))
        for dtype, offset, array_length in zip(("<i4", "<i8", "<i8"), offsets, array_lengths, strict=True)
    )
    _check_sequences(file, index, lengths, pointers, width, fix)
    _check_bounds(index, bounds, num_sequences, fix)
    ids = np.asarray(np.memmap(file, dtype=_MEGATRON_TYPES[code], mode="r"))

    def documents(end_id: int) -> Iterator[Span]:
        for first in range(0, len(bounds) - 1, CHUNK_TOKENS):
            chunk = np.asarray(bounds[first : first + CHUNK_TOKENS + 1])
            starts = np.where(chunk < num_sequences, pointers[np.minimum(chunk, num_sequences - 1)] // width, len(ids))
            yield from pairwise(starts.tolist())

    return TokenFile(file, "Megatron-LM", ids, 0, documents)


def _check_sequences(file: Path, index: Path, lengths: np.ndarray, pointers: np.ndarray, width: int, fix: str) -> None:
    """Raise InputError unless each sequence begins at the end of the one before it, and the last ends with the file."""
    expected = 0
    for first in range(0, len(lengths), CHUNK_TOKENS):
        chunk = lengths[first : first + CHUNK_TOKENS].astype(np.int64)
        ends = expected + np.cumsum(chunk * width)
        wrong = np.flatnonzero((pointers[first : first + CHUNK_TOKENS] != ends - chunk * width) | (chunk < 0))
        if wrong.size:
            sequence_index = first + int(wrong[0])
            num_tokens = lengths[sequence_index]
            what = f"sequence {sequence_index:,} ({num_tokens:,} tokens) does not begin where the one before it ends"
            raise file_error(index, what, fix)
        expected = int(ends[-1])
    actual = file.stat().st_size
    if actual != expected:
        raise file_error(file, f"has {actual:,} bytes, but its sequences in {index.name} need {expected:,}", fix)


def _check_bounds(index: Path, bounds: np.ndarray, num_sequences: int, fix: str) -> None:
    """Raise InputError unless the bounds of documents rise from the first sequence to the last."""
    decreases = any(
        (np.diff(bounds[first : first + CHUNK_TOKENS + 1]) < 0).any() for first in range(0, len(bounds), CHUNK_TOKENS)
    )
    if bounds[0] != 0 or bounds[-1] != num_sequences or decreases:
        what = f"the ends of its documents do not rise from 0 to its {num_sequences:,} sequences"
        raise file_error(index, what, fix)


def file_error(file: Path, what: str, fix: str) -> InputError:
    return InputError.at(str(file), what, fix)
