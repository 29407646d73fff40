"""Locate data sets by the names in other tools' configurations: local files or data sets on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".xz", ".bz2", ".arrow")
# The hub keeps a copy of each public data set in this form, CONFIGURATION/SPLIT/0000.parquet
# (https://huggingface.co/docs/dataset-viewer/parquet).
_PARQUET = "hf://datasets/{name}@refs/convert/parquet/{subset}/{split}/*.parquet"
_HUB_NOTE = "the hub's parquet files of this data set; if it has none, write its files: hf://datasets/{name}/FILE"

# Old data sets without an owner in their name; hf:// needs the owner.
_WITH_OWNER = {
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
    note: str = ""
    """A note on data that the user should check; empty for local files."""


def local_or_hub(name: str, subset: str = "", split: str = "train") -> DataSet:
    """Return a local file or folder if `name` exists or looks like one, a URL, or else a data set on the hub."""
    if "://" in name or name.startswith((".", "/", "~")) or name.endswith(_SUFFIXES) or path_exists(name):
        return DataSet(name)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return DataSet(name, note="your file or folder, or hf://datasets/OWNER/NAME/FILE")
    name = _WITH_OWNER.get(name, name)
    if "/" not in name:
        name = f"OWNER/{name}"
    path = _PARQUET.format(name=name, subset=subset or "default", split=split)
    return DataSet(path, is_on_hub=True, note=_HUB_NOTE.format(name=name))


def path_exists(name: str) -> bool:
    """True if a file or folder has this name. False for names that no file can have."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False
