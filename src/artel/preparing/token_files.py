"""Opens and checks token files of other programs: Megatron-LM (.bin and .idx), nanoGPT and llm.c (.bin)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from itertools import pairwise
from pathlib import Path

import numpy as np

from artel.errors import InputError, Problem

Span = tuple[int, int]

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = 34  # magic 9, version 8, type 1, number of sequences 8, number of document ends 8
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no tokens
_LLM_C_HEADER = 1024
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic number: (version, type)
# Tokens processed at a time: 8 to 64 MB. Longer documents become several samples, so that memory stays bounded.
PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A memory-mapped file of tokens. Its header and size are checked; its ids are not."""

    path: Path
    form: str
    ids: np.ndarray
    """(tokens,) of the file's own integer type."""
    offset: int
    """Bytes before the first token."""
    documents: Callable[[int], Iterable[Span]]
    """Return tokens [start, stop) of each document for an end token's id, in order, without gaps."""


def open_token_files(path: str, vocabulary: int, option: str) -> list[TokenFile]:
    """Open the files that a name, a prefix of Megatron's or a glob given at `option` matches, sorted by name.

    Raises InputError with the problems of all files.
    """
    opened: list[TokenFile] = []
    problems: list[Problem] = []
    for file in _find(path, option):
        try:
            opened.append(_open(file, vocabulary))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return opened


def _find(path: str, option: str) -> list[Path]:
    """Return the .bin files."""
    if Path(path).is_file():
        files = [Path(path)]
    elif Path(f"{path}.idx").is_file():
        files = [Path(f"{path}.bin")]
    else:
        files = [Path(name) for name in glob(path) if name.endswith((".bin", ".idx"))]  # noqa: PTH207
    if not files:
        fix = "give NAME.bin, the prefix of Megatron-LM's NAME.bin and NAME.idx, or a glob in quotes: 'tokens/*.bin'"
        what = "is a folder" if Path(path).is_dir() else "there are no such files of tokens"
        raise InputError.at(f"{option} {path}", what, fix)
    return sorted({file.with_suffix(".bin") if file.suffix == ".idx" else file for file in files})


def _open(file: Path, vocabulary: int) -> TokenFile:
    if not file.is_file():
        raise bad_file(file, "is missing beside its .idx", "give both files of Megatron-LM, NAME.bin and NAME.idx")
    if file.stat().st_size == 0:
        raise bad_file(file, "is empty", "give a file with tokens in it")
    index = file.with_suffix(".idx")
    if index.is_file():
        return _open_megatron(file, index)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    if int(head[0]) in _LLM_C:
        return _open_llm_c(file, head)
    if vocabulary > 2**16:
        fix = "give the tokenizer that made them; or NAME.idx too, where Megatron-LM wrote them"
        what = f"is uint16 as nanoGPT writes it, which cannot hold the {vocabulary:,} ids of this tokenizer"
        raise bad_file(file, what, fix)
    return _by_end_tokens(file, "nanoGPT", "<u2", 0)


def _open_llm_c(file: Path, head: np.ndarray) -> TokenFile:
    expected, kind = _LLM_C[int(head[0])]
    version, count = int(head[1]), int(head[2])
    if version != expected:
        raise bad_file(file, f"is llm.c's format in version {version}", f"write it in version {expected}")
    size, full_size = file.stat().st_size, _LLM_C_HEADER + count * np.dtype(kind).itemsize
    if size != full_size:
        what = f"has {size:,} bytes, and its header states {count:,} tokens, which are {full_size:,}"
        raise bad_file(file, what, "download or write it again: it is cut off, or not whole")
    if count == 0:
        raise bad_file(file, "holds no tokens", "leave it out")
    return _by_end_tokens(file, "llm.c", kind, _LLM_C_HEADER)


def _by_end_tokens(file: Path, form: str, kind: str, offset: int) -> TokenFile:
    """Open a file in which every document ends with an end token."""
    width = np.dtype(kind).itemsize
    if file.stat().st_size % width:
        what = f"has {file.stat().st_size:,} bytes, which is no whole number of tokens of {width} bytes"
        raise bad_file(file, what, "download or write it again: it is cut off, or holds something else")
    ids = np.asarray(np.memmap(file, dtype=kind, mode="r", offset=offset))

    def documents(end_id: int) -> Iterator[Span]:
        start = 0
        for first in range(0, len(ids), PIECE):
            for place in np.flatnonzero(ids[first : first + PIECE] == end_id).tolist():
                yield start, first + place + 1
                start = first + place + 1
        if start < len(ids):
            yield start, len(ids)

    return TokenFile(file, form, ids, offset, documents)


