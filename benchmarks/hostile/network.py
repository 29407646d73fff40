"""Servers that drip, lie, redirect, reset and never end. All of them on loopback."""

from __future__ import annotations

import gzip
import os
import pickle
import socket
import struct
import time
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from hostile.case import GB, SMALL, Family, Place, Steps, check, ends, merged, source, works
from hostile.given import given, read_table
from hostile.results import has_whole_model, ledger, prepared_texts
from hostile.servers import Answer, always, head, serve

family = Family("network")

BODY = b"words of a text that came by the network\n" * 40
TEXT = BODY.decode().strip()


def keys(address: str, **more: Any) -> dict[str, Any]:
    return merged(SMALL, source(address, **more))


def fetched(answer: Answer, right: set[int], place: Place, text: str = TEXT) -> Steps:
    """Where it works, what is read is the whole body."""
    address = serve(place, answer)
    done = yield ends(right, "prepare", place.run(keys(f"{address}/a.txt")), memory=GB + 700_000_000, seconds=150)
    if done.status == 0:
        check(prepared_texts(place) == [text], f"{len(prepared_texts(place)[0])} letters of {len(text)}")


def _add(name: str, answer: Answer, right: set[int] | None = None, *, text: str = TEXT, quick: bool = True) -> None:
    family.add(name, partial(fetched, answer, right or {1, 2}, text=text), quick=quick)


for _name, _row in read_table(family, "answers").items():
    _head = _row["raw"].encode("latin-1") if "raw" in _row else head(_row["status"], **_row.get("headers", {}))
    _data = _head + BODY if _row.get("body", True) else _head
    _add(_name, always(_data), set(_row.get("right", ())), quick="slow" not in _row)
_add("length-too-short", always(head(Content_Length=100) + BODY), {0, 1, 2}, text=TEXT[:100].strip())
_add("no-answer", lambda connection, request: None, quick=False)


def _around(connection: socket.socket, request: bytes) -> None:
    path = request.split(b" ")[1] if b" " in request else b"/"
    connection.sendall(head("302 Found", Location=(path + b"a").decode("latin-1"), Content_Length=0))


_add("redirect-without-end", _around)


def _bomb(connection: socket.socket, request: bytes) -> None:
    connection.sendall(head(Content_Encoding="gzip") + gzip.compress(b" " * 500_000_000, 1))


_add("gzip-bomb-of-an-encoding", _bomb, {0, 1, 2}, quick=False)


def _reset(connection: socket.socket, request: bytes) -> None:
    connection.sendall(head(Content_Length=len(BODY)) + BODY[:200])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


_add("resets", _reset, quick=False)


def _endless(connection: socket.socket, request: bytes) -> None:
    connection.sendall(head())
    until = time.monotonic() + 100
    while time.monotonic() < until:
        connection.sendall(b"words without end " * 60_000)


_add("body-without-end", _endless, quick=False)


def _drips(seconds: float) -> Answer:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(head(Content_Length=len(BODY)))
        for at in range(0, len(BODY), 100):
            connection.sendall(BODY[at : at + 100])
            time.sleep(seconds)

    return answer


_add("drips-and-ends", _drips(0.2), {0})


