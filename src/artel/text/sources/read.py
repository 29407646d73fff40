"""Reading a source: file after file, each by its format."""

from __future__ import annotations

from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.storage import cache_folder, fetch, is_remote
from artel.text.sources.chat import read_chat, read_preferences
from artel.text.sources.dummy import read_dummy
from artel.text.sources.dummy_questions import read_dummy_questions
from artel.text.sources.find import fetched_files, files_of, format_of
from artel.text.sources.html import read_html
from artel.text.sources.jsonl import read_jsonl
from artel.text.sources.lines import too_large
from artel.text.sources.names import is_url
from artel.text.sources.pairs import read_pairs
from artel.text.sources.parquet import read_parquet
from artel.text.sources.questions import read_nq, read_squad
from artel.text.sources.rows import Items, taken
from artel.text.sources.sets import of_sets
from artel.text.sources.table import read_table
from artel.text.sources.text import read_text


def read_source(source: SourceConfig, where: str, data: DataConfig) -> Items:
    """The records of a source: of the sets it includes, those that its `rows` takes. `where` is its key."""
    if source.rows:
        yield from taken(source, where, lambda: _read_sets(source, where, data))
    else:
        yield from _read_sets(source, where, data)


def _read_sets(source: SourceConfig, where: str, data: DataConfig) -> Items:
    items = _read_all(source, where, data)
    return of_sets(items, source, where) if source.include or source.exclude else items


def _read_all(source: SourceConfig, where: str, data: DataConfig) -> Items:
    if source.format == "dummy":
        yield from read_dummy(source) if source.kind == "text" else read_dummy_questions(source)
    for path in source.path:
        name = source.name or path
        if is_url(path):
            fetched = fetch(path, cache_folder() / "downloads", max_bytes=data.max_document)
            yield from _read(fetched.path, path, fetched.content_type, name, source, data)
            continue
        if is_remote(path):
            for file, address in fetched_files(path):
                yield from _read(file, address, "", name, source, data)
            continue
        for file in files_of(source, path, where):
            yield from _read(file, str(file), "", name, source, data)


def _read(file: Path, origin: str, content_type: str, set_name: str, source: SourceConfig, data: DataConfig) -> Items:
    kind = format_of(source, origin, content_type)
    if kind == "html":
        size = file.stat().st_size
        if size > data.max_document:
            raise too_large(origin, f"{size:,} bytes are", data.max_document)
        yield from read_html(file, origin, content_type, set_name, source)
    elif kind in _BY_FIELDS:
        yield from _BY_FIELDS[kind](file, origin, set_name, source, data)
    else:
        yield from read_text(file, origin, set_name, source, data)


_BY_FIELDS = {
    "jsonl": read_jsonl, "parquet": read_parquet, "csv": read_table, "pairs": read_pairs,
    "nq": read_nq, "squad": read_squad, "chat": read_chat, "preference": read_preferences,
}  # fmt: skip
