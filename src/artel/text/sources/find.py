"""From the paths of a run file to files, with everything that is wrong with them said at once."""

from __future__ import annotations

import importlib.util
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem, missing_extra
from artel.storage import is_remote, list_remote, own_path, special_kind
from artel.text.formats.conversations import check_converter
from artel.text.formats.pairs import csv_rows
from artel.text.formats.parquet import check_parquet
from artel.text.reading.encodings import NotText, is_text_encoding
from artel.text.reading.file_names import file_name, is_url, packed_too, unpacked_name
from artel.text.reading.rows import check_rows
from artel.text.sources.walk import each_once, files_in, files_matching

SUFFIXES = {
    "html": (".html", ".htm", ".xhtml", ".shtml"),
    "jsonl": (".ndjson", *packed_too(".jsonl", ".json")),
    "text": (".text", ".md", ".rst", ".tex", ".py", *packed_too(".txt")),
    "parquet": (".parquet",),
    "warc": packed_too(".warc", ".warc.wet"),
}
# What a folder is searched for when its format is given; by suffix alone these are not told from the ones above.
_GIVEN_SUFFIXES = {
    "csv": packed_too(".csv", ".tsv"),
    "pairs": (".csv", ".tsv", *packed_too(".jsonl")),
    "nq": packed_too(".jsonl"),
    "squad": (".json",),
    "chat": (*SUFFIXES["jsonl"], *SUFFIXES["parquet"]),
    "preference": (*SUFFIXES["jsonl"], *SUFFIXES["parquet"]),
}
_REMEDIES = {
    ".docx": "save it as text, or convert it with pandoc", ".doc": "save it as text", ".rtf": "save it as text",
    ".odt": "convert it with pandoc", ".pdf": "extract its text with pdftotext", ".epub": "convert it with pandoc",
    ".fb2": "convert it with pandoc", ".djvu": "extract its text with djvutxt", ".zip": "unpack it and give the folder",
    ".tar": "unpack it and give the folder", ".tgz": "unpack it and give the folder",
    ".rar": "unpack it and give the folder", ".7z": "unpack it and give the folder",
}  # fmt: skip


def all_sources(data: DataConfig) -> Iterator[tuple[str, SourceConfig]]:
    """(key in the run file, source); validation texts given by a path come first, read as the first source is.

    All of them: `rows` of the first source says which of its own records are taken.
    """
    if isinstance(data.validation, str):
        like = data.sources[0] if data.sources and data.sources[0].format != "dummy" else SourceConfig(path=["-"])
        yield "data.validation", like.model_copy(update={"path": [data.validation], "name": "validation", "rows": ""})
    for number, source in enumerate(data.sources):
        yield f"data.sources.{number}", source


def format_of(source: SourceConfig, origin: str, content_type: str = "") -> str:
    """The format of a file: as the source says, else by suffix, else text; a URL with no known suffix is a page."""
    if source.format != "auto":
        return source.format
    found = next((kind for kind, suffixes in SUFFIXES.items() if file_name(origin).endswith(suffixes)), None)
    return found or ("html" if is_url(origin) and not content_type.startswith("text/plain") else "text")


def check_sources(data: DataConfig, tell: Callable[[str], None] = lambda _: None) -> None:
    """Raise InputError with every path that is missing, unreadable or of no use, every unknown encoding,
    wrong slice of records and converter that is not there."""
    problems: list[Problem] = []
    for where, source in all_sources(data):
        if source.encoding != "auto" and not is_text_encoding(source.encoding):
            what = f"there is no encoding {source.encoding!r}"
            problems.append(Problem(f"{where}.encoding", what, "write utf-8, windows-1251 …"))
        if source.extract == "main" and importlib.util.find_spec("trafilatura") is None:
            problems += missing_extra("trafilatura", "pages", f"{where}.extract").problems
        if where != "data.validation":  # it has what the first source has, and that is judged there
            problems += check_rows(source, where) + check_converter(source, where)
        for path in source.path:
            if is_remote(path) and source.format != "dummy":
                problems += _check_remote(path, source, where, tell)
                continue
            files, found = _find(source, path, where if where == "data.validation" else f"{where}.path")
            problems += found
            for file in files:
                problems += _check_kind(str(file), source, where) or _check_content(file, source, where, data)
    if problems:
        raise InputError(problems)


def files_of(source: SourceConfig, path: str, where: str) -> list[Path]:
    files, problems = _find(source, path, where)
    if problems:
        raise InputError(problems)
    return files


def _find(source: SourceConfig, path: str, where: str) -> tuple[list[Path], list[Problem]]:
    if source.format == "dummy" or is_url(path):
        return [], []
    if "://" in path:
        kind = path.split("://")[0]
        fix = "give files, globs, folders, or addresses that begin with http(s)://, s3:// or hf://"
        return [], [Problem(where, f"{kind}:// cannot be read", fix)]
    try:
        files, problems = _find_here(source, path, where)
        return files, problems + _check_names(files, where)
    except InputError as error:
        return [], list(error.problems)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        name = error.filename or path[:200]
        return [], [Problem(where, f"{name} cannot be read: {error.strerror}", "check the name and permissions")]


