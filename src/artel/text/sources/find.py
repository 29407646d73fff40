"""Find the files of the paths in a run file, and report all their problems at once."""

from __future__ import annotations

import importlib.util
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.resources import files as package_files
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem, missing_extra
from artel.registry import FORMATS
from artel.storage import describe_file_type, is_remote, list_remote, rows_folder, user_path
from artel.text.formats.chat import check_converter
from artel.text.formats.format import choose_format, detected_formats
from artel.text.reading.encodings import is_text_encoding
from artel.text.reading.files import COMPRESSED_SUFFIXES, file_name, is_url, uncompressed_name
from artel.text.reading.subsets import check_rows
from artel.text.sources.walk import glob_files, unique_files, walk_files

_FIXES = {
    ".docx": "save it as text, or convert it with pandoc",
    ".pdf": "extract its text with pdftotext",
    ".djvu": "extract its text with djvutxt",
    **dict.fromkeys((".doc", ".rtf"), "save it as text"),
    **dict.fromkeys((".odt", ".epub", ".fb2"), "convert it with pandoc"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".rar", ".7z"), "unpack it and use the folder"),
}
_IGNORED_NAMES = frozenset("thumbs.db desktop.ini readme license licence copying notice authors changelog".split())
"""Lower-case names of files in folders of texts that are not reported as unread."""
_MAX_LISTED_SUFFIXES = 10  # in a message


