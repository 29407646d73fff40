"""The components of preparing and training, each measured alone in this process: HTML, packed lines, blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import zstandard

from artel.config import DataConfig, SourceConfig
from artel.diagnostics.bench.figures import MEGABYTE, Figure, median, rate
from artel.diagnostics.bench.inputs import Lines
from artel.diagnostics.bench.texts import pages
from artel.text import Rejected, html_to_text
from artel.text.formats.jsonl import read_jsonl
from artel.text.reading.source_file import SourceFile
from artel.tokens import Order, Sample, StoreWriter, TokenBlocks, TokenStore, micro_batches, step_numbers

_PAGES = 20_000_000  # bytes of text in the pages, which are in memory
_LINES = 200_000_000  # bytes of text in the packed file
_BLOCK, _BATCH, _ROWS = 1024, 64, 8
_VOCABULARY = 32_768


def measure_html(text: Lines, rounds: int) -> list[Figure]:
    """Web pages to text."""
    texts = list(islice(text.texts(), max(1, int(text.documents * min(1, _PAGES / text.text)))))
    html_pages = list(pages(texts))
    size = sum(map(len, html_pages))

    def convert() -> None:
        for page in html_pages:
            html_to_text(page)

    seconds = _processor_time(convert, rounds)
    definition = "MB of HTML per second of processor time of `html_to_text`: decoding, parsing, the text line by line"
    text_bytes = sum(len(text.encode()) for text in texts)
    text_rate = rate(text_bytes / MEGABYTE, seconds)
    more = {"pages": len(html_pages), "html_bytes": size, "text_bytes": text_bytes, "text_rate": text_rate}
    return [Figure("html", rate(size / MEGABYTE, seconds), "MB/s a core", definition, ">= 40", more=more)]


def measure_jsonl_zst(text: Lines, folder: Path, rounds: int) -> list[Figure]:
    """Packed JSON lines to records: all lines, and only those in ASCII, like English ones."""
    all_lines = (
        "MB of unpacked JSON lines per second of processor time, from a .jsonl.zst file (level 3) to records with "
        "their `file:line`"
    )
    figures = []
    for name, definition, chooses in (
        ("jsonl_zst", all_lines, lambda line: True),
        ("jsonl_zst_ascii", "the same for the lines in ASCII", bytes.isascii),
    ):
        file = folder / f"{name}.jsonl.zst"
        lines, size = _packed(text, file, chooses)
        seconds = _processor_time(partial(_parse, file, lines), rounds) if lines else 0
        more = {"lines_bytes": size, "packed_bytes": file.stat().st_size, "records": lines}
        file.unlink()
        why = "" if lines else "no line is in ASCII"
        figures.append(Figure(name, rate(size / MEGABYTE, seconds), "MB/s a core", definition, ">= 200", why, more))
    return figures


def _packed(text: Lines, file: Path, chooses: Callable[[bytes], bool]) -> tuple[int, int]:
    """Pack up to _LINES bytes of lines; their number and their bytes."""
    count = size = 0
    with text.file.open("rb") as source, zstandard.ZstdCompressor(level=3).stream_writer(file.open("wb")) as packed:
        for line in source:
            if size >= _LINES:
                break
            if chooses(line):
                count += 1
                size += len(line)
                packed.write(line)
    return count, size


def _parse(file: Path, lines: int) -> None:
    source = SourceConfig(path=[str(file)], format="jsonl")
    records = read_jsonl(SourceFile(file, str(file), "bench", source, DataConfig(sources=[source])))
    assert sum(not isinstance(record, Rejected) for record in records) == lines


def measure_read_back(tokens: int, folder: Path, rounds: int) -> list[Figure]:
    """Blocks as training reads them, from a store of `tokens` tokens and from one of a tenth of that."""
    sizes = {"read_back_tenth": max(tokens // 10, 2 * _BLOCK), "read_back": max(tokens, 20 * _BLOCK)}
    stores = {}
    for name, count in sizes.items():
        _write_store(folder / name, count)
        stores[name] = TokenStore(folder / name)
        for file in (folder / name).rglob("*.tokens"):
            file.read_bytes()  # into the page cache
    steps = max(1, min(tokens, 20_000_000) // (_BATCH * _BLOCK))
    seconds: dict[str, list[float]] = {name: [] for name in sizes}
    for _ in range(rounds):
        for name, store in stores.items():
            start = time.process_time()
            _read(store, steps)
            seconds[name].append(time.process_time() - start)
    read = steps * _BATCH * _BLOCK
    rates = {name: rate(read, median(times)) for name, times in seconds.items()}
    definition = (
        f"tokens per second of processor time, in the random order of training, to micro-batches of {_ROWS} blocks of "
        f"{_BLOCK} (int64), from a store of {sizes['read_back']:,} tokens in the page cache"
    )
    small, large = rates["read_back_tenth"], rates["read_back"]
    ratio = large / small if small and large else None
    more = {"store_tokens": sizes["read_back"], "tokens_read": read}
    tenth = {**more, "store_tokens": sizes["read_back_tenth"]}
    return [
        Figure("read_back", large, "tokens/s a core", definition, ">= 100,000,000", more=more),
        Figure("read_back_tenth", small, "tokens/s a core", "the same from a store of a tenth of the size", more=tenth),
        Figure("read_back_constancy", ratio, "", "read_back over read_back_tenth: 1 is independent of the size", "1"),
    ]


def _write_store(folder: Path, tokens: int) -> None:
    folder.mkdir()
    writer = StoreWriter(folder, _VOCABULARY)
    random = np.random.default_rng(0)
    for number in range(0, tokens, 1000):
        ids = random.integers(0, _VOCABULARY, min(1000, tokens - number))
        writer.add("train", [Sample(ids)], 4 * len(ids), f"made up:{number}")
    writer.close({"key": "bench", "objective": "causal", "tokenizer": "none", "vocabulary": _VOCABULARY})


def _read(store: TokenStore, steps: int) -> None:
    blocks = TokenBlocks(store.train, _BLOCK, 1)
    order = Order(len(blocks), 0)
    for step in range(steps):
        numbers = step_numbers(step, _BATCH, steps * _BATCH)
        epochs = numbers // len(blocks)
        micro_batches(blocks, order.at(numbers), epochs, rank=0, world=1, batch=_BATCH, size=_ROWS)


def _processor_time(work: Callable[[], None], rounds: int) -> float:
    """Median seconds of processor time, after a first run that does not count."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return median(seconds)