def _check_names(files: list[Path], where: str) -> list[Problem]:
    """Origins of records are written as UTF-8; on Linux the name of a file may be any bytes."""
    problems = []
    for name in map(str, files):
        shown = os.fsencode(name).decode("utf-8", "backslashreplace")
        if shown != name:
            problems.append(Problem(where, f"the name of {shown} is not UTF-8", "rename the file, or its folder"))
    return problems


def given_path(path: str, where: str) -> Path:
    """The file, folder or glob that a path of a run file names on this machine. Raises InputError."""
    return own_path(path.replace("{stdlib}", sysconfig.get_path("stdlib")), where)


def _find_here(source: SourceConfig, path: str, where: str) -> tuple[list[Path], list[Problem]]:
    given = given_path(path, where)
    name = str(given)
    if given.is_dir():
        any_of = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        wanted = (SUFFIXES | _GIVEN_SUFFIXES).get(source.format, any_of)
        files = each_once(file for file in files_in(given) if file.name.lower().endswith(wanted) and file.is_file())
        if not files:
            return [], [
                Problem(where, f"the folder {path} holds no file with {' '.join(wanted)}", "give a glob: folder/*")
            ]
        return files, []
    if given.exists():
        return [given], []
    if any(mark in name for mark in "*?["):
        files = each_once(file for file in files_matching(name) if file.is_file())
        if files:
            return files, []
        return [], [Problem(where, f"no file matches {path}", f"it is looked for from {Path.cwd()}")]
    return [], [Problem(where, f"there is no file {path}", f"it is looked for from {Path.cwd()}")]


def _not_a_file(file: Path) -> str:
    """What stands there where it is no regular file with a size of its own; empty where it is. Raises OSError.

    The kernel makes up what is in /proc and /sys when it is read: such a file may have no end, or wait for ever.
    """
    status = os.stat(file)  # noqa: PTH116 - of each file, however small: Path.stat takes twice as long
    if not stat.S_ISREG(status.st_mode):
        return special_kind(status.st_mode) or "a folder"
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        is_made_up = status.st_size == 0 and os.read(descriptor, 1) != b"" and os.fstat(descriptor).st_size == 0
    except BlockingIOError:
        is_made_up = True
    finally:
        os.close(descriptor)
    return "made up by the kernel" if is_made_up else ""


def _check_remote(path: str, source: SourceConfig, where: str, tell: Callable[[str], None]) -> list[Problem]:
    try:
        return [problem for file in list_remote(path, tell) for problem in _check_kind(file.address, source, where)]
    except InputError as error:
        return [Problem(f"{where}.path", f"{problem.where}: {problem.what}", problem.fix) for problem in error.problems]


def _check_kind(name: str, source: SourceConfig, where: str) -> list[Problem]:
    """What the name of a file says against reading it."""
    plain = unpacked_name(name)
    if source.format == "auto" and plain.endswith((".csv", ".tsv")):
        fix = "for texts write format: csv and field: COLUMN, for pairs format: pairs"
        return [Problem(f"{where}.format", f"{name} is a table, not text", fix)]
    if source.format in ("chat", "preference") and plain.endswith((".csv", ".tsv")):
        fix = "write it as JSON lines, an object a line with a field for each column"
        return [Problem(f"{where}.path", f"{name} is a table; {source.format} is read from json, jsonl, parquet", fix)]
    remedy = _REMEDIES.get(os.path.splitext(name)[1].lower())  # noqa: PTH122 - of each file, as above
    return [Problem(f"{where}.path", f"{name} is not text", remedy)] if remedy else []


def _check_content(file: Path, source: SourceConfig, where: str, data: DataConfig) -> list[Problem]:
    """What the file itself says against reading it: it is none, may not be opened, or has no column of that name."""
    try:
        kind = _not_a_file(file)
    except OSError as error:
        return [Problem(f"{where}.path", f"{file} cannot be read: {error.strerror}", "check its permissions")]
    if kind:
        fix = "save what it gives as a file, and give that: a text is read more than once"
        return [Problem(f"{where}.path", f"{file} is {kind}, not a regular file", fix)]
    rows_of_parquet = source.format in ("chat", "preference") and file_name(str(file)).endswith(".parquet")
    if rows_of_parquet or format_of(source, str(file)) == "parquet":
        return check_parquet(file, source, where)
    if source.format == "csv":
        with suppress(NotText):  # binary data: a record that cannot be read, and told as such
            columns = [("field", source.field), *([("set_field", source.set_field)] if source.set_field else [])]
            try:
                next(csv_rows(file, str(file), tuple(columns), source.encoding, data.max_document), None)
            except InputError as error:
                return list(error.problems)
    return []
