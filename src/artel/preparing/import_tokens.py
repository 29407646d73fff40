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
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from artel.errors import InputError, Problem
from artel.preparing.token_files import PIECE, TokenFile, bad_file, open_token_files
from artel.storage import new_folder
from artel.text.split import is_held_out, least_fraction
from artel.tokens import Sample, StoreWriter, Tokenizer, load_tokenizer
from artel.tokens.store.manifest import FORMAT, PARTS

Tell = Callable[[str], None]

# Any constant would do; the run's seed does not enter, so that all runs are judged on the same documents.
_SEED = 20_261_121


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
    (by a hash of their ids, at least one), or where their files are. The store appears whole or not at all.

    Raises InputError: no such file, one that is damaged or of another form (all of them at once), a folder that is
    there already, a token that the tokenizer does not have; WorkError when the disk is full.
    """
    start = time.perf_counter()
    if os.path.lexists(folder):
        raise bad_file(folder, "is there already", "choose another folder for the store, or delete it")
    tokenizer = load_tokenizer(tokenizer_name, "--tokenizer")
    vocabulary = tokenizer.vocabulary
    files = {"train": open_token_files(path, vocabulary, "PATH")}
    if isinstance(validation, str):
        files["validation"] = open_token_files(validation, vocabulary, "--validation")
    share = validation if isinstance(validation, float) else 0.0
    with new_folder(folder) as partial:
        tokenizer.save(partial / "tokenizer")
        writing = _written(files, partial, tokenizer, share, tell)
        if share and not writing.parts["validation"]["documents"]:
            least = least_fraction(np.array(writing.hashes), share)
            if least is not None:
                tell(f"--validation {share:g} catches none of the {len(writing.hashes):,} documents: one is held out")
                for part in PARTS:
                    shutil.rmtree(partial / part)
                writing = _written(files, partial, tokenizer, least, lambda line: None)
        ledger = writing.ledger()
        _check_parts(ledger, validation)
        (partial / "ledger.json").write_bytes(orjson.dumps(ledger, option=orjson.OPT_INDENT_2))
        writing.writer.close({**_key(files, tokenizer, validation), "vocabulary": vocabulary})
    return Imported(folder, ledger, time.perf_counter() - start)


def _written(
    files: dict[str, list[TokenFile]], folder: Path, tokenizer: Tokenizer, share: float, tell: Tell
) -> _Writing:
    """All documents, `share` of those of the training part in the validation part; the store is not closed yet."""
    vocabulary = tokenizer.vocabulary
    writing = _Writing(StoreWriter(folder, vocabulary), tokenizer, vocabulary, tell)
    for part, of_part in files.items():
        for file in of_part:
            tell(f"{file.path}: {len(file.ids):,} tokens ({file.form})")
            writing.add(file, part, share)
    return writing


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
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    """Of the documents by which a share of them is held out."""
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
            pieces = [text[first : first + PIECE] for first in range(0, len(text), PIECE)]
            for at, piece in enumerate(pieces):
                self._check(file, number, start + at * PIECE, piece)
            if not shown:  # the ids of another tokenizer may all be in range: people see at once that this is no text
                shown = self.tokenizer.decode(text[:32].tolist())[:80]
                self.tell(f"its first document begins: {shown!r}")
            into = part
            if share:
                self.hashes.append(_hash(pieces))
                into = "validation" if is_held_out(self.hashes[-1], share) else part
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
        raise InputError.at(where, what, "give the tokenizer that made these tokens: --tokenizer FOLDER")


def _counted(read: int, empty: int) -> dict[str, Any]:
    return {"read": read, "kept": read - empty, "dropped": {"empty": empty} if empty else {}}


def _hash(pieces: list[np.ndarray]) -> int:
    """64 bits of a document: of its ids, whatever type its file has them in."""
    digest = xxhash.xxh3_64(seed=_SEED)
    for piece in pieces:
        digest.update(piece.astype("<u4").tobytes())
    return int(digest.intdigest())


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
        what = "there is one document, or all are the same: none can be held out"
        problems.append(Problem("--validation", what, "write --validation 0, or a file of tokens"))
    if problems:
        raise InputError(problems)
