"""Tokens that other programs made, written as a token store: nothing is tokenised, memory does not grow with the input.

    Megatron-LM   NAME.idx + NAME.bin   the index holds the length and place of each sequence and where documents end
    nanoGPT       NAME.bin              uint16 and nothing else; a document reaches to the next end token
    llm.c         NAME.bin              256 int32 (20240520, version 1, number of tokens), then as nanoGPT; or uint32
                                        behind (20240801, 7, tokens). modded-nanogpt writes the first of the two

A document goes into the store with one end token behind it, whether its file has it there, in front (llm.c) or not at
all; where one was added the ledger says so (`end_added`). Documents of no token but that are dropped as `empty`. Each
file stands for itself: what one of llm.c's shards breaks off and the next goes on with are two documents.
"""

from __future__ import annotations

import os
import time
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
from artel.storage import new_folder
from artel.tokens import Sample, StoreWriter, Tokenizer, load_tokenizer
from artel.tokens.manifest import FORMAT, PARTS

Tell = Callable[[str], None]
Span = tuple[int, int]

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = 34  # magic 9, version 8, type 1, number of sequences 8, number of document ends 8
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no tokens
_LLM_C_HEADER = 1024
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # by their first number: version and type

# Numbers looked at together: 8 to 64 MB. A longer document is kept as several samples, so that none is held whole.
_PIECE = 1 << 22
# Any constant would do; the run's seed does not enter, so that all runs are judged on the same documents.
_SEED = 20_261_121


@dataclass(frozen=True, slots=True)
class TokenFile:
    """One file of tokens, memory-mapped, whose header and size have been checked; its ids have not."""

    path: Path
    form: str
    ids: np.ndarray
    """Integers of the file's own type (tokens,)."""
    before: int
    """Bytes that stand before the first token."""
    documents: Callable[[int], Iterable[Span]]
    """Given the end token: first token of each document and the one after its last, in order, without gaps."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_tokens` wrote: the store's folder, its ledger, and the seconds it took."""

    folder: Path
    ledger: dict[str, Any]
    seconds: float


def import_tokens(
    path: str, folder: Path, tokenizer_name: str, validation: float | str, tell: Tell = lambda _: None
) -> Imported:
    """Write the documents of the files at `path` (a name, Megatron's prefix or a glob) as the token store `folder`.

    `tokenizer_name` is the tokenizer that made them, a folder or a hub id; `validation` the share of documents held out
    (by a hash of their ids), or where their files are. The store appears whole or not at all. Raises InputError: no
    such file, one that is damaged or of another form (all of them at once), a folder that is there already, a token
    that the tokenizer does not have; WorkError when the disk is full.
    """
    start = time.perf_counter()
    if os.path.lexists(folder):
        raise _bad(folder, "is there already", "choose another folder for the store, or delete it")
    tokenizer = load_tokenizer(tokenizer_name, "--tokenizer")
    vocabulary = tokenizer.vocabulary
    files = {"train": open_token_files(path, vocabulary, "PATH")}
    if isinstance(validation, str):
        files["validation"] = open_token_files(validation, vocabulary, "--validation")
    with new_folder(folder) as partial:
        tokenizer.save(partial / "tokenizer")
        writing = _Writing(StoreWriter(partial, vocabulary), tokenizer, vocabulary, tell)
        for part, of_part in files.items():
            for file in of_part:
                tell(f"{file.path}: {len(file.ids):,} tokens ({file.form})")
                writing.add(file, part, validation if isinstance(validation, float) else 0.0)
        ledger = writing.ledger()
        _check_parts(ledger, validation)
        (partial / "ledger.json").write_bytes(orjson.dumps(ledger, option=orjson.OPT_INDENT_2))
        writing.writer.close({**_key(files, tokenizer, validation), "vocabulary": vocabulary})
    return Imported(folder, ledger, time.perf_counter() - start)


def open_token_files(path: str, vocabulary: int, where: str) -> list[TokenFile]:
    """The files that a name, a prefix of Megatron's or a glob means, sorted by name; `where` is the option's name.

    Raises InputError with what is wrong with each of them.
    """
    opened: list[TokenFile] = []
    problems: list[Problem] = []
    for file in _named(path, where):
        try:
            opened.append(_open(file, vocabulary))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return opened


