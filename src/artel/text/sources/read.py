"""Reading a part of a source: file after file, each by its format."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.secrets import hide_secrets
from artel.storage import RemoteFile, cache_folder, fetch, fetch_remote, is_remote
from artel.text.formats.chat import read_chat, read_preferences
from artel.text.formats.dummy import read_dummy
from artel.text.formats.dummy_questions import read_dummy_questions
from artel.text.formats.html import read_html
from artel.text.formats.jsonl import read_jsonl
from artel.text.formats.pairs import read_pairs
from artel.text.formats.parquet import read_parquet
from artel.text.formats.questions import read_nq, read_squad
from artel.text.formats.table import read_table
from artel.text.formats.text import read_text
from artel.text.formats.warc import read_warc
from artel.text.reading.encodings import NotText
from artel.text.reading.file_names import file_name, is_url
from artel.text.reading.lines import Note, line_encoding
from artel.text.reading.rows import Items, taken
from artel.text.reading.sets import of_sets
from artel.text.reading.unchanged import unchanged
from artel.text.sources.find import format_of
from artel.text.sources.inputs import Input, Part, source_of


def read_part(part: Part, data: DataConfig, note: Note = lambda *_: None) -> Items:
    """The records of a part of a source that are of the sets it includes; those of a span have their line in it.

    `note` is called for each file whose encoding is guessed, by the part with its beginning.
    """
    source = source_of(data, part.where)

    def read(note: Note = lambda *_: None) -> Items:
        items = _read_inputs(part.inputs, source, data, note)
        if source.format == "dummy":
            items = read_dummy(source) if source.kind == "text" else read_dummy_questions(source)
        return of_sets(items, source) if source.include or source.exclude else items

    yield from taken(source, part.where, read, lambda: read(note)) if source.rows else read(note)


def _read_inputs(inputs: Iterable[Input], source: SourceConfig, data: DataConfig, note: Note) -> Items:
    for each in inputs:
        name = source.name or hide_secrets(each.path)
        if is_url(each.address):
            fetched = fetch(each.address, cache_folder() / "downloads", max_bytes=data.max_document)
            yield from _read(fetched.path, each, fetched.content_type, name, source, data, note)
        elif is_remote(each.address):
            file = fetch_remote(RemoteFile(each.address, each.size, each.version), cache_folder() / "remote")
            yield from _read(file, each, "", name, source, data, note)
        else:
            here = Path(each.address)
            with unchanged(here, each.version):
                yield from _read(here, each, "", name, source, data, note)


def _read(
    file: Path, what: Input, content_type: str, set_name: str, source: SourceConfig, data: DataConfig, note: Note
) -> Items:
    origin = hide_secrets(what.address)  # it stands in the ledger, the store and messages
    kind = format_of(source, origin, content_type)
    if _is_of_lines(kind, what, source):
        with suppress(NotText):  # binary: whoever reads the file says where
            encoding = line_encoding(file, origin, "auto")
            if what.span is None or what.span.start == 0:
                note(set_name, encoding)
            source = source.model_copy(update={"encoding": encoding})
    if kind == "html":
        yield from read_html(file, origin, content_type, set_name, source, data)
    elif kind == "jsonl":
        yield from read_jsonl(file, origin, set_name, source, data, span=what.span)
    elif kind in _BY_FIELDS:
        yield from _BY_FIELDS[kind](file, origin, set_name, source, data)
    else:
        yield from read_text(file, origin, set_name, source, data, note, span=what.span, is_cut=what.is_cut)


def _is_of_lines(kind: str, what: Input, source: SourceConfig) -> bool:
    """Whether the encoding of a file is to be guessed by its first megabyte, as it is of files of lines."""
    if source.encoding != "auto":
        return False
    if kind == "text":
        return what.is_cut or source.document in ("line", "paragraph")
    if kind == "pairs":
        return not source.outputs  # which have an encoding of their own
    return kind in ("jsonl", "csv", "nq", "chat", "preference") and not file_name(what.address).endswith(".parquet")


_BY_FIELDS = {
    "parquet": read_parquet, "warc": read_warc, "csv": read_table, "pairs": read_pairs,
    "nq": read_nq, "squad": read_squad, "chat": read_chat, "preference": read_preferences,
}  # fmt: skip
