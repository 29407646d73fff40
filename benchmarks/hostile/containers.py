"""Containers: packed files, tables, archives of pages, JSON; whole, cut, lying, and made to unpack without end."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import zstandard
from mutations import change_bytes

from hostile.case import GB, Family, Place, Steps, check, ends, refused, small, works
from hostile.given import add_rows, given
from hostile.made import json_lines
from hostile.results import ledger, prepared_texts, rejected

family = Family("containers")

LINES = json_lines([{"text": f"words of document {number}"} for number in range(300)]).encode()
PACKS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "zst": zstandard.compress, "xz": lzma.compress, "bz2": bz2.compress,
}  # fmt: skip


def damaged(name: str, content: bytes, place: Place) -> Steps:
    """Refused, or what came before the damage is kept, and the damage listed and said."""
    place.write(name, content)
    done = yield ends({0, 2}, "prepare", place.run(small(name)), says=("is damaged here",))
    if done.status == 0:
        check(ledger(place)["dropped"] == {"truncated": 1} and len(rejected(place)) == 1, ledger(place))


REFUSED, READ = refused("prepare", "run.yaml"), works("prepare", "run.yaml")


def _add(name: str, file: str, content: bytes, kept: int | None = None, **source: Any) -> None:
    """Refused (`kept` is None), or so many documents."""
    command = REFUSED if kept is None else READ
    family.add(name, given(command, files={file: content}, text={"path": file, **source}, kept=kept))


for _suffix, _pack in PACKS.items():
    _path, _packed = f"a.jsonl.{_suffix}", _pack(LINES)
    family.add(f"{_suffix}-cut", damaged, _path, _packed[: len(_packed) * 2 // 3])
    _add(f"{_suffix}-of-two-members", _path, _packed + _pack(LINES.replace(b"words", b"other")), 600)
add_rows(family, "refused", REFUSED)
add_rows(family, "read", READ)
_PACKED = gzip.compress(LINES)
_add("xz-that-is-plain", "a.jsonl.xz", LINES)
family.add("gz-with-garbage-behind", damaged, "a.jsonl.gz", _PACKED + b"garbage, no member" * 9)
_add("zst-changed-in-the-middle", "a.jsonl.zst", zstandard.compress(LINES)[:200] + bytes(400))
_add("gz-named-zst", "a.jsonl.zst", gzip.compress(LINES))
_add(
    "zst-that-wants-a-dictionary",
    "a.txt.zst",
    zstandard.ZstdCompressor(dict_data=zstandard.ZstdCompressionDict(LINES)).compress(LINES),
)
_add("gz-within-gz", "a.txt.gz", gzip.compress(gzip.compress(LINES)))
_add(
    "gz-with-a-forging-name",
    "a.txt.gz",
    b"\x1f\x8b\x08\x08\0\0\0\0\0\xff\nFORGED\x1b[2J\0" + gzip.compress(b"words")[10:-1],
)


def _zip(name: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, LINES)
    return stream.getvalue()


_add("zip", "a.zip", _zip("../../executed"))
_add("zip-named-txt", "a.txt", _zip("a.txt"))


# Made to unpack without end; what is counted is the memory of a process of its own


def bounded(name: str, make: Callable[[], bytes], most: int, place: Place) -> Steps:
    """Refused, or read, within so much memory and never silent."""
    place.write(name, make())
    yield ends({0, 2}, "prepare", place.run(small(name)), fresh=True, memory=most)


def _bomb(name: str, make: Callable[[], bytes], most: int = GB + 200_000_000) -> None:
    family.add(f"bomb-{name.replace('.', '-')}", bounded, name, make, most, quick=False)


def _zeros_zst(data: bytes, times: int) -> bytes:
    stream = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(stream, closefd=False) as writer:
        for _ in range(times):
            writer.write(data)
    return stream.getvalue()


_bomb("spaces.jsonl.gz", lambda: gzip.compress(b'{"text": "one"}\n' + b" " * 600_000_000, 1))
_bomb("line-breaks.txt.zst", lambda: _zeros_zst(b"\n" * 10_000_000, 35))
_bomb("divs.html", lambda: b"<div>" * 20_000_000, GB + 500_000_000)
_bomb("document-of-50-mb.txt", lambda: b"a word " * 7_000_000, GB + 300_000_000)
_bomb("brackets.json", lambda: b"[" * 5_000_000)
_bomb("columns.csv", lambda: b"a," * 2_000_000 + b"text\n" + b"b," * 2_000_000 + b"words\n")
_bomb("quote-left-open.csv", lambda: b'text\n"' + b"words of it\n" * 4_000_000)


# Tables


def _parquet(columns: dict[str, Any], **more: Any) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), stream, **more)
    return stream.getvalue()


TEXTS = [f"words of row {number}" for number in range(50)]
_TABLE = _parquet({"text": TEXTS})


def _two_columns() -> bytes:
    stream = io.BytesIO()
    schema = pa.schema([("text", pa.string()), ("text", pa.string())])
    pyarrow.parquet.write_table(pa.table([TEXTS, TEXTS], schema=schema), stream)
    return stream.getvalue()


def _broken_text() -> bytes:
    column = pa.array([b"words", b"\xff\xfe", b"more words"], pa.binary()).view(pa.string())
    return _parquet({"text": column})


_add("parquet-cut", "a.parquet", _TABLE[:-20])
_add("parquet-without-its-end", "a.parquet", _TABLE[:200])
_add("parquet-that-is-text", "a.parquet", LINES)
_add("parquet-encrypted", "a.parquet", _TABLE[:-4] + b"PARE")
_add("parquet-footer-that-lies", "a.parquet", _TABLE[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1")
_add("parquet-two-columns-of-a-name", "a.parquet", _two_columns())
_add("parquet-of-numbers", "a.parquet", _parquet({"text": list(range(50))}))
_add("parquet-of-lists", "a.parquet", _parquet({"text": [[text] for text in TEXTS]}))
_add("parquet-of-nulls", "a.parquet", _parquet({"text": pa.array([None] * 9, pa.string())}))
_add("parquet-column-that-forges", "a.parquet", _parquet({"\nFORGED\x1b[2J": TEXTS}))
_add("parquet-broken-text", "a.parquet", _broken_text(), 2)


# JSON and pages

_add("jsonl-named-json", "a.json", LINES, 300)
_add("jsonl-taken-for-parquet", "a.jsonl", LINES, format="parquet")
_WARC = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: %s\r\n\r\n%s\r\n\r\n"
for _name, _length in (("lies-long", b"99999"), ("lies-below-nothing", b"-5"), ("lies-huge", b"9" * 30)):  # fmt: skip
    _add(f"warc-length-{_name}", "a.warc", _WARC % (_length, b"words of a page"))
_add(
    "warc-address-that-forges",
    "a.warc",
    _WARC.replace(b"Content-Length", b"WARC-Target-URI: http://x/\x1b[2J\rFORGED\r\nContent-Length")
    % (b"5", b"\xff\xfe\xff\xfe\xff"),
)


def changed(suffix: str, whole: bytes, seed: int, place: Place) -> Steps:
    """Some bytes changed: refused, or the ledger adds up and each text is what a store can hold."""
    place.write(f"a.{suffix}", change_bytes(whole, Random(f"{suffix}:{seed}")))
    done = yield ends({0, 2}, "prepare", place.run(small(f"a.{suffix}")))
    if done.status == 0:
        check(len(prepared_texts(place)) == ledger(place)["kept"], ledger(place))


for _suffix, _whole in {"parquet": _TABLE, "jsonl.gz": gzip.compress(LINES), "jsonl.xz": lzma.compress(LINES),
                        "jsonl.zst": zstandard.compress(LINES), "jsonl.bz2": bz2.compress(LINES),
                        "warc": _WARC % (b"5", b"words")}.items():  # fmt: skip
    family.add(f"bytes-changed-{_suffix.replace('.', '-')}-0", changed, _suffix, _whole, 0)


@family.slow
def parquet_that_unpacks_to_2_gb(place: Place) -> Steps:
    place.write("a.parquet", _parquet({"text": ["x" * 20_000_000] * 100}, compression="zstd", use_dictionary=True))
    two = 2 * (GB + 4 * 20_000_000)  # two processes, each with what docs/text.md says
    yield ends({0, 2}, "prepare", place.run(small("a.parquet")), fresh=True, memory=two)
