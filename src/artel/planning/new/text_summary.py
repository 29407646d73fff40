"""Find the files of a text, and test which formats can read their first records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.printable import format_bytes
from artel.registry import FORMATS, OBJECTIVES
from artel.text import Ledger, Rejected, check_sources, list_all_inputs, read_documents
from artel.text.formats.format import choose_format
from artel.text.sources.find import is_table_name
from artel.text.sources.inputs import Input

_MAX_RECORDS = 20  # records that a format must be able to read
_MAX_BYTES = 2_000_000
_COLUMNS_FIX = (
    "name its columns text, or text and label, or input and output …; or name them in a run file (docs/text.md)"
)


@dataclass(frozen=True, slots=True)
class TextSummary:
    """The files of a text, and the formats that can read it."""

    paths: tuple[str, ...]
    num_files: int
    num_bytes: int
    formats: dict[str, str] = field(hash=False)
    """Formats that can read it and that a task of `artel new` learns from, the most likely first, with their kinds of
    record: text, conversations …"""

    @property
    def record_kinds(self) -> set[str]:
        return set(self.formats.values())

    def format_for(self, learns_from: tuple[str, ...]) -> str:
        """Return the most likely format whose records are in `learns_from` of an objective."""
        return next(name for name, kind in self.formats.items() if kind in learns_from)

    def describe(self) -> str:
        """Describe the text for people: `1 file, 3.1 MB: text`."""
        plural = "" if self.num_files == 1 else "s"
        kinds = " or ".join(dict.fromkeys(self.formats.values()))
        return f"{self.num_files:,} file{plural}, {format_bytes(self.num_bytes)}: {kinds}"


def summarize_text(paths: list[str]) -> TextSummary:
    """Summarize files, globs or folders. Raise InputError if there is no text, or no such format can read it."""
    data = _build_data_config(paths, FORMATS.names[0])
    table_problem = None
    try:
        check_sources(data)
    except InputError as error:  # a table without a text column may hold pairs or labels
        table_problem = error.problems[0]
        data = _build_data_config(paths, next(name for name in FORMATS.names if _takes_any_file(name)))
    try:
        check_sources(data)
        inputs = [entry for _, _, entries in list_all_inputs(data) for entry in entries]
    except InputError as error:
        problem = table_problem or error.problems[0]
        raise InputError.at("--text", problem.what, problem.fix) from None
    if table_problem is not None and not all(_is_table(entry.address) for entry in inputs):
        raise InputError.at("--text", table_problem.what, table_problem.fix)
    if not any(entry.size for entry in inputs):
        raise InputError.at("--text", f"{', '.join(paths)} has 0 bytes", "use a file with text")
    formats = dict(_find_formats(paths, inputs, is_table=table_problem is not None))
    if not formats and table_problem is not None:
        is_damaged = not table_problem.where.startswith("data.sources")
        raise InputError.at(
            "--text", _column_problem(paths) or table_problem.what, table_problem.fix if is_damaged else _COLUMNS_FIX
        )
    if not formats:
        what = f"no format of artel new reads {', '.join(paths)}"
        raise InputError.at("--text", what, f"docs/text.md describes the formats: {', '.join(FORMATS.names)}")
    return TextSummary(tuple(paths), len(inputs), sum(entry.size for entry in inputs), formats)


def _is_table(name: str) -> bool:
    return is_table_name(name) or name.lower().endswith(".parquet")


def _takes_any_file(name: str) -> bool:
    return FORMATS[name].is_plain_text and not FORMATS[name].goes_by_suffix


def _column_problem(paths: list[str]) -> str:
    """Describe a table that lacks its text column. Empty if no column is missing, or the text is not a table."""
    if not all(map(is_table_name, paths)):
        return ""
    try:
        check_sources(_build_data_config(paths, next(name for name in FORMATS.names if FORMATS[name].is_table)))
    except InputError as error:
        return f"{error.problems[0].where}: {error.problems[0].what}"
    return ""


def _find_formats(paths: list[str], inputs: list[Input], *, is_table: bool) -> Iterator[tuple[str, str]]:
    """Yield (format, kind of record): first the format of the suffix, then formats that find their fields in the text.

    Any file, even conversations, can be read as plain text or as a page without tags. So these two formats count only
    if no other one does. Plain text in several folders may also be labeled by folder. Lines separated by blank ones may
    be groups of matching texts or a novel. Such files count as both, unless more than a tenth of the groups are single
    lines, like chapter headings. A table is never plain text. Formats from which no task of `artel new` learns do not
    count.
    """
    auto_source = _build_data_config(paths, FORMATS.names[0]).sources[0]
    is_plain = not is_table and all(choose_format(auto_source, entry.address).is_plain_text for entry in inputs)
    in_folders = is_plain and len({Path(entry.address).parent for entry in inputs}) > 1
    objectives = [OBJECTIVES[name] for name in OBJECTIVES.names]
    learned = {kind for each in objectives if each.presentation.is_offered for kind in each.learns_from}
    candidates = [name for name in FORMATS.names if FORMATS[name].has_files and learned & {*FORMATS[name].yields}]
    names = [name for name in candidates if _can_read(paths, name, is_plain)]
    by_folder = [name for name in names if is_plain and FORMATS[name].is_by_folder]
    reads_all = [name for name in names if FORMATS[name].is_plain_text or FORMATS[name].is_pages]
    specific = [name for name in names if name not in (*by_folder, *reads_all)]
    by_suffix = [name for name in names if FORMATS[name].goes_by_suffix]
    plain_formats = [] if is_table else [*by_suffix, *(by_folder if in_folders else ())]
    for name in [*plain_formats, *specific] if is_plain else specific or plain_formats:
        yield name, SourceConfig.model_validate({"path": paths, "format": name}).yields


def _build_data_config(paths: list[str], name: str) -> DataConfig:
    return DataConfig.model_validate({"sources": [{"path": paths, "format": name}], "validation": 0.0})


def _can_read(paths: list[str], name: str, is_plain: bool) -> bool:
    """True if the format can read the first records. It may reject a tenth of the records of plain text."""
    rejected: list[Rejected] = []
    ledger = Ledger(on_reject=rejected.append)
    try:
        documents = list(
            islice(read_documents(_build_data_config(paths, name), ledger, max_bytes=_MAX_BYTES), _MAX_RECORDS)
        )
    except InputError:
        return False
    is_guess = is_plain and not FORMATS[name].is_plain_text
    return bool(documents) and not ledger.num_rejected and (not is_guess or 10 * len(rejected) <= len(documents))