def _open_megatron(file: Path, index: Path) -> TokenFile:
    anew = "write it again with Megatron-LM's tools/preprocess_data.py"
    with index.open("rb") as stream:
        head = stream.read(_MEGATRON_HEADER)
    if not head.startswith(_MEGATRON):
        raise bad_file(index, f"is no index of Megatron-LM: it begins with {head[:9]!r}, not {_MEGATRON!r}", anew)
    if len(head) < _MEGATRON_HEADER:
        raise bad_file(index, f"is cut off after {len(head)} bytes, within its header", anew)
    version, sequences, ends = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26))
    code = head[17]
    if version != 1:
        raise bad_file(index, f"is of version {version}", "this artel reads version 1, which Megatron-LM writes")
    if code not in _MEGATRON_TYPES:
        raise bad_file(index, f"says that its tokens are of type {code}, which is no type of tokens", anew)
    content = f"{sequences:,} sequences and {ends:,} ends of documents"
    size, full_size = index.stat().st_size, _MEGATRON_HEADER + 12 * sequences + 8 * ends
    if size == full_size + sequences and sequences:
        raise bad_file(index, "has a mode for each sequence: it holds images too", "give text alone")
    if size != full_size:
        raise bad_file(index, f"has {size:,} bytes, and its header states {content}, which are {full_size:,}", anew)
    width = np.dtype(_MEGATRON_TYPES[code]).itemsize
    if sequences == 0 or ends < 2 or file.stat().st_size % width:
        what = f"its {file.stat().st_size:,} bytes are not {content} of tokens of {width} bytes each"
        raise bad_file(file, what, anew)
    places = [_MEGATRON_HEADER, _MEGATRON_HEADER + 4 * sequences, _MEGATRON_HEADER + 12 * sequences]
    lengths, pointers, bounds = (
        np.memmap(index, dtype=kind, mode="r", offset=at, shape=(count,))
        for kind, at, count in zip(("<i4", "<i8", "<i8"), places, (sequences, sequences, ends), strict=True)
    )
    _check_sequences(file, index, lengths, pointers, width, anew)
    _check_bounds(index, bounds, sequences, anew)
    ids = np.asarray(np.memmap(file, dtype=_MEGATRON_TYPES[code], mode="r"))

    def documents(end_id: int) -> Iterator[Span]:
        for first in range(0, len(bounds) - 1, PIECE):
            at = np.asarray(bounds[first : first + PIECE + 1])
            starts = np.where(at < sequences, pointers[np.minimum(at, sequences - 1)] // width, len(ids))
            yield from pairwise(starts.tolist())

    return TokenFile(file, "Megatron-LM", ids, 0, documents)


def _check_sequences(file: Path, index: Path, lengths: np.ndarray, pointers: np.ndarray, width: int, anew: str) -> None:
    """Raise InputError unless each sequence begins at the end of the one before it, and the last ends with the file."""
    expected = 0
    for first in range(0, len(lengths), PIECE):
        piece = lengths[first : first + PIECE].astype(np.int64)
        ends = expected + np.cumsum(piece * width)
        wrong = np.flatnonzero((pointers[first : first + PIECE] != ends - piece * width) | (piece < 0))
        if wrong.size:
            number = first + int(wrong[0])
            what = f"sequence {number:,} ({lengths[number]:,} tokens) does not begin where the one before it ends"
            raise bad_file(index, what, anew)
        expected = int(ends[-1])
    size = file.stat().st_size
    if size != expected:
        raise bad_file(file, f"has {size:,} bytes, and its sequences in {index.name} are {expected:,}", anew)


def _check_bounds(index: Path, bounds: np.ndarray, sequences: int, anew: str) -> None:
    """Raise InputError unless the bounds of documents rise from the first sequence to the last."""
    falls = any((np.diff(bounds[first : first + PIECE + 1]) < 0).any() for first in range(0, len(bounds), PIECE))
    if bounds[0] != 0 or bounds[-1] != sequences or falls:
        what = f"the ends of its documents do not rise from 0 to its {sequences:,} sequences"
        raise bad_file(index, what, anew)


def bad_file(file: Path, what: str, fix: str) -> InputError:
    return InputError.at(str(file), what, fix)