def list_sources(data: DataConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Yield (key in the run file, source). Validation texts with a path come first, with settings of source 0."""
    if isinstance(data.validation, str):
        source = data.sources[0] if data.sources else SourceConfig(path=["-"])
        if not FORMATS[source.format].has_files:
            names = (name for name in FORMATS.names if FORMATS[name].has_files)
            source = SourceConfig(path=["-"], format=next(n for n in names if source.yields in FORMATS[n].yields))
        update = {"path": [data.validation], "name": "validation", "rows": "", "outputs": ""}
        yield "data.validation", source.model_copy(update=update)
    for index, source in enumerate(data.sources):
        yield f"data.sources.{index}", source


def check_sources(data: DataConfig) -> None:
    """Raise InputError with every path that is missing or unreadable, and every wrong setting of a source."""
    problems: list[Problem] = []
    for key, source in list_sources(data):
        if source.encoding != "auto" and not is_text_encoding(source.encoding):
            what = f"unknown encoding {source.encoding!r}"
            problems.append(Problem(f"{key}.encoding", what, "use utf-8, windows-1251 …"))
        if source.extract == "main" and importlib.util.find_spec("trafilatura") is None:
            problems += missing_extra("trafilatura", "pages", f"{key}.extract").problems
        if key != "data.validation":  # it has the settings of source 0, which are checked
            problems += check_rows(source, key) + check_converter(source, key)
            if not FORMATS[source.format].has_files:
                problems += FORMATS[source.format].check(Path(), source, key, data)
        for path in source.path:
            if is_remote(path) and FORMATS[source.format].has_files:
                problems += _check_remote(path, source, key)
                continue
            files, path_problems = _find_files(source, path, key if key == "data.validation" else f"{key}.path")
            problems += path_problems
            for file in files:
                problems += (
                    _check_kind(str(file), source, key)
                    or _check_regular(file, f"{key}.path")
                    or choose_format(source, str(file)).check(file, source, key, data)
                )
    if problems:
        raise InputError(problems)


def check_files(source: SourceConfig, key: str) -> list[Problem]:
    """Return the problems of the paths of a source, without looking into the files."""
    problems: list[Problem] = []
    for path in source.path:
        if is_remote(path):
            problems += _check_remote(path, source, key)
            continue
        files, path_problems = _find_files(source, path, key)
        problems += path_problems
        for file in files:
            problems += _check_regular(file, key)
    return problems


def list_files(source: SourceConfig, path: str, key: str) -> list[Path]:
    """Return the local files of a path of a source. Raise InputError if none is found."""
    files, problems = _find_files(source, path, key)
    if problems:
        raise InputError(problems)
    return files


def _find_files(source: SourceConfig, path: str, key: str) -> tuple[list[Path], list[Problem]]:
    if not FORMATS[source.format].has_files or is_url(path):
        return [], []
    if "://" in path:
        fix = "use files, globs, folders, or addresses that begin with http(s)://, s3:// or hf://"
        return [], [Problem(key, f"{path.split('://')[0]}:// cannot be read", fix)]
    try:
        files = _find_local(source, path, key)
        return files, _check_names(files, key)
    except InputError as error:
        return [], list(error.problems)
    except OSError as error:  # a name that is too long, a folder that may not be listed
        name = error.filename or path[:200]
        return [], [Problem(key, f"{name} cannot be read: {error.strerror}", "check the name and permissions")]


def _check_names(files: list[Path], key: str) -> list[Problem]:
    """Return problems of names that are not UTF-8, which origins must be. On Linux a name may be any bytes."""
    problems = []
    for name in map(str, files):
        escaped = os.fsencode(name).decode("utf-8", "backslashreplace")
        if escaped != name:
            problems.append(Problem(key, f"the name of {escaped} is not UTF-8", "rename the file, or its folder"))
    return problems


def resolve_local_path(path: str, key: str) -> Path:
    """Return a path of a run file as a local file, folder or glob. Every machine has the folders in braces."""
    placeholders = {
        "stdlib": sysconfig.get_path("stdlib"),
        "books": str(package_files("artel") / "books"),
        "rows": str(rows_folder()),
    }
    for name, folder in placeholders.items():
        path = path.replace(f"{{{name}}}", folder)
    return user_path(path, key)


def _find_local(source: SourceConfig, path: str, key: str) -> list[Path]:
    location = resolve_local_path(path, key)
    if location.is_dir():
        suffixes = _list_suffixes(source)
        entries = (entry for entry in walk_files(location) if entry.name.lower().endswith(suffixes))
        files = unique_files(entry for entry in entries if entry.is_file())
        if not files:
            unread = _find_unread(location, suffixes)
            unread_text = f", but {_describe_suffixes(unread)}" if unread else ""
            what = f"the folder {path} holds no file with {_suffix_text(suffixes)}{unread_text}"
            raise InputError.at(key, what, _suggest_for_folder(unread))
        return files
    if location.exists():
        return [location]
    is_glob = any(mark in str(location) for mark in "*?[")
    files = unique_files(file for file in glob_files(str(location)) if file.is_file()) if is_glob else []
    if not files:
        what = f"no file matches {path}" if is_glob else f"there is no file {path}"
        fix = f"paths are relative to {Path.cwd()}"
        if path.startswith("{rows}"):
            fix = "it contained rows from Python: call artel.train or artel.prepare with the same rows again"
        raise InputError.at(key, what, fix)
    return files


def _list_suffixes(source: SourceConfig) -> tuple[str, ...]:
    """Return the suffixes of the files that a source reads in a folder."""
    source_format = FORMATS[source.format]
    formats = detected_formats() if source_format.goes_by_suffix else [source_format]
    return tuple(suffix for format in formats for suffix in format.suffixes)


def unread_files(data: DataConfig) -> Iterator[tuple[str, SourceConfig, str, list[Path]]]:
    """Yield (key, source, folder, unread files in it) for each folder with unread files, except hidden ones."""
    for key, source in list_sources(data):
        for path in source.path if FORMATS[source.format].has_files else []:
            if not is_remote(path) and not is_url(path):
                with suppress(InputError, OSError):  # reported by `check_sources`
                    location = resolve_local_path(path, key)
                    if location.is_dir() and (files := _find_unread(location, _list_suffixes(source))):
                        yield key, source, path, files


def unread_notes(unread: Iterable[tuple[str, SourceConfig, str, list[Path]]]) -> list[str]:
    """Return a note for the user about each folder in `unread_files`."""
    return [
        f"{path}: not read: {_describe_suffixes(files)}; {source.format} reads {_suffix_text(_list_suffixes(source))}; "
        f"{_suggest_for_folder(files)}"
        for _, source, path, files in unread
    ]


def _suffix_text(suffixes: tuple[str, ...]) -> str:
    """Return suffixes as text, without those of compressed files."""
    return " ".join(suffix for suffix in suffixes if not suffix.endswith(COMPRESSED_SUFFIXES))


def _describe_suffixes(files: list[Path]) -> str:
    """Return the number of files by suffix: `12 .epub, 3 .zip`."""
    names = [Path(file.name.lower()) for file in files]
    # Two suffixes of a compressed file: .csv.gz
    counts = Counter("".join(name.suffixes[-2 if name.suffix in COMPRESSED_SUFFIXES else -1 :]) for name in names)
    most_common_suffixes = counts.most_common(_MAX_LISTED_SUFFIXES)
    counts_by_suffix = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in most_common_suffixes]
    num_others = counts.total() - sum(count for _, count in most_common_suffixes)
    return ", ".join([*counts_by_suffix, *([f"{num_others:,} others"] if num_others else [])])


def _suggest_for_folder(files: list[Path]) -> str:
    """Return advice on reading the files, by their most frequent suffix with a known fix."""
    for suffix, _ in Counter(file.suffix.lower() for file in files).most_common():
        if suffix in _FIXES:
            return f"to read {suffix} files, {_suggest_for_suffix(suffix)}"
    return "to read them, set the format of the source, or use a glob: folder/*"


def _suggest_for_suffix(suffix: str) -> str:
    reading = (f"write format: {name}" for name in FORMATS.names if suffix in FORMATS[name].suffixes)
    return next(reading, _FIXES[suffix])


def _find_unread(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return [
        file
        for file in sorted(walk_files(folder, include_hidden=False))
        if not file.name.lower().endswith((*suffixes, "~"))
        and file.name.lower() not in _IGNORED_NAMES
        and file.parent.name != "__pycache__"
    ]


def _special_kind(file: Path) -> str:
    """Return the kind of a file that is not regular, or has no real size; empty for other files.

    The kernel generates files in /proc and /sys when they are read. Such a file may have no end, or block forever.
    """
    status = os.stat(file)  # noqa: PTH116 - called for every file, and Path.stat takes twice as long
    if not stat.S_ISREG(status.st_mode):
        return describe_file_type(status.st_mode) or "a folder"
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        is_generated = status.st_size == 0 and os.read(descriptor, 1) != b"" and os.fstat(descriptor).st_size == 0
    except BlockingIOError:
        is_generated = True
    finally:
        os.close(descriptor)
    return "generated by the kernel" if is_generated else ""


def _check_remote(path: str, source: SourceConfig, key: str) -> list[Problem]:
    try:
        return [problem for file in list_remote(path) for problem in _check_kind(file.address, source, key)]
    except InputError as error:
        return [Problem(f"{key}.path", f"{problem.where}: {problem.what}", problem.fix) for problem in error.problems]


def is_table_name(name: str) -> bool:
    """True for .csv and .tsv files, which need a format that names their columns."""
    return uncompressed_name(name).endswith((".csv", ".tsv"))


def _check_kind(name: str, source: SourceConfig, key: str) -> list[Problem]:
    """Return the problems that the name of a file shows."""
    is_table = is_table_name(name)
    if FORMATS[source.format].goes_by_suffix and is_table:
        fix = "for texts write format: csv and field: COLUMN, for pairs format: pairs"
        return [Problem(f"{key}.format", f"{name} is a table, not text", fix)]
    if FORMATS[source.format].converters and is_table and not file_name(name).endswith(FORMATS[source.format].suffixes):
        fix = "write it as JSON lines, an object a line with a field for each column"
        return [Problem(f"{key}.path", f"{name} is a table; {source.format} is read from json, jsonl, parquet", fix)]
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - for every file, as above
    if suffix not in _FIXES or suffix in _list_suffixes(source):
        return []
    return [Problem(f"{key}.path", f"{name} is not text", _suggest_for_suffix(suffix))]


def _check_regular(file: Path, key: str) -> list[Problem]:
    try:
        kind = _special_kind(file)
    except OSError as error:
        return [Problem(key, f"{file} cannot be read: {error.strerror}", "check its permissions")]
    if kind:
        fix = "save its content as a file, since texts are read more than once"
        return [Problem(key, f"{file} is {kind}, not a regular file", fix)]
    return []