def _named(path: str, where: str) -> list[Path]:
    """The .bin files that are meant."""
    if Path(path).is_file():
        found = [Path(path)]
    elif Path(f"{path}.idx").is_file():
        found = [Path(f"{path}.bin")]
    else:
        found = [Path(name) for name in glob(path) if name.endswith((".bin", ".idx"))]  # noqa: PTH207
    if not found:
        fix = "give NAME.bin, the prefix of Megatron-LM's NAME.bin and NAME.idx, or a glob in quotes: 'tokens/*.bin'"
        what = "is a folder" if Path(path).is_dir() else "there are no such files of tokens"
        raise InputError([Problem(f"{where} {path}", what, fix)])
    return sorted({file.with_suffix(".bin") if file.suffix == ".idx" else file for file in found})


def _open(file: Path, vocabulary: int) -> TokenFile:
    if not file.is_file():
        raise _bad(file, "is missing beside its .idx", "give both files of Megatron-LM, NAME.bin and NAME.idx")
    if file.stat().st_size == 0:
        raise _bad(file, "is empty", "give a file with tokens in it")
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
        raise _bad(file, what, fix)
    return _by_end_tokens(file, "nanoGPT", "<u2", 0)


def _open_llm_c(file: Path, head: np.ndarray) -> TokenFile:
    wanted, kind = _LLM_C[int(head[0])]
    version, count = int(head[1]), int(head[2])
    if version != wanted:
        raise _bad(file, f"is llm.c's format in version {version}", f"write it in version {wanted}")
    size, whole = file.stat().st_size, _LLM_C_HEADER + count * np.dtype(kind).itemsize
    if size != whole:
        what = f"has {size:,} bytes, and its header tells of {count:,} tokens, which are {whole:,}"
        raise _bad(file, what, "fetch or write it anew: it is cut off, or not whole")
    if count == 0:
        raise _bad(file, "holds no tokens", "leave it out")
    return _by_end_tokens(file, "llm.c", kind, _LLM_C_HEADER)


def _by_end_tokens(file: Path, form: str, kind: str, before: int) -> TokenFile:
    """A file whose documents reach from one end token to the next."""
    width = np.dtype(kind).itemsize
    if file.stat().st_size % width:
        what = f"has {file.stat().st_size:,} bytes, which is no whole number of tokens of {width} bytes"
        raise _bad(file, what, "fetch or write it anew: it is cut off, or holds something else")
    ids = np.asarray(np.memmap(file, dtype=kind, mode="r", offset=before))

    def documents(end_id: int) -> Iterator[Span]:
        start = 0
        for first in range(0, len(ids), _PIECE):
            for place in np.flatnonzero(ids[first : first + _PIECE] == end_id).tolist():
                yield start, first + place + 1
                start = first + place + 1
        if start < len(ids):
            yield start, len(ids)

    return TokenFile(file, form, ids, before, documents)


