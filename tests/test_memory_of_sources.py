"""Memory of reading: at most 1 GB beside four times the size of the largest document, for each kind of source."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from artel.config import TokenizerTraining
from artel.errors import InputError
from artel.text.cleaning.html import MAX_TAGS, html_to_text
from artel.text.formats import parquet
from artel.text.records import BadRecord
from artel.tokens import train_tokenizer
from artel.tokens.tokenizer.train import split_long_text
from support.reading import read, read_texts, warc, written
from support.runs import ENVIRONMENT
from support.stores import bytes_tokenizer

SIZE = 50_000_000
_PEAK = """
import resource, subprocess, sys
status = subprocess.run([sys.executable, "-m", "artel", "prepare", sys.argv[1]]).returncode
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, "status", status)
"""


def peak(folder, file, tokenizer=None, **source):
    """(peak memory of the largest process in MB, exit status, what was said) of preparing a file."""
    run = {
        "run": str(folder / "run"),
        "prepare": {"workers": 1},
        "model": {"config": {"model_type": "gpt2"}},
        "tokenizer": tokenizer or {"from": str(bytes_tokenizer(folder))},
        "data": {"sources": [{"path": str(file), **source}], "store": str(folder / "stores"), "validation": 0},
    }
    run_file = written(folder, "run.yaml", json.dumps(run))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(run_file)], capture_output=True, text=True, timeout=600, env=ENVIRONMENT
    )
    words = done.stdout.split()
    return int(words[words.index("peak") + 1]), int(words[-1]), done.stderr


@pytest.mark.processes
def test_a_page_of_tags_alone_is_no_text(tmp_path):
    (tmp_path / "a.html").write_bytes(b"<div>" * 20_000_000)
    memory, status, output = peak(tmp_path, tmp_path / "a.html")
    assert status == 2
    assert "has 20,000,000 tags, more than the maximum of 1,000,000" in output
    assert memory < 1400
    with pytest.raises(BadRecord):
        html_to_text(b"<p>x" * (MAX_TAGS + 1))
    assert html_to_text(b"<p>x" * 50_000).count("\n") == 49_999


def test_a_tokenizer_is_trained_on_pieces_that_have_the_same_words(shared_data):
    text = (shared_data / "literature/oblomov.txt").read_text()[:200_000]
    assert list(split_long_text(text)) == [text]
    pieces = list(split_long_text(text, 1000))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 2000
    for pattern in ("gpt2", "gpt4", "whitespace"):
        settings = TokenizerTraining(vocab=1000, pattern=pattern)
        whole = train_tokenizer(iter([text]), settings).fingerprint
        assert train_tokenizer(iter(pieces), settings).fingerprint == whole
    assert [len(piece) for piece in split_long_text("x" * 5000, 1000)] == [2000, 2000, 1000]  # one word


def rows_at_once(file, column):
    with parquet._open(file, "a") as opened:
        return parquet._choose_batch_rows(file, opened, [column])


def test_rows_of_parquet_are_taken_by_their_size(tmp_path):
    table = pyarrow.table({"text": ["x" * (1 << 20) + str(number) for number in range(80)], "other": range(80)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, row_group_size=40)
    assert rows_at_once(tmp_path / "a.parquet", "text") == 31
    assert rows_at_once(tmp_path / "a.parquet", "other") == 128
    assert len(read(parquet.read_parquet, tmp_path / "a.parquet")) == 80


def test_a_group_without_rows_says_nothing_of_their_size(tmp_path):
    table = pyarrow.table({"text": ["short"] * 200})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for rows in (table, table.slice(0, 0), table):
            writer.write_table(rows)
    assert rows_at_once(tmp_path / "a.parquet", "text") == 128


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_rows_of_parquet_that_repeat_a_large_value(tmp_path, version):
    """The file has each value once: 20 MB, by which 128 rows are 2.5 GB."""
    table = pyarrow.table({"text": ["x" * 20_000_000] * 10, "other": ["short"] * 10})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", data_page_version=version)
    assert rows_at_once(tmp_path / "a.parquet", "text") == 6
    assert rows_at_once(tmp_path / "a.parquet", "other") == 128


def test_a_file_is_no_larger_than_the_bytes_that_are_read_of_it(tmp_path):
    file = written(tmp_path, "a.html.zst", zstandard.compress(b"<p>" + b"x" * 5_000_000))
    with pytest.raises(InputError, match=r"its unpacked bytes are more than data\.max_document"):
        read_texts(file, format="html", max_document=1_000_000)


def _documents(folder, shared_data):
    """A file of each kind that holds one document of about SIZE bytes."""
    novel = (shared_data / "literature/anna_karenina.txt").read_text()
    text = (novel * 50).encode()[:SIZE].decode("utf-8", "ignore").replace('"', "")
    lines = text.split("\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [text] * 3}), folder / "a.parquet")
    return {
        "text": (written(folder, "a.txt", text), {"document": "file"}),
        "html": (written(folder, "a.html", "".join(f"<p>{line}</p>\n" for line in lines)), {}),
        "jsonl": (written(folder, "a.jsonl", json.dumps({"text": text}, ensure_ascii=False)), {}),
        "csv": (written(folder, "a.csv", f'text\n"{text}"\n'), {"format": "csv"}),
        "warc": (written(folder, "a.warc", warc(("conversion", "text/plain", text.encode()))), {}),
        "packed": (written(folder, "a.txt.zst", zstandard.compress(text.encode())), {"document": "file"}),
        "parquet": (folder / "a.parquet", {}),
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", ["text", "html", "jsonl", "csv", "warc", "packed", "parquet"])
def test_a_document_of_50_mb_takes_little_more_than_four_times_its_size(tmp_path, shared_data, kind):
    file, source = _documents(tmp_path, shared_data)[kind]
    memory, status, output = peak(tmp_path, file, {"train": {"vocab": 1000}}, **source)
    assert status == 0, output
    assert memory < 1000 + 4 * SIZE / 1e6
