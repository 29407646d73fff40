"""What a text holds: its files are found, and the first records of each format that can read them are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.registry import FORMATS
from artel.text import Ledger, all_inputs, check_sources, read_documents
from artel.text.formats.auto import format_of
from artel.text.sources.inputs import Input

_RECORDS = 20  # that a format must be able to read
_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Look:
    paths: tuple[str, ...]
    files: int
    bytes: int
    formats: dict[str, str] = field(hash=False)
    """Formats that read it, the likeliest first, and what their records are: text, conversations …"""

    @property
    def kinds(self) -> set[str]:
        return set(self.formats.values())

    def format_for(self, learns_from: tuple[str, ...]) -> str:
        """The likeliest format whose records an objective learns from."""
        return next(name for name, kind in self.formats.items() if kind in learns_from)

    def describe(self) -> str:
        """For people: `1 file, 3.1 MB: text`."""
        plural = "" if self.files == 1 else "s"
        kinds = " or ".join(dict.fromkeys(self.formats.values()))
        return f"{self.files:,} file{plural}, {in_bytes(self.bytes)}: {kinds}"


def in_bytes(count: int) -> str:
    for scale, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"


def look_at(paths: list[str]) -> Look:
    """Raises InputError where there is no such text, or no format reads it."""
    data = _data(paths, FORMATS.names[0])
    try:
        check_sources(data)
        inputs = [entry for _, _, entries in all_inputs(data) for entry in entries]
    except InputError as error:
        raise InputError.at("--text", error.problems[0].what, error.problems[0].fix) from None
    if not any(entry.size for entry in inputs):
        raise InputError.at("--text", f"{', '.join(paths)} has 0 bytes", "give a file with text")
    formats = dict(_formats(paths, inputs))
    if not formats:
        what = f"no format of artel reads {', '.join(paths)}"
        raise InputError.at("--text", what, f"docs/text.md describes them: {', '.join(FORMATS.names)}")
    return Look(tuple(paths), len(inputs), sum(entry.size for entry in inputs), formats)


def _formats(paths: list[str], inputs: list[Input]) -> Iterator[tuple[str, str]]:
    """(format, kind of record): what the suffix stands for, then those that find their fields in it.

    Any file is plain text, or a page without tags, also one of conversations: that counts only where nothing else does.
    Plain text is by folder, too, where it lies in several. Lines with blank ones between them may be groups of texts
    that match, and may be a novel: such files are both.
    """
    auto = _data(paths, FORMATS.names[0]).sources[0]
    is_plain = all(format_of(auto, entry.address).is_plain_text for entry in inputs)
    in_folders = is_plain and len({Path(entry.address).parent for entry in inputs}) > 1
    names = [name for name in FORMATS.names if FORMATS[name].has_files and _reads(_data(paths, name))]
    by_folder = [name for name in names if is_plain and FORMATS[name].is_by_folder]
    reads_all = [name for name in names if FORMATS[name].is_plain_text or FORMATS[name].is_pages]
    telling = [name for name in names if name not in (*by_folder, *reads_all)]
    by_suffix = [name for name in names if FORMATS[name].goes_by_suffix]
    plain = [*by_suffix, *(by_folder if in_folders else ())]
    for name in [*plain, *telling] if is_plain else telling or plain:
        yield name, SourceConfig.model_validate({"path": paths, "format": name}).yields


def _data(paths: list[str], name: str) -> DataConfig:
    return DataConfig.model_validate({"sources": [{"path": paths, "format": name}], "validation": 0.0})


def _reads(data: DataConfig) -> bool:
    """Whether the first records of a text can all be used."""
    ledger = Ledger()
    try:
        found = list(islice(read_documents(data, ledger, max_bytes=_BYTES), _RECORDS))
    except InputError:
        return False
    return bool(found) and not ledger.rejected