def _open_megatron(file: Path, index: Path) -> TokenFile:
    anew = "write it anew with Megatron-LM's tools/preprocess_data.py"
    with index.open("rb") as stream:
        head = stream.read(_MEGATRON_HEADER)
    if not head.startswith(_MEGATRON):
        raise _bad(index, f"is no index of Megatron-LM: it begins with {head[:9]!r}, not {_MEGATRON!r}", anew)
    if len(head) < _MEGATRON_HEADER:
        raise _bad(index, f"is cut off after {len(head)} bytes, within its header", anew)
    version, sequences, ends = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26))
    code = head[17]
    if version != 1:
        raise _bad(index, f"is of version {version}", "this artel reads version 1, which Megatron-LM writes")
    if code not in _MEGATRON_TYPES:
        raise _bad(index, f"says that its tokens are of type {code}, which is no type of tokens", anew)
    told = f"{sequences:,} sequences and {ends:,} ends of documents"
    size, whole = index.stat().st_size, _MEGATRON_HEADER + 12 * sequences + 8 * ends
    if size == whole + sequences and sequences:
        raise _bad(index, "has a mode for each sequence: it holds images too", "give text alone")
    if size != whole:
        raise _bad(index, f"has {size:,} bytes, and its header tells of {told}, which are {whole:,}", anew)
    width = np.dtype(_MEGATRON_TYPES[code]).itemsize
    if sequences == 0 or ends < 2 or file.stat().st_size % width:
        what = f"its {file.stat().st_size:,} bytes are not {told} of tokens of {width} bytes each"
        raise _bad(file, what, anew)
    places = [_MEGATRON_HEADER, _MEGATRON_HEADER + 4 * sequences, _MEGATRON_HEADER + 12 * sequences]
    lengths, pointers, bounds = (
        np.memmap(index, dtype=kind, mode="r", offset=at, shape=(count,))
        for kind, at, count in zip(("<i4", "<i8", "<i8"), places, (sequences, sequences, ends), strict=True)
    )
    _check_sequences(file, index, lengths, pointers, width, anew)
    _check_bounds(index, bounds, sequences, anew)
    ids = np.asarray(np.memmap(file, dtype=_MEGATRON_TYPES[code], mode="r"))

    def documents(end_id: int) -> Iterator[Span]:
        for first in range(0, len(bounds) - 1, _PIECE):
            at = np.asarray(bounds[first : first + _PIECE + 1])
            starts = np.where(at < sequences, pointers[np.minimum(at, sequences - 1)] // width, len(ids))
            yield from pairwise(starts.tolist())

    return TokenFile(file, "Megatron-LM", ids, 0, documents)


def _check_sequences(file: Path, index: Path, lengths: np.ndarray, pointers: np.ndarray, width: int, anew: str) -> None:
    """Raise InputError unless each sequence begins where the one before it ends, and the last ends with the file."""
    expected = 0
    for first in range(0, len(lengths), _PIECE):
        piece = lengths[first : first + _PIECE].astype(np.int64)
        ends = expected + np.cumsum(piece * width)
        wrong = np.flatnonzero((pointers[first : first + _PIECE] != ends - piece * width) | (piece < 0))
        if wrong.size:
            number = first + int(wrong[0])
            what = f"sequence {number:,} ({lengths[number]:,} tokens) does not begin where the one before it ends"
            raise _bad(index, what, anew)
        expected = int(ends[-1])
    size = file.stat().st_size
    if size != expected:
        raise _bad(file, f"has {size:,} bytes, and its sequences in {index.name} are {expected:,}", anew)


def _check_bounds(index: Path, bounds: np.ndarray, sequences: int, anew: str) -> None:
    """Raise InputError unless the documents' bounds go from the first sequence to the last."""
    falls = any((np.diff(bounds[first : first + _PIECE + 1]) < 0).any() for first in range(0, len(bounds), _PIECE))
    if bounds[0] != 0 or bounds[-1] != sequences or falls:
        what = f"the ends of its documents do not rise from 0 to its {sequences:,} sequences"
        raise _bad(index, what, anew)


def _bad(file: Path, what: str, fix: str) -> InputError:
    return InputError([Problem(str(file), what, fix)])


@dataclass(slots=True)
class _Writing:
    """Documents on their way into the store, each counted."""

    writer: StoreWriter
    tokenizer: Tokenizer
    vocabulary: int
    tell: Tell
    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    end_added: int = 0
    parts: dict[str, Counter[str]] = field(default_factory=lambda: {part: Counter() for part in PARTS})

    def add(self, file: TokenFile, part: str, share: float) -> None:
        """The documents of one file, `share` of those of the training part into the validation part."""
        size_of = text_size(self.tokenizer)
        end, name, shown = self.tokenizer.end_id, str(file.path), ""
        for number, (start, stop) in enumerate(file.documents(end)):
            self.read[name] += 1
            has_end = stop > start and int(file.ids[stop - 1]) == end
            text = file.ids[start : stop - has_end]
            if not len(text):
                self.dropped[name] += 1
                continue
            pieces = [text[first : first + _PIECE] for first in range(0, len(text), _PIECE)]
            for at, piece in enumerate(pieces):
                self._check(file, number, start + at * _PIECE, piece)
            if not shown:  # the ids of another tokenizer may all be in range: people see at once that this is no text
                shown = self.tokenizer.decode(text[:32].tolist())[:80]
                self.tell(f"its first document begins: {shown!r}")
            into = "validation" if share and _held_out(pieces, share) else part
            characters, size = (sum(sizes) for sizes in zip(*map(size_of, pieces), strict=True))
            pieces[-1] = np.append(pieces[-1].astype(np.int64), end)
            self.end_added += not has_end
            self.writer.add(into, [Sample(piece) for piece in pieces], size, f"{name}[{number}]")
            self.parts[into].update(documents=1, characters=characters, bytes=size, tokens=len(text) + 1,
                                    samples=len(pieces))  # fmt: skip

    def ledger(self) -> dict[str, Any]:
        """What was read and written, of the form that `artel prepare` writes."""
        sets = {name: _counted(count, self.dropped[name]) for name, count in self.read.items()}
        fields = ("documents", "characters", "bytes")
        return {
            "documents": _counted(self.read.total(), self.dropped.total()),
            "sets": sets,
            "parts": {part: {name: counts[name] for name in fields} for part, counts in self.parts.items()},
            "bytes": {part: counts["bytes"] for part, counts in self.parts.items()},
            "changed": {"end_added": self.end_added} if self.end_added else {},
            "rejected": [],
            "tokens": {part: counts["tokens"] for part, counts in self.parts.items()},
            "samples": {part: counts["samples"] for part, counts in self.parts.items()},
        }

    def _check(self, file: TokenFile, number: int, first: int, piece: np.ndarray) -> None:
        """Raise InputError at the first id that the tokenizer does not have."""
        if piece.max() < self.vocabulary and piece.min() >= 0:
            return
        place = first + int(np.flatnonzero((piece >= self.vocabulary) | (piece < 0))[0])
        at = file.before + place * file.ids.dtype.itemsize
        where = f"{file.path}: token {place:,} (byte {at:,})"
        what = f"id {file.ids[place]:,} in document {number:,}; the tokenizer's ids are 0 to {self.vocabulary - 1:,}"
        raise InputError([Problem(where, what, "give the tokenizer that made these tokens: --tokenizer FOLDER")])


def _counted(read: int, empty: int) -> dict[str, Any]:
    return {"read": read, "kept": read - empty, "dropped": {"empty": empty} if empty else {}}


def _held_out(pieces: list[np.ndarray], share: float) -> bool:
    """Whether a document belongs to the validation part: by its ids, whatever type its file has them in."""
    digest = xxhash.xxh3_64(seed=_SEED)
    for piece in pieces:
        digest.update(piece.astype("<u4").tobytes())
    return bool(digest.intdigest() < share * 2**64)


def text_size(tokenizer: Tokenizer) -> Callable[[np.ndarray], tuple[int, int]]:
    """A function from ids (tokens,) to the characters and UTF-8 bytes of their text; an end token is no text.

    For byte-level vocabularies a table of the tokens' sizes is summed up, which is exact wherever a character is cut;
    for others (SentencePiece, WordPiece) ids are decoded.
    """
    backend = tokenizer.hf.backend_tokenizer
    decoder = orjson.loads(backend.to_str())["decoder"] or {}
    if not any(step.get("type") == "ByteLevel" for step in decoder.get("decoders", [decoder])):

        def decoded(ids: np.ndarray) -> tuple[int, int]:
            text = tokenizer.decode(ids[ids != tokenizer.end_id].tolist())
            return len(text), len(text.encode("utf-8", "surrogatepass"))

        return decoded
    characters, sizes = np.zeros((2, tokenizer.vocabulary), dtype=np.int64)
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        sizes[number] = len(token)  # each byte is written as one letter
        characters[number] = sum(letter not in _CONTINUATION for letter in token)
    for number, added in tokenizer.hf.added_tokens_decoder.items():  # these stand as they are
        characters[number], sizes[number] = len(added.content), len(added.content.encode())
    characters[tokenizer.end_id] = sizes[tokenizer.end_id] = 0

    def summed(ids: np.ndarray) -> tuple[int, int]:
        return int(characters[ids].sum()), int(sizes[ids].sum())

    return summed


# How byte-level vocabularies write the bytes 0x80 to 0xBF, which go on with a character of UTF-8: printable ones of
# Latin-1 as themselves, the others as letters from U+0100 on, after 33 below space and 0x7F.
_CONTINUATION = frozenset(
    chr(byte) if byte >= 0xA1 and byte != 0xAD else chr(0x143 if byte == 0xAD else 0x122 + byte - 0x80)
    for byte in range(0x80, 0xC0)
)


def _key(files: dict[str, list[TokenFile]], tokenizer: Tokenizer, validation: float | str) -> dict[str, Any]:
    """What the manifest says of where the store comes from; `key` is one text for all of it."""
    facts = [
        [part, str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns, file.form]
        for part, of_part in files.items() for file in of_part
    ]  # fmt: skip
    inputs = [FORMAT, "imported", facts, tokenizer.fingerprint, validation]
    key = xxhash.xxh3_128_hexdigest(orjson.dumps(inputs))
    return {"key": key, "objective": "causal", "tokenizer": tokenizer.fingerprint}


def _check_parts(ledger: dict[str, Any], validation: float | str) -> None:
    documents = ledger["documents"]["kept"]
    problems = []
    if ledger["tokens"]["train"] == 0:
        fix = "give a file with documents in it" if not documents else "write a smaller --validation"
        problems.append(Problem("PATH", f"none of its {documents:,} documents is left for training", fix))
    if validation != 0.0 and documents and ledger["tokens"]["validation"] == 0:
        what = f"none of the {documents:,} documents fell into the validation part"
        problems.append(Problem("--validation", what, "write --validation 0, a larger fraction or a file of tokens"))
    if problems:
        raise InputError(problems)
