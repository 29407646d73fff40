"""Decontamination: find documents that share n-grams with benchmarks, and the rows of those benchmarks.

The index of the n-grams of the benchmarks:

    hashes        uint64: the hash of each n-gram of each row, sorted
    rows          uint32: the index of the row of each hash
    places.jsonl  the origin of each row (`file:line`), in order
    about.json    for each benchmark its name, its number of rows, and how many are too short for an n-gram

One process writes the index before any text is read; the processes that read texts map it into memory. With n n-grams
in the texts and m in the index, n·m / 2^64 collide: one in 20 million for a trillion and ten million.

The method is that of datatrove (`NGramsDecontIndexer`, `NGramsDecontFilter`), used for FineWeb. Texts are simplified
as in its `simplify_text`: lower case, no punctuation, no diacritics (ё is е, é is e), a 0 for each number. So a
benchmark is found even if typesetting or numbers differ.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.config import BenchmarkConfig, DataConfig
from artel.errors import InputError
from artel.messages import logger
from artel.storage import new_folder
from artel.text.benchmark_rows import benchmark_files, file_problems, file_rows, task_problems, task_rows
from artel.text.dedup.shingles import SHINGLE_VERSION, Shingler
from artel.text.records import ContaminatedDocument, Pair, Preference, Record

NGRAM_VERSION = [1, SHINGLE_VERSION]
"""Part of the store key: increase the first number when n-grams are hashed in another way."""

_MARKS = re.compile("[\u0300-\u036f]")
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
# As in shingles: each character of Kana and Han is a word.
_ONE_CHARACTER_WORDS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORDS = re.compile(rf"[{_ONE_CHARACTER_WORDS}]|(?:(?![{_ONE_CHARACTER_WORDS}])\w)+")
# A table of one byte per slot filters out most n-grams of a text that are not in the index: one in sixteen is looked
# up in vain. Its 16 MB at most stay in the cache that cores share.
_SLOTS_PER_HASH, _MAX_SLOTS = 16, 1 << 24


def simplify(text: str) -> str:
    """Return the text in lower case, without diacritics, with a 0 for each number."""
    decomposed = unicodedata.normalize("NFD", text)
    if decomposed != text or not text.isascii():
        decomposed = _MARKS.sub("", decomposed)
    return _NUMBERS.sub("0", decomposed.casefold())


def simplified_words(text: str) -> list[str]:
    """Return the words of the simplified text."""
    return _WORDS.findall(simplify(text))


class Ngrams:
    """Hashes the n-grams of texts."""

    def __init__(self, words: int) -> None:
        self.words = words
        self._ngrams = Shingler(words)

    def hashes(self, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
        """Return uint64 (n-grams,) for each text, in order, with repetitions; empty for fewer than `words` words."""
        return self._ngrams.hashes(list(map(simplify, texts)))


def check_benchmarks(data: DataConfig) -> None:
    """Raise InputError with all problems of the benchmarks that can be found before reading."""
    problems = [
        problem
        for key, benchmark in _list_benchmarks(data)
        for problem in (task_problems(benchmark, key) if benchmark.task else file_problems(benchmark, key))
    ]
    if problems:
        raise InputError(problems)


def benchmark_fingerprint(data: DataConfig) -> list[Any]:
    """Return path, size and version of each benchmark file, and the version of the harness, for the store key."""
    facts: list[Any] = [NGRAM_VERSION]
    for key, benchmark in _list_benchmarks(data):
        if benchmark.task:
            facts.append(["task", benchmark.task, version("lm_eval")])  # its questions may change
        else:
            files = benchmark_files(benchmark, key, data)
            facts += [[entry.address, entry.size, entry.version] for entry in files]
    return facts


def write_index(data: DataConfig, folder: Path) -> None:
    """Write the index of the run's benchmarks into `folder`.

    Raise InputError if a benchmark cannot be read.
    """
    config = data.decontaminate
    assert config is not None
    ngrams = Ngrams(config.words)
    hashes, row_indices = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
    origins: list[str] = []
    descriptions: list[dict[str, Any]] = []
    for key, benchmark in _list_benchmarks(data):
        name = benchmark.path or benchmark.task
        logger.info("reading the benchmark %s", name)
        first = len(origins)
        num_too_short = 0
        for row in task_rows(benchmark, key) if benchmark.task else file_rows(benchmark, key, data):
            texts = [f"{row.query}\n{label}" for label in row.labels or [""]]  # an n-gram may span both
            row_hashes = np.unique(np.concatenate(ngrams.hashes(texts)))
            num_too_short += row_hashes.size == 0
            hashes.append(row_hashes)
            row_indices.append(np.full(row_hashes.size, len(origins), np.uint32))
            origins.append(row.origin)
        if len(origins) - first == num_too_short:
            what = f"no row of {name} has {config.words} words ({len(origins) - first:,} rows)"
            fix = "lower data.decontaminate.words, or use other fields"
            raise InputError.at(key, what, fix)
        descriptions.append({"name": name, "rows": len(origins) - first, "too_short": num_too_short})
    all_hashes = np.concatenate(hashes)
    order = np.argsort(all_hashes, kind="stable")
    with new_folder(folder) as partial:
        (partial / "hashes").write_bytes(all_hashes[order].tobytes())
        (partial / "rows").write_bytes(np.concatenate(row_indices)[order].tobytes())
        (partial / "places.jsonl").write_bytes(b"".join(orjson.dumps(origin) + b"\n" for origin in origins))
        (partial / "about.json").write_bytes(orjson.dumps(descriptions))


class BenchmarkIndex:
    """An index that `write_index` wrote."""

    def __init__(self, folder: Path, words: int) -> None:
        self._folder = folder
        self._ngrams = Ngrams(words)
        self._hashes = np.memmap(folder / "hashes", np.uint64, "r").view(np.ndarray)
        self._row_indices = np.memmap(folder / "rows", np.uint32, "r").view(np.ndarray)
        slots = min(_MAX_SLOTS, 1 << (_SLOTS_PER_HASH * self._hashes.size).bit_length())
        self._shift = np.uint64(64 - slots.bit_length() + 1)
        self._has_hash = np.zeros(slots, np.bool_)
        self._has_hash[self._hashes >> self._shift] = True

    def find(self, records: Sequence[Record]) -> list[ContaminatedDocument | None]:
        """Return the benchmark rows that share n-grams with each record; None if there are none.

        Pass many short records at a time: the overhead of a call is the time of 5,000 characters.
        """
        texts = [(index, text) for index, record in enumerate(records) for text in _lookup_texts(record)]
        matches: list[ContaminatedDocument | None] = [None] * len(records)
        text_hashes = self._ngrams.hashes([text for _, text in texts])
        hashes = np.concatenate(text_hashes)
        candidates = np.flatnonzero(self._has_hash[hashes >> self._shift])
        starts = np.searchsorted(self._hashes, hashes[candidates])
        ends = np.searchsorted(self._hashes, hashes[candidates], side="right")
        matching = np.flatnonzero(ends > starts)
        if not matching.size:
            return matches
        text_ends = np.cumsum([array.size for array in text_hashes])
        text_indices = np.searchsorted(text_ends, candidates[matching], side="right")
        for text_index in np.unique(text_indices).tolist():
            record_index, text = texts[text_index]
            if matches[record_index] is None:
                positions = matching[text_indices == text_index]
                spans = zip(starts[positions].tolist(), ends[positions].tolist(), strict=True)
                rows = np.unique(np.concatenate([self._row_indices[start:end] for start, end in spans])).tolist()
                first = int(candidates[positions[0]]) - (int(text_ends[text_index - 1]) if text_index else 0)
                words = " ".join(simplified_words(text)[first : first + self._ngrams.words])
                record = records[record_index]
                matches[record_index] = ContaminatedDocument(record.origin, record.set_name, rows, words)
        return matches

    @cached_property
    def origins(self) -> list[str]:
        """The origin of each row: `file:line`."""
        return [orjson.loads(line) for line in (self._folder / "places.jsonl").read_bytes().splitlines()]

    @cached_property
    def benchmarks(self) -> list[dict[str, Any]]:
        """`name`, `rows` and `too_short` of each benchmark."""
        return orjson.loads((self._folder / "about.json").read_bytes())


def _list_benchmarks(data: DataConfig) -> Iterator[tuple[str, BenchmarkConfig]]:
    for index, benchmark in enumerate(data.decontaminate.benchmarks if data.decontaminate else []):
        yield f"data.decontaminate.benchmarks.{index}", benchmark


def _lookup_texts(record: Record) -> Sequence[str]:
    """Return the texts of a record to look up, as the model would read them."""
    if isinstance(record.fields, Pair):
        return [f"{record.fields.input}\n{record.fields.output}"]
    if isinstance(record.fields, Preference) and record.fields.rejected is not None:
        prompt, rejected = record.fields.prompt, record.fields.rejected
        # The text of a preference has its chosen answer between the prompt and the rejected one.
        return [record.text, "\n".join([*(message.content for message in prompt), rejected.content])]
    return [record.text]
