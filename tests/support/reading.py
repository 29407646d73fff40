"""What tests of sources have in common: reading one source, alone or through the whole pipeline."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from artel.config import DataConfig, SourceConfig
from artel.preparing.selection import PreparedShard
from artel.text import Ledger, Record, Rejected, check_sources, count_lines, input_shards, read_documents
from artel.text.reading.source_file import SourceFile
from artel.text.sources.inputs import read_or_reject, read_shard


def read_texts(path, *, max_bad=0.0, max_document=100_000_000, **source):
    """(texts, ledger as told) of one source, through the whole pipeline."""
    ledger = Ledger()
    data = {
        "validation": 0.0,
        "max_bad": max_bad,
        "max_document": max_document,
        "sources": [{"path": str(path), **source}],
    }
    texts = [document.record.text for document in read_documents(DataConfig.model_validate(data), ledger)]
    ledger.check()
    return texts, ledger.to_json()


def items(path, *, max_document=100_000_000, **source):
    """What a source yields, unchecked beforehand."""
    data = DataConfig(sources=[SourceConfig(path=[str(path)], **source)], max_document=max_document)
    return list(items_of(data))


def items_of(data):
    """What the sources of a run yield, one after another."""
    return (item for part in input_shards(data) for item in read_shard(part, data))


def checked(path, **source):
    check_sources(DataConfig(sources=[SourceConfig(path=[str(path)], **source)]))


def read(reader, file: Path, *, max_document=100_000_000, **source):
    data = DataConfig.model_validate({"max_document": max_document})
    config = SourceConfig.model_validate({"path": str(file), **source})
    return list(read_or_reject(reader, SourceFile(file, file.name, "set", config, data)))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def rows_of(folder: Path, rows, name="a.jsonl") -> Path:
    file = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def read_rows(reader, format: str, folder: Path, *rows, **source):
    """What a format's reader makes of these rows, in a.jsonl."""
    return read(reader, rows_of(folder, rows), format=format, **source)


def turns(item):
    assert isinstance(item, Record), item
    return [(message.role, message.content) for message in item.fields.messages]


def sides(item):
    assert isinstance(item, Record), item
    fields = item.fields
    prompt = [(message.role, message.content) for message in fields.prompt]
    return prompt, fields.chosen and fields.chosen.content, fields.rejected and fields.rejected.content


def bad(found):
    """(origin, reason) of what was rejected; each says what is wrong and what to do."""
    rejected = [item for item in found if isinstance(item, Rejected)]
    assert all("; " in item.detail or item.reason == "unreadable" for item in rejected), rejected
    return [(item.origin, item.reason) for item in rejected]


def documents(**data):
    """(documents, ledger) of a run's `data`, all of it for training unless it says otherwise."""
    ledger = Ledger()
    kept = list(read_documents(DataConfig.model_validate({"validation": 0.0, **data}), ledger))
    ledger.check()
    return kept, ledger


def message(role, content, **more):
    return {"role": role, "content": content, **more}


# The same short talk as the kinds of files have it, and as it is read.
MESSAGES = [message("user", "who?"), message("assistant", "me")]
SHAREGPT = [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]
PROMPT = [("user", "who?")]


def parquet(columns):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


def warc(*entries):
    """Of (type, content type, block) each."""
    head = "WARC/1.0\r\nWARC-Type: {}\r\nWARC-Target-URI: http://a/\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
    return b"".join(head.format(kind, of, len(block)).encode() + block + b"\r\n\r\n" for kind, of, block in entries)


def read_in_spans(file, size, **source):
    """What the parts of a file of about `size` bytes hold, its places as `artel prepare` tells them."""
    data = DataConfig.model_validate({"sources": [{"path": str(file), **source}], "max_document": 50_000})
    entries, before, spans = [], 0, 0
    for part in input_shards(data, size):
        prepared = PreparedShard(file, np.empty(0), {}, before)
        entries += [
            (type(item), getattr(item, "text", ""), getattr(item, "detail", ""), prepared.origin(item.origin))
            for item in read_shard(part, data)
        ]
        span = part.inputs[0].span
        before += count_lines(file, span) if span else 0
        spans += span is not None
    return entries, spans