def _head_without_end(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for _ in range(600):
        connection.sendall(b"A: b\r\n")
        time.sleep(0.2)


_add("head-without-end", _head_without_end, quick=False)


def _silent(connection: socket.socket, request: bytes) -> None:
    connection.sendall(head(Content_Length=len(BODY)) + BODY[:100])
    time.sleep(120)


_add("falls-silent", _silent, quick=False)
_add("says-nothing", lambda connection, request: time.sleep(120), quick=False)


class _CutFirst:
    """The first connection is cut; how the rest is then given can be a lie."""

    def __init__(self, rest: str, body: bytes, tag: str = '"a"') -> None:
        self._rest, self._body, self._tag, self._first = rest, body, tag, True

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        ranged = b"range:" in request.lower()
        if not ranged:
            tag = '"a"' if self._first else self._tag
            sent = BODY[:800] if self._first else self._body
            connection.sendall(head(Content_Length=len(self._body), ETag=tag, Accept_Ranges="bytes") + sent)
            self._first = request.startswith(b"HEAD") and self._first
            return
        rest = self._body[800:]
        if self._rest == "other part":
            connection.sendall(head("206 Partial", Content_Range=f"bytes 0-{len(rest) - 1}/{len(self._body)}",
                                    Content_Length=len(rest), ETag=self._tag) + self._body[: len(rest)])  # fmt: skip
        elif self._rest == "whole":
            connection.sendall(head(Content_Length=len(self._body), ETag=self._tag) + self._body)
        elif self._rest == "other file":
            connection.sendall(head("206 Partial", Content_Range=f"bytes 800-{len(self._body) - 1}/{len(self._body)}",
                                    Content_Length=len(rest), ETag='"b"') + b"x" * len(rest))  # fmt: skip
        elif self._rest == "no range":
            connection.sendall(head("206 Partial", Content_Length=len(rest), ETag=self._tag) + rest)
        else:
            connection.sendall(head("416 Not Satisfiable", Content_Length=0))


def cut_first(rest: str, place: Place) -> Steps:
    yield from fetched(_CutFirst(rest, BODY), {0, 1, 2}, place)


for _rest in ("other part", "whole", "other file", "no range", "not satisfiable"):
    family.add(f"cut-then-{_rest.replace(' ', '-')}", cut_first, _rest, quick=False)


@family.case
def two_addresses_of_one_name(place: Place) -> Steps:
    address = serve(place, always(head(Content_Length=len(BODY)) + BODY))
    paths = [f"{address}/x/a.txt", f"{address}/y/a.txt?z=1"]
    yield works("prepare", place.run({"data": {**SMALL["data"], "sources": [{"path": paths}]},
        "tokenizer": SMALL["tokenizer"]}))  # fmt: skip
    check((ledger(place)["read"], ledger(place)["kept"]) == (2, 1), ledger(place))


def addressed(path: str, place: Place) -> Steps:
    address = serve(place, always(head(Content_Length=len(BODY)) + BODY))
    yield ends({0, 1, 2}, "prepare", place.run(keys(f"{address}/{path}")))
    check(not list(place.root.glob("executed*")), "a file was written outside of the cache")


family.add("address-of-10000-letters", addressed, f"{'a' * 10_000}.txt", quick=False)
family.add("address-that-leads-out-of-the-cache", addressed, "../../../../%2e%2e/executed")


@family.case
def address_with_line_breaks(place: Place) -> Steps:
    requests: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        connection.sendall(head(Content_Length=len(BODY)) + BODY)

    yield ends({0, 1, 2}, "prepare", place.run(keys(f"{serve(place, answer)}/a.txt HTTP/1.1\r\nX: y\r\nFORGED")))
    check(not any(b"\nX: y" in request for request in requests), f"a header of another's: {requests}")


family.table(
    port_where_nobody_listens=given(ends({1, 2}, "prepare", "run.yaml"), run=[keys("http://127.0.0.1:9/a.txt")])
)


@family.slow
def model_of_a_hub_that_lies(place: Place) -> Steps:
    address = serve(place, always(head(Content_Length=len(BODY), X_Repo_Commit="../../executed") + BODY))
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
    run = place.run({"model": {"config": None, "from": "some/model"}, "tokenizer": {"train": None}})
    yield ends({1, 2}, "train", run, environment=environment, fresh=True)


@family.slow
def bucket_that_lies(place: Place) -> Steps:
    listing = b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><ListBucketResult>&x;" * 50
    address = serve(place, always(head(Content_Type="application/xml", Content_Length=len(listing)) + listing))
    environment = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "S3CRET",
                   "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}  # fmt: skip
    done = yield ends({1, 2}, "prepare", place.run(keys("s3://bucket/a.txt")), environment=environment, fresh=True)
    check("S3CRET" not in done.err, done.err)


class _Evil:
    def __init__(self, trap: str) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trap}",)


def _strangers(place: Place, met: list[int], pid: int) -> None:
    """Everything that the run listens at is spoken to: with a pickle, with letters, with nothing."""
    run = psutil.Process(pid)
    words = (pickle.dumps(_Evil(str(place.trap))), b"\xff" * 5000, b"")
    for process in (run, *run.children(recursive=True)):
        listening: list[Any] = []
        with suppress(psutil.NoSuchProcess):  # a helper process may end meanwhile
            listening = process.net_connections("inet")
        for opened in listening:
            if opened.status == psutil.CONN_LISTEN:
                met.append(opened.laddr.port)
                for each in words:
                    with suppress(OSError), socket.create_connection(tuple(opened.laddr)[:2], timeout=2) as stranger:
                        stranger.sendall(each)


@family.slow
def strangers_at_a_run_of_two(place: Place) -> Steps:
    met: list[int] = []
    keys = {"train": {"steps": 100}, "checkpoint": {"every": 50, "keep": 2}}
    meeting = (lambda err: "steps of" in err, partial(_strangers, place, met))
    yield works("train", place.run(keys), "--nproc", 2, actions=(meeting,), fresh=True, seconds=200)
    check(has_whole_model(place), "no model was left")
    check(bool(met), "nobody listened")
