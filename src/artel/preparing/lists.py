"""The lists of documents that lie in a store, and are copied into the folder of each run that uses it."""

from __future__ import annotations

from pathlib import Path

from artel.config import RunConfig
from artel.preparing.claim import claim, identity
from artel.storage import write_file

REJECTED, CONTAMINATED = "rejected.jsonl", "contaminated.jsonl"
"""The records that could not be used; the documents that share n-grams with benchmarks, if the run looks for them."""
LISTS = (REJECTED, CONTAMINATED)


def rejected_file_of(run: RunConfig) -> str:
    """Where the run's list of rejected records stands, for messages; empty if there is no run and only a text."""
    return str(Path(run.run, REJECTED)) if run.run else ""


def keep_list(run: RunConfig, file: Path) -> None:
    """Copy a list into the run's folder, if there is a run and not only a text."""
    if run.run:
        claim(Path(run.run))
        write_file(Path(run.run, file.name), file.read_bytes())


def copy_lists(run: RunConfig, store: Path) -> None:
    """Copy the lists of a store that are not empty into the run's folder, and remove those of an earlier start."""
    for name in LISTS:
        file = store / name
        if file.is_file() and file.stat().st_size:
            keep_list(run, file)
        elif run.run and identity(Path(run.run)):  # before the texts were mended
            Path(run.run, name).unlink(missing_ok=True)
