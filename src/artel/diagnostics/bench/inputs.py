"""The input of a measurement: a file of JSON lines, made up or from the user's texts, and a tokenizer for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson

from artel.config import CleanConfig, DataConfig, DedupConfig, SourceConfig, TokenizerTraining
from artel.diagnostics.bench.texts import documents
from artel.errors import InputError
from artel.text import Ledger, read_documents
from artel.tokens import load_tokenizer, train_tokenizer

_SAMPLE = 30_000_000  # bytes of the input that the tokenizer is trained on, which is not measured
_VOCABULARY = 32_768


@dataclass(frozen=True, slots=True)
class Lines:
    """A file of JSON lines, each {"text": …}, with the size of its texts."""

    file: Path
    documents: int
    text: int
    """Bytes of the texts in UTF-8."""

    def texts(self) -> Iterator[str]:
        with self.file.open("rb") as stream:
            for line in stream:
                yield orjson.loads(line)["text"]


def made_up(file: Path, size: int) -> Lines:
    """`size` bytes of made-up text."""
    return write_lines(file, documents(size), size)


def taken(file: Path, path: str, size: int) -> Lines:
    """The first `size` bytes of the texts at `path`, in any format that a source of a run may have.

    Each paragraph of a text file is a document. Raises InputError for fewer than 200 documents.
    """
    source = SourceConfig.model_validate({"path": [path], "document": "paragraph"})
    unchanged = CleanConfig(unicode="none", control=False, whitespace=False)
    data = DataConfig(sources=[source], clean=unchanged, dedup=DedupConfig(exact=False), validation=0.0)
    lines = write_lines(file, (document.record.text for document in read_documents(data, Ledger())), size)
    if lines.documents < 200:
        what = f"{lines.documents} documents are too few for a measurement"
        raise InputError.at(f"--input {path}", what, "give 200 or more: JSON lines, or text with blank lines")
    return lines


def first_of(lines: Lines, file: Path, count: int) -> Lines:
    """The first documents of a file, as a file of their own."""
    return write_lines(file, islice(lines.texts(), count), lines.text)


def write_lines(file: Path, texts: Iterable[str], size: int) -> Lines:
    """Texts up to `size` bytes as a file of JSON lines."""
    count = total = 0
    with file.open("wb") as stream:
        for text in texts:
            stream.write(orjson.dumps({"text": text}) + b"\n")
            count += 1
            total += len(text.encode())
            if total >= size:
                break
    return Lines(file, count, total)


def tokenizer_folder(name: str, lines: Lines, folder: Path) -> tuple[Path, int]:
    """Save the tokenizer `name`, or train a byte-level BPE on the input; its folder and vocabulary size.

    A trained one has 32,768 ids, or one per 500 bytes where the input has less than 16 MB and may not yield as many.
    """
    if name:
        tokenizer = load_tokenizer(name, "--tokenizer")
    else:
        vocabulary = max(1000, min(_VOCABULARY, lines.text // 500))
        training = TokenizerTraining(vocab=vocabulary, sample=_SAMPLE)
        tokenizer = train_tokenizer(lines.texts(), training, where="--size")
    tokenizer.save(folder)
    return folder, tokenizer.vocabulary
