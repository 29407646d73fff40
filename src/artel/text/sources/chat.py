"""Conversations: JSON lines or an array of rows, each of which holds one conversation or several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.records import Record, Rejected
from artel.text.sources.conversations import Converter, record_of
from artel.text.sources.jsonl import read_rows
from artel.text.sources.lines import BadLine
from artel.text.sources.turns import WrongRow


def read_chat(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A record a conversation; where a row holds several, the origin says which: `file:line (instances[1])`."""
    converter = Converter(source)
    for where, row in read_rows(file, origin, source.encoding, data.max_document):
        if isinstance(row, BadLine):
            yield Rejected(where, row.reason, row.detail, set_name)
            continue
        try:
            for path, conversation in converter.conversations(row):
                place = f"{where} ({path})" if path else where
                if isinstance(conversation, WrongRow):
                    yield Rejected(place, conversation.reason, conversation.detail, set_name)
                else:
                    yield record_of(conversation, place, set_name)
        except WrongRow as wrong:
            yield Rejected(where, wrong.reason, wrong.detail, set_name)
