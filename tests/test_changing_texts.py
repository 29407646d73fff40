"""Texts that change while they are read: a store holds one state of them, or none is made."""

import gzip
import os
import re
from functools import partial

import pytest
import zstandard

from artel.config import DataConfig, SourceConfig
from artel.errors import WorkError
from artel.messages import route_messages
from artel.preparing import prepare
from artel.preparing.progress import Progress, reporting
from artel.text import input_shards
from artel.text.reading.files import require_unchanged
from artel.text.sources.inputs import read_shard
from support.messages import logged
from support.reading import parquet, warc, written
from support.stores import run_of, stored

LINES = "".join(f'{{"text": "line {number}"}}\n' for number in range(3000))
PAGES = warc(*(("conversion", "text/plain", b"a page") for _ in range(300)))
FILES = {
    "a.jsonl": (LINES.encode(), {}),
    "a.jsonl.gz": (gzip.compress(LINES.encode()), {}),
    "a.txt": (LINES.encode(), {"document": "line"}),
    "whole.txt": (LINES.encode(), {}),
    "a.html": (b"<p>a<p>b", {"document": "line"}),
    "a.csv": (b"text\n" + b"x\n" * 3000, {"format": "csv"}),
    "a.parquet": (parquet({"text": ["x" * 1000] * 3000}), {}),
    "a.warc": (PAGES, {}),
}


def rewritten_in_place(file):
    """The same size, the time of change set back."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"?")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def wait_for_its_clock(folder):
    """Until what is written now has a later time than what was written before: some file systems tick every 10 ms."""
    before = written(folder, "clock", "").stat().st_ctime_ns
    while written(folder, "clock", "").stat().st_ctime_ns == before:
        pass


CHANGES = {
    "grows": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "shrinks": lambda file: os.truncate(file, 5),
    "is written over": rewritten_in_place,
    "is replaced": lambda file: (written(file.parent, "new", file.read_bytes()), (file.parent / "new").rename(file)),
    "goes": lambda file: file.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_changes_while_it_is_read(tmp_path, name, change):
    content, source = FILES[name]
    file = written(tmp_path, name, content)
    data = DataConfig(sources=[SourceConfig(path=[str(file)], **source)])
    for part in input_shards(data):
        records = read_shard(part, data)
        next(records)
        wait_for_its_clock(tmp_path)
        CHANGES[change](file)
        with pytest.raises(WorkError, match=rf"{name}: (changed|was removed).* while it was being read"):
            list(records)
    if change != "goes":  # and what was planned with the file of before is not read with that of now
        os.utime(file, ns=(1, 1))
        with pytest.raises(WorkError, match=f"{name}: changed"):
            list(read_shard(part, data))


@pytest.mark.parametrize("stage", ["training the tokenizer", "turning text into tokens", "writing the store"])
@pytest.mark.parametrize("new", [None, "b.jsonl"])
def test_no_store_is_made_of_two_states(tmp_path, stage, new):
    written(tmp_path, "a.jsonl", LINES)
    files = {"sources": [{"path": str(tmp_path / "*.jsonl")}]}
    tokenizer = {"train": {"vocab": 300}}

    def change(record):
        if record.getMessage().startswith(stage):
            written(tmp_path, new or "a.jsonl", LINES.replace("line", "another line"))

    with route_messages(change), pytest.raises(WorkError, match=r"while it was being read|files changed while"):
        prepare(run_of(tmp_path, data=files, tokenizer=tokenizer))
    assert not list((tmp_path / "stores").glob("*/manifest.json"))
    documents, ledger = stored(tmp_path, data=files, tokenizer=tokenizer)
    assert ledger["documents"]["kept"] == (6000 if new else 3000)
    assert any(document.text.startswith("another") for document in documents)


def test_other_outputs_of_pairs_make_another_store(tmp_path):
    pairs = {
        "path": str(written(tmp_path, "in.txt", "a b\nc d\n")),
        "format": "pairs",
        "outputs": str(written(tmp_path, "out.txt", "a, b\nc d\n")),
    }
    run = run_of(tmp_path, data={"sources": [pairs]}, objective="masked", tokenizer={"train": {"vocab": 261}})
    first = prepare(run)
    written(tmp_path, "out.txt", "a, b\nc, d\n")
    second = prepare(run)
    assert second.is_new
    assert second.folder != first.folder


@pytest.mark.processes
def test_a_file_that_takes_long_shows_a_line_of_life(tmp_path, monkeypatch):
    """Line breaks without end, packed: no document comes of them, for a minute and a half."""
    monkeypatch.setattr("artel.preparing.run_tokenizer.reporting", partial(reporting, seconds=0.02))
    monkeypatch.setattr("artel.preparing.build_store.Progress", partial(Progress, seconds=0.02))
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"\n" * 3_000_000 + b"the only text\n" * 3 + b"another\n"))
    messages = logged()
    run = run_of(
        tmp_path,
        data={"sources": [{"path": str(tmp_path / "a.txt.zst"), "document": "line"}]},
        tokenizer={"train": {"vocab": 260}},
    )
    prepare(run)
    assert any(re.match(r"training the tokenizer: \d+ documents read \(\d+ s\)", line) for line in messages)
    assert "turning text into tokens: 0 of 1 parts" in messages


def test_a_change_that_leaves_the_size_is_not_told_by_the_size(tmp_path):
    file = written(tmp_path, "a.txt", "text")
    with pytest.raises(WorkError, match="same size, but another modification time"), require_unchanged(file):
        os.utime(file, ns=(0, 0))


@pytest.mark.parametrize("when", ["before it is looked at", "before it is opened"])
def test_a_file_that_is_gone_when_it_is_opened(tmp_path, when):
    file = tmp_path / "a.txt"
    if when == "before it is opened":
        file.write_text("words")

    def read():
        with require_unchanged(file):
            file.unlink(missing_ok=True)
            return file.read_bytes()

    with pytest.raises(WorkError, match=r"a\.txt: was removed while it was being read"):
        read()
