"""Data sets by the names that other tools give them: of files here, or of the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".xz", ".bz2", ".arrow")
# The hub keeps a copy of each public data set in this form, CONFIGURATION/SPLIT/0000.parquet
# (https://huggingface.co/docs/dataset-viewer/parquet).
_PARQUET = "hf://datasets/{name}@refs/convert/parquet/{subset}/{split}/*.parquet"
_DOUBT = "the hub's parquet files of this data set; if it has none, give its files: hf://datasets/{name}/FILE"

# Data sets of the hub's first years, which belong to somebody by now; it is not reached without an owner.
_OWNED = {
    "wikitext": "Salesforce/wikitext",
    "c4": "allenai/c4",
    "imdb": "stanfordnlp/imdb",
    "bookcorpus": "bookcorpus/bookcorpus",
    "oscar": "oscar-corpus/oscar",
    "squad": "rajpurkar/squad",
    "gsm8k": "openai/gsm8k",
    "cnn_dailymail": "abisee/cnn_dailymail",
}

SLICED_SPLIT = re.compile(r"([\w.-]+)(\[(?:-?\d+%?)?:(?:-?\d+%?)?\])?")
"""`train[:10%]`: a split, and a slice of its rows."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """The location of a data set's files."""

    path: str
    is_on_hub: bool = False
    doubt: str = ""
    """A note on what the user should check; empty for local files."""


def local_or_hub(name: str, subset: str = "", split: str = "train") -> DataSet:
    """A file or folder that is there or is written as one, an address, else a data set of the hub."""
    if "://" in name or name.startswith((".", "/", "~")) or name.endswith(_SUFFIXES) or is_here(name):
        return DataSet(name)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return DataSet(name, doubt="your file or folder, or hf://datasets/OWNER/NAME/FILE")
    name = _OWNED.get(name, name)
    if "/" not in name:
        name = f"OWNER/{name}"
    path = _PARQUET.format(name=name, subset=subset or "default", split=split)
    return DataSet(path, is_on_hub=True, doubt=_DOUBT.format(name=name))


def is_here(name: str) -> bool:
    """True for a file or folder of that name; no name of a file is too long or has a zero byte."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False
