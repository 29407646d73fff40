"""Lists of rejected and contaminated documents, in the store and in the folder of each run that uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from artel.config import RunConfig
from artel.messages import Phrase
from artel.preparing.run_mark import claim_folder, read_run_id
from artel.storage import write_file
from artel.text import BenchmarkIndex, ContaminatedDocument, Ledger

REJECTED, CONTAMINATED = "rejected.jsonl", "contaminated.jsonl"
"""Records that could not be used; documents that share n-grams with benchmarks (with data.decontaminate)."""
LISTS = (REJECTED, CONTAMINATED)


def create_ledger(config: RunConfig, rejected: BinaryIO) -> Ledger:
    """Return a ledger that writes the rejected records to the stream `rejected`, one per line."""
    return Ledger(
        on_reject=lambda record: rejected.write(orjson.dumps(record.to_json()) + b"\n"),
        rejected_file=str(Path(config.run, REJECTED)) if config.run else "",
    )


def copy_list(config: RunConfig, file: Path) -> None:
    """Copy a list into the run's folder, if there is one."""
    if config.run:
        claim_folder(Path(config.run))
        write_file(Path(config.run, file.name), file.read_bytes())


def copy_lists(config: RunConfig, store: Path) -> None:
    """Copy the nonempty lists of a store into the run's folder, and remove outdated lists."""
    for name in LISTS:
        file = store / name
        if file.is_file() and file.stat().st_size:
            copy_list(config, file)
        elif config.run and read_run_id(Path(config.run)):  # the texts were fixed since
            Path(config.run, name).unlink(missing_ok=True)


# Maximum benchmark rows listed per document: a text may contain a whole benchmark.
_MAX_LISTED_ROWS = 20


def write_contaminated(
    file: Path, contaminated: Iterable[ContaminatedDocument], benchmark_index: BenchmarkIndex
) -> tuple[dict[str, Any], str]:
    """Write a line for each contaminated document. Return counts by benchmark, and a note for the user."""
    benchmarks = benchmark_index.benchmarks
    row_benchmarks = [index for index, benchmark in enumerate(benchmarks) for _ in range(benchmark["rows"])]
    found_rows: set[int] = set()
    documents: Counter[int] = Counter()
    num_documents = 0
    first_example: dict[str, str] = {}
    with file.open("wb") as stream:
        for item in contaminated:
            benchmark_indices = sorted({row_benchmarks[row] for row in item.benchmark_rows})
            row_origins = [benchmark_index.origins[row] for row in item.benchmark_rows[:_MAX_LISTED_ROWS]]
            line = {
                "origin": item.origin,
                "set": item.set_name,
                "benchmarks": [benchmarks[index]["name"] for index in benchmark_indices],
                "rows": row_origins,
                "count": len(item.benchmark_rows),
                "words": item.words,
            }
            stream.write(orjson.dumps(line) + b"\n")
            found_rows.update(item.benchmark_rows)
            documents.update(benchmark_indices)
            num_documents += 1
            first_example = first_example or {"origin": item.origin, "words": item.words, "place": row_origins[0]}
    num_found = Counter(row_benchmarks[row] for row in found_rows)
    counts = {
        benchmark["name"]: {
            "rows": benchmark["rows"],
            "too_short": benchmark["too_short"],
            "rows_found": num_found[index],
            "documents": documents[index],
        }
        for index, benchmark in enumerate(benchmarks)
    }
    template = "{count:,} documents share words with benchmarks and are left out: {rows}"
    note = Phrase(template, count=num_documents, rows=[_describe_rows(name, count) for name, count in counts.items()])
    if num_documents:
        listed_template = "{note}; each is listed in {file}, the first: {origin} has {words!r} of {place}"
        note = Phrase(listed_template, note=note, file=file.name, **first_example)
    return counts, note


def _describe_rows(name: str, counts: dict[str, int]) -> Phrase:
    template = "{rows_found:,} of {rows:,} rows of {name} in {documents:,} documents"
    if counts["too_short"]:
        template = (
            "{rows_found:,} of {rows:,} rows of {name} in {documents:,} documents ({too_short:,} rows are too short to "
            "be found)"
        )
    return Phrase(template, name=name, **counts)
